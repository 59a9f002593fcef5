"""HelpSteer3: preferences of people, on a scale from -3 to 3 (arXiv:2505.11475)."""

from __future__ import annotations

from pathlib import Path

from burnish_data.messages import Message, PreferenceRow, validate_messages
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import Record, column, text, whole_number
from burnish_data.stream import RowStream


@streamable
def helpsteer3(
    source: str | Path = "nvidia/HelpSteer3",
    *,
    split: str = "train",
    config: str = "preference",
    streaming: bool = False,
) -> Rows[PreferenceRow] | RowStream[PreferenceRow]:
    """HelpSteer3 as preference pairs; `margin` is 1 (slightly better) to 3 (much better).

    Columns domain, language, context (a chat), response1, response2, overall_preference (below 0
    where the first response is better). A tie is a bad row, counted as "tie": neither response is
    the better one. Read it with on_bad_row="skip". Licence: CC BY 4.0.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" or "validation".
        config: the hub's configuration; the others have other columns.
        streaming: read the rows one after the other, without a copy on disk.
    """
    columns = ("context", "response1", "response2", "overall_preference")
    rows = read(source, split=split, config=config, streaming=streaming, columns=columns)
    return rows.map(_row)


def _row(record: Record) -> PreferenceRow:
    context = column(record, "context")
    if isinstance(context, str):
        context = [{"role": "user", "content": context}]
    prompt = validate_messages(context, where="context")
    if prompt[-1]["role"] not in ("user", "tool"):
        raise BadRowError("a context that a user ends", prompt[-1]["role"], column="context")
    preferred = whole_number(record, "overall_preference")
    if not -3 <= preferred <= 3:
        raise BadRowError("a number from -3 to 3", preferred, column="overall_preference")
    if preferred == 0:
        column_name = "overall_preference"
        raise BadRowError("one response to be better", 0, column=column_name, reason="tie")
    first, second = _answer(record, "response1"), _answer(record, "response2")
    if first == second:
        raise BadRowError("two different responses", "the same twice", reason="tie")
    chosen, rejected = (first, second) if preferred < 0 else (second, first)
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "margin": float(abs(preferred)),
    }


def _answer(record: Record, name: str) -> list[Message]:
    return [{"role": "assistant", "content": text(record, name)}]
