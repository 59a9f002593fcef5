"""Rows: what sources give, where each stands, and what becomes of bad ones."""

from __future__ import annotations

import operator
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar, overload

from tqdm.auto import tqdm

RowT = TypeVar("RowT")
NewRowT = TypeVar("NewRowT")
OnBadRow = Literal["error", "skip"]

_SHOWN = 120  # characters of what was got
_EXAMPLES = 5  # messages kept of each reason


class BadRowError(ValueError):
    """A row that cannot be used: where it stands, which column, what was expected, what was got.

    Args:
        expected: completes "expected ...".
        got: anything; shown by its repr, shortened.
        column: the column, or a path into it, such as "messages[2].content".
        where: file and line, say; usually given later, by `at`.
        reason: under which a skipped row is counted.
        hint: a sentence on what to do, which ends the message.
        num_rows: as how many it is counted: more than one where it swallowed others.
    """

    def __init__(
        self,
        expected: str,
        got: object,
        *,
        column: str | None = None,
        where: str | None = None,
        reason: str = "bad row",
        hint: str | None = None,
        num_rows: int = 1,
    ) -> None:
        self.expected, self.got, self.column, self.where = expected, got, column, where
        self.hint = hint
        self.reason, self.num_rows = reason, num_rows
        super().__init__(self._text())

    def at(self, where: str) -> BadRowError:
        """The same error with its place, unless it has one."""
        if self.where is not None:
            return self
        # A subclass may have its own arguments: the copy is made without its __init__.
        copy = type(self).__new__(type(self))
        copy.__dict__ = {**self.__dict__, "where": where}
        copy.args = (copy._text(),)
        return copy

    def __reduce__(self) -> Any:  # comes back whole from a worker process
        return _restore, (type(self), self.__dict__, self.args)

    def _text(self) -> str:
        column = None if self.column is None else f"column {self.column!r}"
        place = ", ".join(part for part in (self.where, column) if part)
        got = repr(self.got)
        if len(got) > _SHOWN:
            got = f"{got[:_SHOWN]}... ({len(got):,} characters)"
        hint = f" {self.hint[0].upper()}{self.hint[1:]}." if self.hint else ""
        return f"{place}{': ' if place else ''}expected {self.expected}, got {got}.{hint}"


def _restore(
    kind: type[BadRowError], state: dict[str, Any], arguments: tuple[str, ...]
) -> BadRowError:
    error = kind.__new__(kind, *arguments)
    error.__dict__, error.args = state, arguments
    return error


@dataclass
class Skipped:
    """How many rows were left out and why; add up with `+`."""

    counts: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, list[str]] = field(default_factory=dict)  # the first messages of each

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, error: BadRowError) -> None:
        """Count one row, or as many as are lost with it."""
        self.counts[error.reason] += error.num_rows
        kept = self.examples.setdefault(error.reason, [])
        if len(kept) < _EXAMPLES:
            kept.append(str(error))

    def __add__(self, other: Skipped) -> Skipped:
        names = {*self.examples, *other.examples}
        examples = {
            name: [*self.examples.get(name, []), *other.examples.get(name, [])][:_EXAMPLES]
            for name in sorted(names)
        }
        return Skipped(self.counts + other.counts, examples)

    def __str__(self) -> str:
        if not self.total:
            return "no row skipped"
        parts = [f"{count:,} {reason}" for reason, count in self.counts.most_common()]
        first = [f"\n  {messages[0]}" for messages in self.examples.values()]
        return f"{self.total:,} skipped ({', '.join(parts)}), for example:{''.join(first)}"


