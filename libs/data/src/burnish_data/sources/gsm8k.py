"""GSM8K: 8,792 word problems of grade-school mathematics (Cobbe and others, arXiv:2110.14168)."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from burnish_data.messages import Message, Row

_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_FORMATS = (".jsonl", ".parquet")

Located = tuple[str, object]
"""Where a record stands, for error messages, and the record."""


def gsm8k(
    source: str | Path = "bundled",
    *,
    split: Literal["train", "test"] = "train",
    num_rows: int | None = None,
    seed: int = 0,
    system: str | None = "Reason step by step. End with #### and the answer as a number.",
) -> list[Row]:
    """GSM8K as rows of task "gsm8k".

    `answer` is what stands after `####`, without commas. `level` is the number of calculations in
    the worked solution (at least 1).

    Args:
        source: "bundled" (the first 256 training and 128 test problems, which come with this
            library); a JSONL or Parquet file; a folder with `train.jsonl` or `train.parquet` and
            the like; or a hub id, such as "openai/gsm8k".
        split: "train" or "test". A file is read whatever it is.
        num_rows: draw this many rows at random, without repetition; None is all, in order.
        seed: of that draw.
        system: the system message; None leaves it out.

    Raises:
        ValueError: a bad row (file, line, column, what was expected), no such file, or too few
            rows.
    """
    rows = [
        _row(where, record, f"gsm8k/{split}/{index}", system)
        for index, (where, record) in enumerate(_records(source, split))
    ]
    if num_rows is None:
        return rows
    if not 0 <= num_rows <= len(rows):
        raise ValueError(
            f"num_rows must be at most the number of rows in {source} ({split}), which is "
            f"{len(rows)}, got {num_rows}."
        )
    return random.Random(seed).sample(rows, num_rows)


def _records(source: str | Path, split: str) -> Iterator[Located]:
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    if source == "bundled":
        with as_file(files("burnish_data") / "bundled" / "gsm8k" / f"{split}.jsonl") as path:
            yield from _jsonl_records(path)
        return
    path = Path(source)
    if path.is_dir():
        path = _file_of_split(path, split)
    if path.suffix not in _FORMATS:
        yield from _hub_records(str(source), split)
    elif not path.is_file():
        raise ValueError(f"source must be a file that exists, a folder or a hub id, got {path}.")
    elif path.suffix == ".jsonl":
        yield from _jsonl_records(path)
    else:
        yield from _parquet_records(path)


def _file_of_split(folder: Path, split: str) -> Path:
    names = [split + suffix for suffix in _FORMATS]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"The folder {folder} must hold one of {names}, and it holds neither.")


def _jsonl_records(path: Path) -> Iterator[Located]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line.strip())
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}, character {error.colno}: expected a JSON object, got: {error.msg}."
                ) from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: expected UTF-8, but {error}.") from error
            yield where, record


def _parquet_records(path: Path) -> Iterator[Located]:
    from pyarrow import parquet

    for number, record in enumerate(parquet.read_table(path).to_pylist(), start=1):
        yield f"{path}, row {number}", record


def _hub_records(hub_id: str, split: str) -> Iterator[Located]:
    from datasets import load_dataset

    for number, record in enumerate(load_dataset(hub_id, "main", split=split), start=1):
        yield f"{hub_id} ({split}), row {number}", record


def _row(where: str, record: object, row_id: str, system: str | None) -> Row:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: expected an object with question and answer, got {record!r}.")
    question = _text(where, record, "question")
    solution = _text(where, record, "answer")
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    if "####" not in solution or not _NUMBER.fullmatch(answer):
        raise ValueError(
            f"{where}, column 'answer': expected a number after ####, got {solution[-60:]!r}."
        )
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


def _text(where: str, record: Mapping[str, object], column: str) -> str:
    if column not in record:
        raise ValueError(f"{where}: expected a column {column!r}, got columns {list(record)}.")
    value = record[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}, column {column!r}: expected text, got {value!r}.")
    return value
