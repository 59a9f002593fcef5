"""From a recipe's data to encoded rows in an order that can be resumed.

Other people's code and files are met here, before any process starts. Whatever they raise becomes a
`ConfigError` that names the key of the recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from burnish_data import BadRowError, Loader, Skipped, encode_rows
from burnish_distributed import rank
from burnish_trainer.checkpoint import read_state

from burnish_apps.shell.config import blame
from burnish_apps.supervised.config import SupervisedConfig

Row = Mapping[str, Any]
Before = Callable[[Sequence[Row]], Sequence[Row]]
After = Callable[[Any, Sequence[Row]], Any]
Encode = Callable[[Sequence[Any]], Sequence[Mapping[str, Any] | BadRowError]]


@dataclass(frozen=True)
class EncodedRows:
    """Rows as token ids.

    Attributes:
        rows: a `datasets.Dataset`. Its rows are what the app's ``encode`` gave, as NumPy arrays,
            with ``length`` and ``truncated`` beside every ``token_ids``, and ``row``, their number:
            those of the held-out rows go on from those that are trained.
        skipped: what was left out, and why.
        num_tokens: of all sequences.
        longest: tokens of the longest sequence.
        num_truncated: sequences that lost their end.
    """

    rows: Any
    skipped: Skipped
    num_tokens: int
    longest: int
    num_truncated: int

    def counts(self, name: str) -> dict[str, float]:
        """What there is, to log."""
        return {
            f"data/{name}_rows": float(len(self.rows)),
            f"data/{name}_tokens": float(self.num_tokens),
            f"data/{name}_skipped": float(self.skipped.total),
            f"data/{name}_truncated": float(self.num_truncated),
        }

    def __str__(self) -> str:
        cut = f", {self.num_truncated:,} sequences cut" if self.num_truncated else ""
        return (
            f"{len(self.rows):,} with {self.num_tokens:,} tokens, {self.longest:,} in the longest "
            f"sequence{cut}; {self.skipped}"
        )


def same(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows as they are."""
    return rows


def first(encoded: Any, _rows: Sequence[Row]) -> Any:
    """The encoded rows as they are."""
    return encoded


def load_data(
    config: SupervisedConfig, encode: Encode, before: Before = same, after: After = first
) -> tuple[EncodedRows, EncodedRows]:
    """Encoded rows to train on, and held-out ones; the functions are those of a `Task`.

    Raises:
        ConfigError: for a source that gives no rows, or rows that cannot be encoded.
    """
    data = config.data
    made: list[EncodedRows] = []
    for name, arguments in (("train", data.train), ("validation", data.validation)):
        with blame(f"data.source: no rows for data.{name}"):
            rows = data.source.make(**arguments)
            if isinstance(rows, str) or not isinstance(rows, Sequence):
                raise ValueError(f"must return a list of rows, got a {type(rows).__name__}")
            rows = before(rows)
            encoded, skipped = encode_rows(
                rows,
                encode,
                num_workers=data.num_workers,
                on_bad_row=data.on_bad_row,
                show_progress=rank() == 0 and sys.stderr.isatty(),
            )
            counts = counted(encoded, skipped, len(made[0].rows) if made else 0)
            made.append(replace(counts, rows=after(counts.rows, rows)))
    return made[0], made[1]


def counted(encoded: Any, skipped: Skipped, first: int = 0) -> EncodedRows:
    """A data set of `encode_rows`, numbered from ``first``, with what there is to say of it."""
    flat = encoded.flatten()  # chosen.length and rejected.length, of pairs
    lengths, truncated = (
        np.concatenate([flat[name] for name in flat.column_names if name.split(".")[-1] == told])
        for told in ("length", "truncated")
    )
    numbered = encoded.add_column("row", range(first, first + len(encoded)))
    return EncodedRows(
        rows=numbered.with_format("numpy"),
        skipped=skipped,
        num_tokens=int(lengths.sum()),
        longest=int(lengths.max()),
        num_truncated=int(truncated.sum()),
    )


def make_loader(config: SupervisedConfig, train: EncodedRows) -> Loader[Row]:
    """The order of the rows, where a run that is resumed left off."""
    loader: Loader[Row] = Loader(train.rows, config.training.batch_size, seed=config.seed)
    if config.resume_from:
        with blame("resume_from: the order of the rows cannot be restored"):
            loader.load_state_dict(read_state(Path(config.resume_from))["loader"])
    return loader


def endless(loader: Loader[Row]) -> Iterator[list[Row]]:
    """The rows of one step after another, epoch after epoch."""
    while True:
        yield from loader
