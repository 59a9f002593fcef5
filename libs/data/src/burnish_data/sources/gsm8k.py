"""GSM8K: 8,792 word problems of grade-school mathematics (Cobbe and others, arXiv:2110.14168)."""

from __future__ import annotations

import random
import re
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

from burnish_data.files import open_rows
from burnish_data.formats import prompt_response
from burnish_data.messages import ChatRow, Message, ProblemRow
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._records import Record, text

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_COLUMNS = ("question", "answer")
SYSTEM = "Reason step by step. End with #### and the answer as a number."


def gsm8k(
    source: str | Path = "bundled",
    *,
    split: Literal["train", "test"] = "train",
    num_rows: int | None = None,
    seed: int = 0,
    system: str | None = SYSTEM,
) -> list[ProblemRow]:
    """GSM8K as rows of task "gsm8k".

    `answer` is what stands after `####`, without commas. `level` is the number of calculations in
    the worked solution (at least 1). Licence: MIT.

    Args:
        source: "bundled" (the first 256 training and 128 test problems, which come with this
            library); a file; a folder with `train.jsonl` or `train.parquet` and the like; or a hub
            id, such as "openai/gsm8k".
        split: "train" or "test". A file is read whatever it is, and its name is in the ids.
        num_rows: draw this many rows at random, without repetition; None is all, in order.
        seed: of that draw.
        system: the system message; None leaves it out.

    Raises:
        BadRowError: a ValueError; a bad row (file, line, column, what was expected).
        ValueError: no such file, or too few rows.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    if source == "bundled":
        with as_file(files("burnish_data") / "bundled" / "gsm8k" / f"{split}.jsonl") as path:
            rows = _rows(open_rows(path), split, system)
    else:
        records = open_rows(source, split=split, config="main", columns=_COLUMNS)
        rows = _rows(records, _file_stem(source) or split, system)
    if num_rows is None:
        return rows
    if not 0 <= num_rows <= len(rows):
        raise ValueError(
            f"num_rows must be at most the number of rows in {source} ({split}), which is "
            f"{len(rows)}, got {num_rows}."
        )
    return random.Random(seed).sample(rows, num_rows)


def gsm8k_solutions(
    source: str | Path = "bundled",
    *,
    split: Literal["train", "test"] = "train",
    system: str | None = SYSTEM,
) -> Rows[ChatRow]:
    """GSM8K as chats: a problem, and its worked solution with the answer after ``####``.

    Args, errors: as those of `gsm8k`; a bad row raises when it is read.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    as_chat = prompt_response(*_COLUMNS, system=system)
    if source == "bundled":
        with as_file(files("burnish_data") / "bundled" / "gsm8k" / f"{split}.jsonl") as path:
            return open_rows(path, columns=_COLUMNS).map(as_chat)
    return open_rows(source, split=split, config="main", columns=_COLUMNS).map(as_chat)


def _file_stem(source: str | Path) -> str | None:
    """What a file is called, without its endings; None of what is no file."""
    path = Path(source).expanduser()
    return Path(path.name.removesuffix(".gz")).stem if path.is_file() else None


def _rows(records: Rows[dict[str, Any]], split: str, system: str | None) -> list[ProblemRow]:
    made = []
    for index, record in enumerate(records):
        try:
            made.append(_row(record, f"gsm8k/{split}/{index}", system))
        except BadRowError as error:
            raise error.at(records.where(index)) from error
    return made


def _row(record: Record, row_id: str, system: str | None) -> ProblemRow:
    question, solution = (text(record, name) for name in _COLUMNS)
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    if "####" not in solution or not _NUMBER.fullmatch(answer):
        raise BadRowError("a number after ####", solution[-60:], column="answer")
    prompt: list[Message] = [{"role": "user", "content": question}]
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
    return {
        "prompt": prompt,
        "answer": answer,
        "task": "gsm8k",
        "level": max(1, solution.count("<<")),
        "id": row_id,
    }
