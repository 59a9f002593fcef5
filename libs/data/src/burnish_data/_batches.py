"""Which rows make which batch of an epoch: the loader's own order, or a batch sampler's."""

from __future__ import annotations

import inspect
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Position:
    """How far an epoch is used: `used` rows of all ranks (own order) or batches (a sampler's)."""

    epoch: int
    used: int = 0
    checksum: int = 0  # of the used batches of a sampler, so that a resume notices other ones


class Batches(Protocol):
    """Either kind; a batch comes with the position after it."""

    def identity(self) -> dict[str, Any]:
        """What a saved state must agree on."""

    def num_batches(self) -> int: ...

    def rest(self, position: Position) -> Iterator[tuple[list[int], Position]]: ...

    def state(self, position: Position) -> dict[str, Any]: ...

    def position(self, state: Mapping[str, Any]) -> Position: ...


class OwnBatches:
    """Global batches of `num_ranks * batch_size` rows, cut from the order of (seed, epoch).

    Of each, rank r gets the r-th part. The last global batch of an epoch may be short: then its
    rows are shared out as evenly as possible, so that a rank may get an empty list; or it is left
    out (`drop_remainder`).
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        num_ranks: int,
        rank: int,
        drop_remainder: bool,
    ) -> None:
        whole_number(batch_size, "batch_size", 1)
        whole_number(num_ranks, "num_ranks", 1)
        whole_number(rank, "rank", 0)
        check_seed(seed)
        if rank >= num_ranks:
            raise ValueError(
                f"rank must be less than num_ranks, got rank {rank} of {num_ranks} ranks, which "
                f"count from 0; pass this process's own."
            )
        self._num_rows, self._size = num_rows, num_ranks * batch_size
        self._seed, self._shuffle = seed, shuffle
        self._rank, self._num_ranks, self._drop = rank, num_ranks, drop_remainder
        if not self._left(0):
            raise ValueError(
                f"With drop_remainder there must be rows for one batch on every rank, got "
                f"{num_rows} rows for {num_ranks} ranks x {batch_size}; make the batches smaller "
                f"or keep the remainder."
            )

    @property
    def num_dropped(self) -> int:
        return self._num_rows % self._size if self._drop else 0

    def identity(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows, "seed": self._seed, "shuffle": self._shuffle}

    def num_batches(self) -> int:
        return self._left(0)

    def rest(self, position: Position) -> Iterator[tuple[list[int], Position]]:
        order = epoch_order(self._num_rows, self._seed, position.epoch, self._shuffle)
        used = position.used
        for _ in range(self._left(used)):
            whole = order[used : used + self._size]
            start, end = (len(whole) * r // self._num_ranks for r in (self._rank, self._rank + 1))
            used += len(whole)
            yield whole[start:end], self._normal(position.epoch, used)

    def state(self, position: Position) -> dict[str, Any]:
        return {"epoch": position.epoch, "position": position.used}

    def position(self, state: Mapping[str, Any]) -> Position:
        epoch = whole_number(state.get("epoch"), "epoch", 0)
        used = whole_number(state.get("position"), "position", 0)
        if used >= self._num_rows:
            raise ValueError(
                f"position must be a number of rows below that of an epoch, {self._num_rows}, got "
                f"{used}; restore the saved state or start anew."
            )
        return self._normal(epoch, used)

    def _normal(self, epoch: int, used: int) -> Position:
        return Position(epoch, used) if self._left(used) else Position(epoch + 1)

    def _left(self, used: int) -> int:
        left = self._num_rows - used
        return left // self._size if self._drop else -(-left // self._size)


class SamplerBatches:
    """What a batch sampler gives, which is for this rank alone."""

    def __init__(self, sampler: Any, num_rows: int) -> None:
        if not isinstance(sampler, Iterable) or isinstance(sampler, Iterator):
            raise ValueError(
                f"batch_sampler must be iterable anew in every epoch, got a "
                f"{type(sampler).__name__}; pass a list of index lists, or an object whose "
                f"__iter__ begins an epoch."
            )
        self._sampler: Any = sampler
        self._num_rows = num_rows
        self._has_state = hasattr(sampler, "load_state_dict") and _takes_one(sampler, "state_dict")

    def identity(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows}

    def num_batches(self) -> int:
        return len(self._sampler)

    def rest(self, position: Position) -> Iterator[tuple[list[int], Position]]:
        self._set_epoch(position.epoch)
        batches = iter(self._sampler)
        self._skip(batches, position)
        # One batch ahead, to know the last one.
        used, checksum, batch = position.used, position.checksum, next(batches, None)
        if batch is None:
            raise ValueError(
                f"batch_sampler must give a batch in epoch {position.epoch} after the {used} that "
                f"are used, got none; give it rows, and after a resume the arguments it had."
            )
        while batch is not None:
            if any(index < 0 for index in batch):
                raise ValueError(
                    f"batch_sampler must give indices of rows, 0 or more, got {list(batch)} in "
                    f"epoch {position.epoch}; count them from the beginning."
                )
            used, checksum = used + 1, _checksum(batch, checksum)
            following = next(batches, None)
            is_last = following is None
            after = Position(position.epoch + 1) if is_last else None
            yield batch, after or Position(position.epoch, used, checksum)
            batch = following

    def state(self, position: Position) -> dict[str, Any]:
        state: dict[str, Any] = {
            "epoch": position.epoch,
            "num_used": position.used,
            "checksum": position.checksum,
        }
        if self._has_state:
            self._set_epoch(position.epoch)
            state["batch_sampler"] = self._sampler.state_dict(position.used)
        return state

    def position(self, state: Mapping[str, Any]) -> Position:
        names = ("epoch", "num_used", "checksum")
        position = Position(*(whole_number(state.get(name), name, 0) for name in names))
        if self._has_state:
            if "batch_sampler" not in state:
                raise ValueError(
                    "The state of this batch sampler must be in the loader's, got none; restore "
                    "the sampler that was saved, or start anew."
                )
            # To have it compared. Where to go on is the loader's to say, in `rest`.
            self._sampler.load_state_dict(state["batch_sampler"])
            self._sampler.load_state_dict(self._sampler.state_dict(0))
        return position

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def _skip(self, batches: Iterator[list[int]], position: Position) -> None:
        checksum = 0
        for _, batch in zip(range(position.used), batches, strict=False):
            checksum = _checksum(batch, checksum)
        if checksum != position.checksum:
            raise ValueError(
                f"batch_sampler must give again the {position.used} batches that are used of epoch "
                f"{position.epoch}, got others; give it the arguments and versions it had, or "
                f"start the epoch anew."
            )


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The rows in the order of an epoch, which depends on nothing else."""
    order = list(range(num_rows))
    if shuffle:
        # The standard library's, whose order has stayed the same over all its versions.
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def whole_number(value: object, name: str, least: int) -> int:
    """ValueError unless it is an integer of at least this."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name} must be a whole number, {least} or more, got {value!r}; pass one, or restore "
            f"the saved state."
        )
    return value


def check_seed(seed: object) -> None:
    """ValueError unless it is an integer: 1.0 would be another order than 1."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}; pass one.")


def check_same(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """ValueError, with both values, where a saved state differs from one's own."""
    for key, value in own.items():
        if state.get(key) != value:
            raise ValueError(
                f"A loader can go on only with the {key} it was saved with, which was "
                f"{state.get(key)}, but this one has {value}; restore that or start anew."
            )


def _checksum(batch: list[int], before: int) -> int:
    # The length as well: [1], [2] are other batches than [1, 2].
    return zlib.crc32(np.array([len(batch), *batch], "<i8").tobytes(), before)


def _takes_one(sampler: Any, name: str) -> bool:
    """Whether the sampler's method can be told how many batches are used.

    One that cannot says how many it gave out, which worker processes make more than were used.
    """
    method = getattr(sampler, name, None)
    if method is None:
        return False
    try:
        inspect.signature(method).bind(0)
    except TypeError:
        return False
    return True
