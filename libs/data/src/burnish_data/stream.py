"""Rows that come one after the other, when a data set is too large to have at hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from burnish_data.rows import BadRowError, OnBadRow, Rows, Skipped, check_on_bad_row

RowT = TypeVar("RowT")
NewRowT = TypeVar("NewRowT")

# Where a row comes from; and the row, or why there is none.
Item = tuple[str, RowT | BadRowError]


class RowStream(Generic[RowT]):
    """Rows in the order in which they come. It may be iterated again and again, always the same.

    `map`, `skip` and `shuffle` return new streams, which read when they are iterated.

    Args:
        make_items: begins anew and yields (place, row or BadRowError).
        on_bad_row: "error" raises a bad row's error when it comes; "skip" leaves it out.
    """

    def __init__(
        self, make_items: Callable[[], Iterable[Item[RowT]]], *, on_bad_row: OnBadRow = "error"
    ) -> None:
        check_on_bad_row(on_bad_row)
        self._make_items, self._on_bad_row = make_items, on_bad_row
        self.skipped = Skipped()  # what the latest iteration left out so far

    def __iter__(self) -> Iterator[RowT]:
        skipped = self.skipped = Skipped()
        for where, row in self._make_items():
            if not isinstance(row, BadRowError):
                yield row
            elif self._on_bad_row == "error":
                raise row.at(where)
            else:
                skipped.add(row.at(where))

    def map(self, function: Callable[[RowT], NewRowT]) -> RowStream[NewRowT]:
        """These rows, each through a function; its errors get the row's place."""

        def items() -> Iterator[Item[NewRowT]]:
            for where, row in self._make_items():
                yield where, _made(function, row, where)

        return RowStream(items, on_bad_row=self._on_bad_row)

    def skip(self, num_rows: int) -> RowStream[RowT]:
        """Without the first rows, bad ones among them: how to go on where a run left off.

        Raises:
            ValueError: fewer than 0.
        """
        if num_rows < 0:
            raise ValueError(f"num_rows must be 0 or more, got {num_rows}.")
        return RowStream(
            lambda: islice(self._make_items(), num_rows, None), on_bad_row=self._on_bad_row
        )

    def shuffle(self, seed: int | str, buffer_size: int = 10_000) -> RowStream[RowT]:
        """In an order that depends on the seed alone: each row drawn from the next `buffer_size`.

        Raises:
            ValueError: a buffer of less than 1.
        """
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {buffer_size}.")

        def items() -> Iterator[Item[RowT]]:
            generator = random.Random(seed)
            buffer: list[Item[RowT]] = []
            for item in self._make_items():
                if len(buffer) < buffer_size:
                    buffer.append(item)
                    continue
                drawn = generator.randrange(buffer_size)
                buffer[drawn], item = item, buffer[drawn]
                yield item
            generator.shuffle(buffer)
            yield from buffer

        return RowStream(items, on_bad_row=self._on_bad_row)

    def handle_bad_rows(self, on_bad_row: OnBadRow) -> RowStream[RowT]:
        """The same with another `on_bad_row`."""
        return RowStream(self._make_items, on_bad_row=on_bad_row)


def _made(
    function: Callable[[RowT], NewRowT], row: RowT | BadRowError, where: str
) -> NewRowT | BadRowError:
    if isinstance(row, BadRowError):
        return row
    try:
        return function(row)
    except BadRowError as error:
        return error.at(where)
    except Exception as error:
        error.add_note(f"{where}: this row was being made")
        raise


def stream_of(rows: Rows[RowT]) -> RowStream[RowT]:
    """Rows as a stream."""

    def items() -> Iterator[Item[RowT]]:
        for index in range(len(rows)):
            where = rows.where(index)
            try:
                yield where, rows.row(index)
            except BadRowError as error:
                yield where, error.at(where)

    return RowStream(items)


def stream_of_dataset(dataset: Iterable[Any], name: str) -> RowStream[dict[str, Any]]:
    """A `datasets.IterableDataset` as a stream of plain rows, as `DatasetRows` has them."""
    from burnish_data._arrow_files import plain, to_records

    tables: Iterable[Any] = dataset.with_format("arrow")  # type: ignore[attr-defined]

    def items() -> Iterator[Item[dict[str, Any]]]:
        for number, table in enumerate(tables, start=1):
            (record,) = to_records(table)
            yield f"{name}, row {number}", plain(record)

    return RowStream(items)
