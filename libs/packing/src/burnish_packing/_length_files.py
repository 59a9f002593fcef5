"""Lengths from a file: a saved array, or a row of JSON per line."""

import codecs
import json
from pathlib import Path
from typing import Any

import numpy as np

from burnish_packing._checks import MAX_TOKENS, IntArray, as_lengths, shown

FIELDS = ("length", "num_tokens", "token_ids", "input_ids")
_NPY = b"\x93NUMPY"  # what a .npy file begins with


def read_lengths(path: Path, field: str | None = None) -> IntArray:
    """Lengths in tokens, int64 [N], of a .npy array, or of a .jsonl file with a row per line.

    Args:
        path: the file.
        field: of the rows: a number of tokens, or a list whose length counts. By default the first
            of `length`, `num_tokens`, `token_ids`, `input_ids` that the first row has.

    Raises:
        ValueError: naming file, line and field that are not as they must be.
    """
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".jsonl", ".ndjson"):
        raise ValueError(f"a file must end in .npy or .jsonl, got {path}; convert it")
    try:
        values = _saved_array(path) if suffix == ".npy" else _lengths_of_rows(path, field)
    except OSError as error:
        raise ValueError(
            f"{path} must be a file that can be read, got {error.strerror or error}; name another"
        ) from error
    try:
        lengths = as_lengths(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not lengths.size:
        raise ValueError(f"{path} must hold at least one length, got none; choose another file")
    return lengths


def _saved_array(path: Path) -> np.ndarray:
    remedy = "save a list of integers with numpy.save"
    with path.open("rb") as file:
        magic = file.read(len(_NPY))
    if magic != _NPY:
        found = "an empty file" if not magic else "a file of another format"
        raise ValueError(f"{path} must be a saved array of lengths, got {found}; {remedy}")
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise ValueError(
            f"{path} must be a saved array of lengths, got one that cannot be read ({error}); "
            f"{remedy}"
        ) from error
    return array


def _lengths_of_rows(path: Path, field: str | None) -> list[int]:
    lengths: list[int] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            row = _row(line, where)
            field = field or next((name for name in FIELDS if name in row), None)
            if field is None or field not in row:
                wanted = field or " or ".join(FIELDS)
                raise ValueError(
                    f"{where} must have {wanted}, got {shown(sorted(row))}; name one: --field"
                )
            value = row[field]
            length = len(value) if isinstance(value, list) else value
            if isinstance(length, bool) or not isinstance(length, int) or length < 0:
                raise ValueError(
                    f"{where}, {field} must be a number of tokens or a list of them, got "
                    f"{shown(value)}; name another: --field"
                )
            if length > MAX_TOKENS:
                raise ValueError(
                    f"{where}, {field} must be at most {MAX_TOKENS} (2**53) tokens, got "
                    f"{shown(length)}; correct it"
                )
            lengths.append(length)
    return lengths


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} must be UTF-8, got {error}; convert the file") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} must be a JSON object, got {error}; mend it") from error
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise ValueError(
            f"{where} must hold numbers of at most {MAX_TOKENS} (2**53), got one of thousands of "
            f"digits; correct it"
        ) from error
    except RecursionError as error:
        raise ValueError(
            f"{where} must be a JSON object, got one nested too deeply; take out what is not needed"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} must be a JSON object, got {type(row).__name__}; write one a line, such as "
            f'{{"length": 3}}'
        )
    return row