class Rows(Sequence[RowT]):
    """A sequence of rows, each made when it is asked for, that knows where each stands.

    A slice is again rows. Picklable, so that worker processes can read them themselves.
    """

    @abstractmethod
    def row(self, index: int) -> RowT:
        """The row at an index in [0, len)."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Where the row comes from, for error messages: "train.jsonl, line 7"."""

    @overload
    def __getitem__(self, index: int) -> RowT: ...

    @overload
    def __getitem__(self, index: slice) -> Rows[RowT]: ...

    def __getitem__(self, index: int | slice) -> RowT | Rows[RowT]:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        position = operator.index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        return self.row(position % len(self))

    def __iter__(self) -> Iterator[RowT]:
        # Sequence's own would take an IndexError of a function for the end of the rows.
        for index in range(len(self)):
            yield self.row(index)

    def map(self, function: Callable[[RowT], NewRowT]) -> Rows[NewRowT]:
        """These rows, each through a function when it is asked for; its errors get their place."""
        return MappedRows(self, function)

    def select(self, indices: Sequence[int]) -> Rows[RowT]:
        """The rows at these indices, each in [0, len), in this order.

        Raises:
            IndexError: an index that is not.
        """
        return SelectedRows(self, indices)


class ListRows(Rows[RowT]):
    """Rows held in memory; `name` begins their places."""

    def __init__(self, rows: Iterable[RowT], name: str = "rows") -> None:
        self._rows, self._name = list(rows), name

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> RowT:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"


class MappedRows(Rows[NewRowT], Generic[RowT, NewRowT]):
    """What a function makes of rows."""

    def __init__(self, rows: Rows[RowT], function: Callable[[RowT], NewRowT]) -> None:
        self._rows, self._function = rows, function

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> NewRowT:
        row = self._rows.row(index)
        try:
            return self._function(row)
        except BadRowError as error:
            raise error.at(self.where(index)) from error
        except Exception as error:
            error.add_note(f"{self.where(index)}: this row was being made")
            raise

    def where(self, index: int) -> str:
        return self._rows.where(index)


class SelectedRows(Rows[RowT]):
    """Some of the rows, in an order of their own."""

    def __init__(self, rows: Rows[RowT], indices: Sequence[int]) -> None:
        if len(indices) and not 0 <= min(indices) <= max(indices) < len(rows):
            raise IndexError(
                f"indices must be in [0, {len(rows)}), got from {min(indices)} to {max(indices)}"
            )
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, index: int) -> RowT:
        return self._rows.row(int(self._indices[index]))

    def where(self, index: int) -> str:
        return self._rows.where(int(self._indices[index]))


class ConcatenatedRows(Rows[RowT]):
    """One after the other."""

    def __init__(self, parts: Sequence[Rows[RowT]]) -> None:
        self._parts = list(parts)
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> RowT:
        part, position = self._find(index)
        return part.row(position)

    def where(self, index: int) -> str:
        part, position = self._find(index)
        return part.where(position)

    def _find(self, index: int) -> tuple[Rows[RowT], int]:
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        return part, index - self._ends[number] + len(part)


def check_rows(
    rows: Rows[RowT], *, on_bad_row: OnBadRow = "error", show_progress: bool = False
) -> tuple[Rows[RowT], Skipped]:
    """Make every row once; return those that can be made, and what was left out.

    Args:
        rows: any.
        on_bad_row: "error" raises the first error; "skip" leaves such rows out and counts them.
        show_progress: a bar with rate and ETA.

    Raises:
        BadRowError: see `on_bad_row`.
        ValueError: every row was bad, or another value of `on_bad_row`.
    """
    check_on_bad_row(on_bad_row)
    skipped = Skipped()
    good = array("q")
    for index in tqdm(range(len(rows)), desc="checking", unit="row", disable=not show_progress):
        try:
            rows.row(index)
        except BadRowError as error:
            placed = error.at(rows.where(index))
            if on_bad_row == "error":
                raise placed from error
            skipped.add(placed)
        else:
            good.append(index)
    if len(rows) and not good:
        raise ValueError(f"At least one row must be good, got none of {len(rows):,}: {skipped}")
    return (rows if len(good) == len(rows) else rows.select(good)), skipped


def check_on_bad_row(on_bad_row: object) -> None:
    """ValueError unless it is "error" or "skip"."""
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f'on_bad_row must be "error" or "skip", got {on_bad_row!r}.')
