"""SQuAD 1.1: questions about paragraphs of Wikipedia (arXiv:1606.05250)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from burnish_data.messages import ChatRow
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import Record, chat, column, text, texts
from burnish_data.stream import RowStream


@streamable
def squad(
    source: str | Path = "rajpurkar/squad",
    *,
    split: str = "train",
    streaming: bool = False,
    system: str | None = "Answer with words of the text.",
) -> Rows[ChatRow] | RowStream[ChatRow]:
    """SQuAD as chats: the paragraph and the question, then the first of the answers.

    Columns id, title, context, question, answers (text, answer_start). A question without an
    answer, as SQuAD 2.0 has them, is a bad row, counted as "no answer". Licence: CC BY-SA 4.0.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" (87,599 rows) or "validation" (10,570).
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    columns = ("context", "question", "answers")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_row, system=system))


def _row(record: Record, system: str | None) -> ChatRow:
    answers = column(record, "answers")
    if not isinstance(answers, Mapping):
        raise BadRowError("an object with text", answers, column="answers")
    if not answers.get("text"):
        raise BadRowError("at least one answer", answers, column="answers", reason="no answer")
    question = f"{text(record, 'context')}\n\n{text(record, 'question').strip()}"
    return chat(question, texts(answers, "text")[0], system=system)
