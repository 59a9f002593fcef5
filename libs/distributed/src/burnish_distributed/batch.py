"""The ragged batch: what travels between processes. Flat columns plus lengths; no padding, ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RaggedBatch:
    """Sequences of different lengths as flat columns.

    Attributes:
        lengths: int64 [N], tokens of each sequence.
        token_columns: name -> [T] array with one value a token, sequences one after the other
            (T = sum of lengths). Index t is about token t in every column.
        sequence_columns: name -> [N] array with one value a sequence.

    Raises:
        ValueError: if a column is no NumPy array or does not fit ``lengths``, or these are no
            counts.

    Example:
        >>> batch = RaggedBatch.from_rows([{"token_ids": [5, 6]}, {"token_ids": [7]}])
        >>> batch.lengths.tolist(), batch.token_columns["token_ids"].tolist()
        ([2, 1], [5, 6, 7])
    """

    lengths: npt.NDArray[np.int64]
    token_columns: Mapping[str, Array]
    sequence_columns: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            not isinstance(self.lengths, np.ndarray)
            or not np.issubdtype(self.lengths.dtype, np.integer)
            or self.lengths.ndim != 1
            or (self.lengths < 0).any()
        ):
            raise ValueError(
                f"lengths must be a one-dimensional integer array of counts, got {self.lengths!r}; "
                "give one non-negative length per sequence"
            )
        _check_sizes(self.token_columns, self.num_tokens, "token", "sum of lengths")
        _check_sizes(self.sequence_columns, self.num_sequences, "sequence", "number of sequences")

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 [N+1]: sequence i lies at ``offsets[i]:offsets[i+1]`` of every token column."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Sequence[Any] | Array]],
        sequence_columns: Mapping[str, Sequence[Any] | Array] | None = None,
    ) -> RaggedBatch:
        """Build a batch from one mapping of equal-length columns per sequence.

        Raises:
            ValueError: if there are no rows, rows differ in their columns, or the columns of one
                row differ in length.
        """
        if not rows:
            raise ValueError(
                "a batch must hold at least one sequence, got none; skip empty batches"
            )
        names = list(rows[0])
        for i, row in enumerate(rows):
            sizes = {name: len(column) for name, column in row.items()}
            if row.keys() != rows[0].keys() or len(set(sizes.values())) != 1:
                raise ValueError(
                    f"every row must have the columns {names} in equal length, got {sizes} "
                    f"in row {i}; align them to the tokens before batching"
                )
        lengths = np.array([len(row[names[0]]) for row in rows], dtype=np.int64)
        # An empty list says nothing of its dtype (NumPy takes float64), so it has no say in it.
        filled = [row for row, length in zip(rows, lengths, strict=True) if length] or rows[:1]
        token_columns = {
            name: np.concatenate([np.asarray(row[name]) for row in filled]) for name in names
        }
        columns = {name: np.asarray(values) for name, values in (sequence_columns or {}).items()}
        return cls(lengths, token_columns, columns)

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> RaggedBatch:
        """The sequences at ``indices``, in that order.

        Raises:
            ValueError: if they are no whole numbers (a mask is none), or out of range.
        """
        chosen = np.asarray(indices)
        if chosen.shape == (0,):  # an empty list says nothing of its dtype
            chosen = chosen.astype(np.int64)
        whole = chosen.ndim == 1 and np.issubdtype(chosen.dtype, np.integer)
        if not whole or ((chosen < 0) | (chosen >= self.num_sequences)).any():
            raise ValueError(
                f"indices must be whole numbers from 0 to {self.num_sequences - 1}, got {indices}; "
                "turn a boolean mask into indices with np.flatnonzero"
            )
        offsets = self.offsets
        spans = [np.arange(offsets[i], offsets[i + 1]) for i in chosen]
        positions = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        return RaggedBatch(
            self.lengths[chosen],
            {name: column[positions] for name, column in self.token_columns.items()},
            {name: column[chosen] for name, column in self.sequence_columns.items()},
        )

    def with_token_column(self, name: str, values: Array) -> RaggedBatch:
        """A copy with one more (or another) token column."""
        return RaggedBatch(
            self.lengths, {**self.token_columns, name: values}, self.sequence_columns
        )

    def sequences(self, name: str) -> list[Array]:
        """The token column ``name``, one array per sequence."""
        parts = np.split(self.token_columns[name], self.offsets[1:])
        return parts[:-1]  # the last is what follows the last sequence: nothing


def _check_sizes(columns: Mapping[str, Array], expected: int, kind: str, what: str) -> None:
    for name, column in columns.items():
        if not isinstance(column, np.ndarray):
            raise ValueError(
                f"{kind} column {name!r} must be a NumPy array, got a {type(column).__name__}; "
                "convert it with np.asarray"
            )
        if column.shape[:1] != (expected,):
            raise ValueError(
                f"{kind} column {name!r} must have {expected} values ({what}), "
                f"got shape {column.shape}; align it with lengths"
            )
