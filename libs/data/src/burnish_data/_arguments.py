"""Arguments of the wrong kind, each refused at once by one sentence that names what fits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from burnish_data.formats import guess_format, preference
from burnish_data.rows import BadRowError
from burnish_data.stream import RowStream

_OTHERS = (  # rows of this library that are no chats, by columns that tell them
    (("prompt", "chosen", "rejected"), "encode_preferences"),
    (("prompt", "completions", "scores"), "encode_rankings"),
    (("prompt", "completion", "label"), "encode_labels"),
    (("prompt", "answer", "task", "level", "id"), "encode_problem"),
)


def check_tokenizer(tokenizer: object) -> None:
    """ValueError for a folder or a name, and for what cannot tokenise."""
    if isinstance(tokenizer, str | Path):
        raise ValueError(
            f"tokenizer must be a loaded tokenizer, got {str(tokenizer)!r}; load it first: "
            f"transformers.AutoTokenizer.from_pretrained({str(tokenizer)!r})."
        )
    if not callable(tokenizer) or not hasattr(tokenizer, "is_fast"):
        raise ValueError(
            f"tokenizer must be one of transformers, got a {type(tokenizer).__name__}; load it "
            "with transformers.AutoTokenizer.from_pretrained."
        )


def check_many(rows: object, one: str, many: str) -> None:
    """ValueError for one row where many are wanted."""
    if isinstance(rows, Mapping):
        raise ValueError(f"{many} must be given a list of rows, got one row; use {one}.")
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise ValueError(
            f"{many} must be given a list of rows, got a {type(rows).__name__}; open files with "
            "open_rows."
        )


def check_one(row: object, one: str, many: str) -> None:
    """ValueError for many rows where one is wanted."""
    if isinstance(row, Iterable) and not isinstance(row, Mapping | str | bytes):
        raise ValueError(f"{one} must be given one row, got a {type(row).__name__}; use {many}.")


def check_no_stream(rows: object, function: str) -> None:
    """ValueError for a stream where rows are asked for by number."""
    if isinstance(rows, RowStream):
        raise ValueError(
            f"{function} must be given rows that have a number, got a stream; open them without "
            "streaming=True, or take as many as are wanted: ListRows(islice(stream, 100_000))."
        )


def require_messages(row: Mapping[str, Any]) -> None:
    """BadRowError, which says what fits, for a row that is no chat."""
    if "messages" in row:
        return
    raise BadRowError(
        f"a column of a chat; {_what_fits(row)}",
        list(row),
        column="messages",
        reason="no column 'messages'",
    )


def format_name(function: Callable[..., Any]) -> str:
    """A format as it is written in Python: `sharegpt`, `prompt_response('question', 'answer')`."""
    if not isinstance(function, functools.partial):
        return getattr(function, "__name__", type(function).__name__)
    name = getattr(function.func, "__name__", "").removeprefix("_")
    values = [repr(value) for value in function.keywords.values() if value is not None]
    return f"{name}({', '.join(values)})"


def _what_fits(row: Mapping[str, Any]) -> str:
    for needed, function in _OTHERS:
        if all(name in row for name in needed) and not isinstance(row["prompt"], str):
            return f"for rows of {' and '.join(needed)} use {function}"
    try:
        found = guess_format(row)
    except ValueError:
        return "make chats of the rows first: rows.map(form), with a function of your own"
    after = " and encode_preferences" if found is preference else ""
    return f"map the rows first: rows.map({format_name(found)}){after}"
