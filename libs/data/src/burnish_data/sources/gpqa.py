"""GPQA: questions of biology, physics and chemistry that a search does not answer (2311.12022).

Its authors ask that no example be shown in plain text where a model's training data may be
collected. So nothing here writes any of it to a disk, and no fixture holds any of it.
"""

from __future__ import annotations

import csv
import io
import random
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Literal

from burnish_data.files import open_rows
from burnish_data.messages import ProblemRow
from burnish_data.rows import ListRows, Rows
from burnish_data.sources._records import LETTER, Record, choice_problem, digest, text

Subset = Literal["diamond", "main", "extended"]

_COLUMNS = (
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)


def gpqa(
    source: str | Path = "Idavidrein/gpqa",
    *,
    subset: Subset = "diamond",
    seed: int = 0,
    password: str | None = None,
    system: str | None = LETTER,
) -> Rows[ProblemRow]:
    """GPQA as rows of task "gpqa"; the answer is a letter from A to D.

    Columns Question, Correct Answer, Incorrect Answer 1 to 3, Record ID, ... Each question's
    choices are in an order of their own, which the seed and the question decide. Licence: CC BY
    4.0, and a request not to reveal examples in plain text or images online.

    Args:
        source: a hub id (one must have agreed to the terms there; the rows are streamed into
            memory, not copied to the disk); the authors' own dataset.zip (encrypted; read in
            memory); a .csv, .json or .jsonl file, or a folder with gpqa_SUBSET.csv. Parquet and
            gzip are refused, since they are read by way of a copy on the disk.
        subset: "diamond" (198 questions), "main" (448) or "extended" (546).
        seed: of the order of the choices.
        password: of the zip file; the authors' README names it.
        system: the system message; None leaves it out.

    Raises:
        ValueError: another subset, another kind of file, or a zip file that cannot be read.
    """
    if subset not in ("diamond", "main", "extended"):
        raise ValueError(f'subset must be "diamond", "main" or "extended", got {subset!r}.')
    path = Path(source).expanduser()
    rows: Rows[dict[str, Any]]
    if path.suffix == ".zip":
        rows = ListRows(_zipped(path, subset, password), str(path))
    elif path.exists():
        file = path / f"gpqa_{subset}.csv" if path.is_dir() else path
        if file.suffix not in (".csv", ".json", ".jsonl"):
            raise ValueError(f"source must be a .zip, .csv, .json or .jsonl file, got {file}.")
        rows = open_rows(file, columns=_COLUMNS)
    else:
        # As a stream: a data set that is loaded otherwise leaves a copy in the cache on the disk.
        stream = open_rows(source, config=f"gpqa_{subset}", columns=_COLUMNS, streaming=True)
        rows = ListRows(stream, f"{source} (gpqa_{subset})")
    return rows.map(partial(_row, seed=seed, system=system))


def _zipped(path: Path, subset: str, password: str | None) -> list[dict[str, Any]]:
    """The records of one file of the zip."""
    name = f"gpqa_{subset}.csv"
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.namelist() if Path(member).name == name]
            if not members:
                raise ValueError(f"{path} must hold {name}, got {archive.namelist()}.")
            data = archive.read(members[0], pwd=password.encode() if password else None)
    except RuntimeError as error:  # of zipfile: no password, or a wrong one
        raise ValueError(f"password must be the one in GPQA's README, but {error}.") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} must be a zip file that can be read, but {error}.") from error
    return list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline="")))


def _row(record: Record, seed: int, system: str | None) -> ProblemRow:
    question, *choices = (text(record, name).strip() for name in _COLUMNS)
    key = record.get("Record ID") or digest(question)
    order = list(range(len(choices)))
    random.Random(f"{seed}/{key}").shuffle(order)
    shuffled = [choices[index] for index in order]
    return choice_problem("gpqa", question, shuffled, order.index(0), system=system, key=key)
