"""Mixtures: rows of several sources in exact shares, in an order that a seed decides."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from burnish_data._batches import check_seed
from burnish_data.rows import BadRowError, ListRows, Rows
from burnish_data.stream import RowStream

RowT = TypeVar("RowT")
KeyT = TypeVar("KeyT", bound=Hashable)

_LARGEST = 1e100  # sum of weights, so that their product with any number of rows is finite


class Mixture(Rows[RowT]):
    """What `mix` returns: rows, of which each knows its source.

    Attributes:
        counts: rows of each source.
        sizes: rows that each source has; of one with a larger count, rows come again.
    """

    def __init__(
        self,
        parts: Sequence[Rows[RowT]],
        names: Sequence[str],
        labels: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """`labels` (int32) and `positions` (int64): for each row its part, and where in it."""
        self._parts, self._names = list(parts), list(names)
        self._labels, self._positions = labels, positions
        counts = np.bincount(labels, minlength=len(parts))
        self.counts = {name: int(count) for name, count in zip(names, counts, strict=True)}
        self.sizes = {name: len(part) for name, part in zip(names, parts, strict=True)}

    def __len__(self) -> int:
        return len(self._labels)

    def row(self, index: int) -> RowT:
        return self._parts[self._labels[index]].row(int(self._positions[index]))

    def where(self, index: int) -> str:
        return self._parts[self._labels[index]].where(int(self._positions[index]))

    def source_of(self, index: int) -> str:
        """The name of the source that the row at this index, in [0, len), comes from."""
        return self._names[self._labels[index]]

    @property
    def num_repeated(self) -> int:
        """How many rows have come before."""
        return sum(max(0, count - self.sizes[name]) for name, count in self.counts.items())

    def __str__(self) -> str:
        parts = []
        for name, count in self.counts.items():
            size = self.sizes[name]
            times = f" ({count / size:.2f} times each)" if count > size else ""
            parts.append(f"{count:,} of {size:,} from {name}{times}")
        return f"{len(self):,} rows: {', '.join(parts)}"


def mix(
    sources: Mapping[str, Sequence[RowT]],
    weights: Mapping[str, float],
    *,
    num_rows: int,
    seed: int,
) -> Mixture[RowT]:
    """Rows of several sources, shared out by weight.

    The shares are exact: `num_rows * weight / sum of weights` to the nearest row, by largest
    remainders. Rows of a source are drawn without repetition until it is used up, then from all of
    it again, each time in another order; `str()` of what is returned says how often. A source's
    draw depends on its name, its size and the seed alone, so that other weights or sources draw the
    same rows of it, more or fewer. Memory: 12 bytes a row.

    Args:
        sources: rows by name; lists are rows, too.
        weights: by the same names, 0 or more, not all of them 0.
        num_rows: in all.
        seed: of the draws and of the order.

    Raises:
        ValueError: other names in one than in the other, bad weights, or a source without rows that
            has a share.
    """
    _check(sources, weights, num_rows)
    _check_kind(sources, False, "mix", "mix_streams")
    check_seed(seed)
    names = list(sources)
    parts = [_as_rows(sources[name], name) for name in names]
    counts = share_out(num_rows, {name: float(weights[name]) for name in names})
    for name, part in zip(names, parts, strict=True):
        if counts[name] and not len(part):
            raise ValueError(
                f"Source {name!r} must have rows, since its share is {counts[name]:,} of them, and "
                "it has none; give it weight 0."
            )
    sizes = np.array([counts[name] for name in names], dtype=np.int64)
    labels = np.repeat(np.arange(len(names), dtype=np.int32), sizes)
    _generator(seed, "order").shuffle(labels)
    positions = np.empty(num_rows, dtype=np.int64)
    for label, (name, part) in enumerate(zip(names, parts, strict=True)):
        positions[labels == label] = _draw(len(part), counts[name], seed, name)
    return Mixture(parts, names, labels, positions)


def mix_streams(
    streams: Mapping[str, RowStream[RowT]],
    weights: Mapping[str, float],
    *,
    num_rows: int,
) -> RowStream[RowT]:
    """Streams taken in turn, so that after any number of rows each share is right to
    about one row.

    A stream that ends begins anew. Shuffle the streams themselves before, if they are in an order;
    there is nothing else here to draw.

    Args:
        streams: by name.
        weights: by the same names, 0 or more, not all of them 0.
        num_rows: in all, bad rows among them.

    Raises:
        ValueError: other names in one than in the other, bad weights; and, when it is read, a
            stream without rows that has a share.
    """
    _check(streams, weights, num_rows)
    _check_kind(streams, True, "mix_streams", "mix")
    whole = sum(weights.values())
    shares = {name: weight / whole for name, weight in weights.items() if weight}

    def items() -> Iterator[tuple[str, RowT | BadRowError]]:
        running = {name: iter(streams[name]._make_items()) for name in shares}
        taken = dict.fromkeys(shares, 0)
        for number in range(1, num_rows + 1):
            name = max(shares, key=lambda one: shares[one] * number - taken[one])
            taken[name] += 1
            item = next(running[name], None)
            if item is None:
                running[name] = iter(streams[name]._make_items())
                item = next(running[name], None)
            if item is None:
                raise ValueError(f"Stream {name!r} must have rows, since it has a share.")
            yield item

    return RowStream(items)


def share_out(total: int, weights: Mapping[KeyT, float]) -> dict[KeyT, int]:
    """Whole shares in proportion to the weights that add up to `total` (largest remainders).

    Of equal remainders, those of the first keys are rounded up.
    """
    whole = sum(weights.values())
    exact = {key: total * weight / whole for key, weight in weights.items()}
    counts = {key: math.floor(share) for key, share in exact.items()}
    by_remainder = sorted(exact, key=lambda key: counts[key] - exact[key])
    for key in by_remainder[: total - sum(counts.values())]:
        counts[key] += 1
    return counts


def _draw(size: int, count: int, seed: int, name: str) -> np.ndarray:
    """`count` of `size` positions: whole permutations, each another, and the start of a last one.

    Returns int64 [count].
    """
    drawn = np.empty(count, dtype=np.int64)
    for epoch, start in enumerate(range(0, count, max(1, size))):
        order = _generator(seed, f"draw {epoch} of {name}").permutation(size)
        drawn[start : start + size] = order[: count - start]
    return drawn


def _generator(seed: int, purpose: str) -> np.random.RandomState:
    # RandomState, since NumPy promises that its numbers stay the same in all versions.
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=32).digest()
    return np.random.RandomState(np.frombuffer(digest, dtype="<u4").astype(np.uint32))


def _as_rows(rows: Sequence[RowT], name: str) -> Rows[RowT]:
    return rows if isinstance(rows, Rows) else ListRows(rows, name)


def _check_kind(
    sources: Mapping[str, object], wants_streams: bool, function: str, other: str
) -> None:
    for name, source in sources.items():
        if isinstance(source, RowStream) != wants_streams:
            what = "streams" if wants_streams else "rows that have a number"
            got = type(source).__name__
            raise ValueError(
                f"{function} must be given {what}, got a {got} as {name!r}; use {other}, or open "
                f"all of them {'with' if wants_streams else 'without'} streaming=True."
            )


def _check(sources: Mapping[str, object], weights: Mapping[str, float], num_rows: int) -> None:
    for name, value in (("sources", sources), ("weights", weights)):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{name} must be a mapping by name, got a {type(value).__name__}; pass "
                'mix({"chat": rows, "math": others}, {"chat": 2, "math": 1}, ...).'
            )
    if set(sources) != set(weights):
        raise ValueError(
            f"sources and weights must have the same names, got {sorted(sources)} and "
            f"{sorted(weights)}."
        )
    whole = sum(weights.values())
    if not all(weight >= 0 for weight in weights.values()) or not 0 < whole < _LARGEST:
        raise ValueError(
            f"weights must be finite numbers of 0 or more, not all of them 0, got {dict(weights)}."
        )
    if isinstance(num_rows, bool) or not isinstance(num_rows, numbers.Integral) or num_rows < 0:
        raise ValueError(f"num_rows must be a whole number, 0 or more, got {num_rows!r}.")
