"""The order of the data, and how to come back to it."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

_SCHEMA_VERSION = 1

RowT = TypeVar("RowT")


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
        if len(rows) < 1 or batch_size < 1:
            raise ValueError(
                "A loader needs at least one row and a batch_size of at least 1, got "
                f"{len(rows)} rows and batch_size={batch_size}."
            )
        self._rows = rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0  # rows given out since the beginning, over all epochs
        self._order = self._epoch_order(0)

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
        for key in ("schema_version", "num_rows", "seed", "shuffle"):
            if state.get(key) != own[key]:
                raise ValueError(
                    f"A loader can go on only with the {key} it was saved with, which was "
                    f"{state.get(key)}, but this one has {own[key]}; restore that or start anew."
                )
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(
                f"position must be a number of rows, 0 or more, got {position!r}; restore the "
                "saved state or start anew."
            )
        self._position = position
        self._order = self._epoch_order(self.epoch)

    def _next_row(self) -> RowT:
        index = self._order[self._position % len(self._rows)]
        self._position += 1
        if self._position % len(self._rows) == 0:
            self._order = self._epoch_order(self.epoch)
        return self._rows[index]

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
