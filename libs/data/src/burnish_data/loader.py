"""The order of the data, and how to come back to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from burnish_data._arguments import check_no_stream
from burnish_data._batches import (
    Batches,
    OwnBatches,
    Position,
    SamplerBatches,
    check_same,
    check_seed,
    epoch_order,
    whole_number,
)
from burnish_data._workers import Workers, as_num_workers

_SCHEMA_VERSION = 1

RowT = TypeVar("RowT")
RowT_co = TypeVar("RowT_co", covariant=True)


class RowSource(Protocol[RowT_co]):
    """What a loader reads: `Rows`, a list, a `datasets.Dataset`, a data set of torch's."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> RowT_co: ...


class Loader(Generic[RowT]):
    """Batches of rows, an epoch per loop::

        loader = Loader(rows, 8, seed=0, num_ranks=4, rank=rank, num_workers=2, collate=collate)
        for epoch in range(loader.epoch, num_epochs):
            for batch in loader:  # the rest of this epoch
                train_step(batch)
                state = loader.state_dict()

    **Order.** An epoch's order depends on nothing but (seed, epoch): it is the same on every rank
    and in every version. It is cut into global batches of `num_ranks * batch_size` rows, of which
    each rank gets its part. So ranks have the same number of batches, no row in common, and
    together all rows.

    **Remainder.** If the rows do not fill the last global batch of an epoch, its rows are shared
    out as evenly as possible, so that the last batch may be short, and on some ranks empty (then
    `collate` gets an empty list): a sum over all ranks counts every row once. With `drop_remainder`
    it is left out instead; `num_dropped` says how many rows that is in every epoch.

    **Resume.** `state_dict()` is where the loop stands, whatever worker processes have fetched
    ahead: `load_state_dict` goes on with the next batch, bit for bit. The state is the same on all
    ranks, and since it counts rows, `batch_size` and `num_ranks` may be others afterwards. Breaking
    out of a loop and looping again goes on in the same way.

    **A batch sampler** says instead which rows make a batch, as packing's `TokenBudgetBatchSampler`
    does::

        loader = Loader(PlannedDataset(rows), batch_sampler=sampler, collate=PackingCollator())

    It is any re-iterable of lists of indices, for this rank alone. If it has `set_epoch`, it is
    told the epoch; if it has `state_dict(num_used)` and `load_state_dict(state)`, it can refuse a
    resume. In any case a resume refuses batches that are not those used before.

    **Worker processes** make batches ahead, in order. A dead one is an error at once, and none is
    left when the loop ends by an error or Ctrl-C. They are spawned, so a script starts its loop
    under `if __name__ == "__main__":`, and they stay for the next epoch (`close` ends them).

    Args:
        rows: at least one; with workers, picklable (those of files are by path). Its
            `__getitems__(indices)` is used where it has one.
        batch_size: rows of a batch on one rank.
        seed: of the orders.
        shuffle: False keeps the order of `rows` in every epoch.
        num_ranks, rank: data-parallel ranks, and which of them this is.
        drop_remainder: see above.
        batch_sampler: instead of all of the above but `rows`.
        collate: makes of a list of rows what the loop gets; by default that is the list.
        num_workers: processes; 0 makes batches in this one.
        ahead: batches per worker that may be fetched ahead.

    Raises:
        ValueError: an argument is out of range, or arguments do not go together.
    """

    def __init__(
        self,
        rows: RowSource[RowT],
        batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_ranks: int = 1,
        rank: int = 0,
        drop_remainder: bool = False,
        batch_sampler: Any = None,
        collate: Callable[[list[RowT]], Any] | None = None,
        num_workers: int = 0,
        ahead: int = 2,
    ) -> None:
        check_no_stream(rows, "A loader")
        if not len(rows):
            raise ValueError("A loader needs at least one row, got none; check the source.")
        if (batch_size is None) == (batch_sampler is None):
            raise ValueError(
                f"A loader needs either a batch_size or a batch_sampler, got "
                f"{'neither' if batch_size is None else 'both'}; pass one."
            )
        self._num_workers = as_num_workers(num_workers, 0)
        self._ahead = whole_number(ahead, "ahead", 1)
        self._fetch = _Fetch(rows, collate)
        self._workers: Workers[list[int], Any] | None = None
        self._position = Position(0)
        self._batches: Batches
        own: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle,
            "num_ranks": num_ranks,
            "rank": rank,
            "drop_remainder": drop_remainder,
        }
        if batch_size is not None:
            self._batches = OwnBatches(len(rows), batch_size, **own)
            return
        given = [name for name, value in own.items() if value != _DEFAULTS[name]]
        if given:
            raise ValueError(
                f"With a batch_sampler the order and the ranks are its own, got "
                f"{', '.join(given)} as well; give them to the sampler."
            )
        self._batches = SamplerBatches(batch_sampler, len(rows))

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position.epoch

    @property
    def num_dropped(self) -> int:
        """Rows that every epoch leaves out, over all ranks: those of `drop_remainder`."""
        return self._batches.num_dropped if isinstance(self._batches, OwnBatches) else 0

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        return self._batches.num_batches()

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch."""
        positions: deque[Position] = deque()  # after each batch that is under way
        with closing(self._made(self._indices(positions))) as batches:
            for batch in batches:
                # Before the loop gets it: a state that is saved after its use counts it.
                here = self._position = positions.popleft()
                yield batch
                if self._position is not here:
                    raise RuntimeError(
                        "A loop over a loader must be its only one, got a loader that another loop "
                        "or load_state_dict has moved; begin a new loop."
                    )

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: plain values, for JSON."""
        return {
            "schema_version": _SCHEMA_VERSION,
            **self._batches.identity(),
            **self._batches.state(self._position),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader stood.

        Raises:
            ValueError: the other loader had other rows (by number), seed, shuffling or sampler,
                which are named with both values. The loader stays where it was.
        """
        check_same(state, {"schema_version": _SCHEMA_VERSION, **self._batches.identity()})
        self._position = self._batches.position(state)

    def close(self) -> None:
        """End the worker processes; a new loop starts new ones."""
        if self._workers is not None:
            self._workers.close()

    def _indices(self, positions: deque[Position]) -> Iterator[list[int]]:
        for indices, after in self._batches.rest(self._position):
            positions.append(after)
            yield indices

    def _made(self, indices: Iterator[list[int]]) -> Any:
        if not self._num_workers:
            return (self._fetch(one) for one in indices)
        if self._workers is None or self._workers.closed:
            self._workers = Workers(self._fetch, self._num_workers)
        return self._workers.map(indices, ahead=self._ahead)


_DEFAULTS = {"seed": 0, "shuffle": True, "num_ranks": 1, "rank": 0, "drop_remainder": False}


@dataclass(frozen=True)
class _Fetch(Generic[RowT]):
    """Makes a batch of its indices, here or in a worker."""

    rows: RowSource[RowT]
    collate: Callable[[list[RowT]], Any] | None

    def __call__(self, indices: list[int]) -> Any:
        # A data set may read the rows of a batch at once, and a plan's may want the plan that
        # the list of indices brings along.
        together = getattr(self.rows, "__getitems__", None)
        batch = together(indices) if together else [self.rows[index] for index in indices]
        return batch if self.collate is None else self.collate(batch)


class PromptLoader(Generic[RowT]):
    """Batches of rows, without end.

    Each epoch has its own order, which depends on nothing but (seed, epoch): it is the same on
    every rank. Batches run over the ends of epochs, so that no row is dropped.

    Args:
        rows: the data, at least one row.
        batch_size: rows in each batch; may exceed the number of rows.
        seed: of the orders.
        shuffle: False keeps the order of `rows` in every epoch.
    """

    def __init__(
        self, rows: Sequence[RowT], batch_size: int, *, seed: int, shuffle: bool = True
    ) -> None:
        check_no_stream(rows, "A loader")
        if len(rows) < 1 or batch_size < 1:
            raise ValueError(
                "A loader needs at least one row and a batch_size of at least 1, got "
                f"{len(rows)} rows and batch_size={batch_size}."
            )
        check_seed(seed)
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0  # rows given out since the beginning, over all epochs
        self._order = epoch_order(len(rows), seed, 0, shuffle)

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self._position // len(self._rows)

    def __iter__(self) -> Iterator[list[RowT]]:
        return self

    def __next__(self) -> list[RowT]:
        return [self._next_row() for _ in range(self._batch_size)]

    def state_dict(self) -> dict[str, int | bool]:
        """Where the loader stands: plain numbers, for JSON."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "num_rows": len(self._rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on where another loader stood. The batch size may differ.

        Raises:
            ValueError: the other loader had other rows (by number), seed or shuffling, or the
                position is no number of rows. The loader stays where it was.
        """
        own = self.state_dict()
        del own["position"]
        check_same(state, own)
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(
                f"position must be a number of rows, 0 or more, got {position!r}; restore the "
                "saved state or start anew."
            )
        self._position = position
        self._order = self._epoch_order()

    def _next_row(self) -> RowT:
        index = self._order[self._position % len(self._rows)]
        self._position += 1
        if self._position % len(self._rows) == 0:
            self._order = self._epoch_order()
        return self._rows[index]

    def _epoch_order(self) -> list[int]:
        return epoch_order(len(self._rows), self._seed, self.epoch, self._shuffle)
