"""DAPO-Math-17k: problems whose answers are whole numbers (arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from burnish_data.messages import ProblemRow, validate_messages
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import Record, answer_text, column, digest
from burnish_data.stream import RowStream


@streamable
def dapo_math(
    source: str | Path = "BytedTsinghua-SIA/DAPO-Math-17k",
    *,
    split: str = "train",
    unique: bool = True,
    streaming: bool = False,
    system: str | None = None,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """DAPO-Math-17k as rows of task "dapo_math".

    Columns data_source, prompt (a chat), ability, reward_model (ground_truth, style), extra_info
    (index). The prompts themselves ask for a last line "Answer: ...". Licence: Apache-2.0.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" is the only one.
        unique: keep the first row of each index. The data set on the hub repeats its 17 thousand
            problems a hundred times, so that a batch could hold one twice. All rows are read for
            it, a minute or two; a stream can not be had so.
        streaming: read the rows one after the other, without a copy on disk.
        system: a system message before each prompt.
    """
    if streaming and unique:
        raise ValueError("A stream cannot be made unique; give unique=False, or streaming=False.")
    rows = read(source, split=split, streaming=streaming, columns=("prompt", "reward_model"))
    if unique and isinstance(rows, Rows):
        rows = rows.select(_first_of_each(rows))
    return rows.map(partial(_row, system=system))


def _first_of_each(rows: Rows[dict[str, Any]]) -> list[int]:
    """The indices of the rows whose problem has not come before, and of the bad rows.

    Those are errors with their place when they are asked for, as everywhere.
    """
    seen: set[str] = set()
    kept = []
    for index in range(len(rows)):
        try:
            key = _key(rows.row(index))
        except BadRowError:
            kept.append(index)
            continue
        if key not in seen:
            seen.add(key)
            kept.append(index)
    return kept


def _row(record: Record, system: str | None) -> ProblemRow:
    prompt = validate_messages(column(record, "prompt"), where="prompt")
    if prompt[-1]["role"] != "user":
        raise BadRowError("a prompt that a user ends", prompt[-1]["role"], column="prompt")
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
        prompt = validate_messages(prompt, where="prompt")  # it may have one already
    model = column(record, "reward_model")
    if not isinstance(model, Mapping):
        raise BadRowError("an object with ground_truth", model, column="reward_model")
    return {
        "prompt": prompt,
        "answer": answer_text(model, "ground_truth"),
        "task": "dapo_math",
        "level": 0,
        "id": f"dapo_math/{_key(record)}",
    }


def _key(record: Record) -> str:
    """The data set's index of the problem, or what stands for its text."""
    extra = record.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    if index is not None:
        return str(index)
    prompt = validate_messages(column(record, "prompt"), where="prompt")
    return digest(str(prompt[-1]["content"]))
