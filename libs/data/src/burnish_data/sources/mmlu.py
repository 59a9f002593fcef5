"""MMLU (arXiv:2009.03300) and MMLU-Pro (arXiv:2406.01574): questions with lettered choices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from string import ascii_uppercase

from burnish_data.messages import ProblemRow
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import (
    LETTER,
    Record,
    choice_problem,
    column,
    text,
    texts,
    whole_number,
)
from burnish_data.stream import RowStream


@streamable
def mmlu(
    source: str | Path = "cais/mmlu",
    *,
    split: str = "test",
    subject: str = "all",
    streaming: bool = False,
    system: str | None = LETTER,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """MMLU as rows of task "mmlu"; the answer is a letter from A to D.

    Columns question, subject, choices, answer (0 to 3, or a letter). Licence: MIT.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "test" (14,042 rows), "validation", "dev", or, with all subjects, "auxiliary_train".
        subject: a configuration of the hub's data set, such as "high_school_mathematics".
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    columns = ("question", "choices", "answer")
    rows = read(source, split=split, streaming=streaming, config=subject, columns=columns)
    return rows.map(partial(_mmlu_row, system=system))


@streamable
def mmlu_pro(
    source: str | Path = "TIGER-Lab/MMLU-Pro",
    *,
    split: str = "test",
    streaming: bool = False,
    system: str | None = LETTER,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """MMLU-Pro as rows of task "mmlu_pro"; the answer is a letter from A to J at most.

    Columns question_id, question, options, answer (a letter), answer_index, cot_content, category,
    src. Licence: MIT.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "test" (12,032 rows) or "validation" (70, with worked solutions).
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    columns = ("question_id", "question", "options", "answer")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_mmlu_pro_row, system=system))


def _mmlu_row(record: Record, system: str | None) -> ProblemRow:
    question, choices = text(record, "question"), texts(record, "choices")
    answer = column(record, "answer")
    is_letter = isinstance(answer, str) and answer in ascii_uppercase and len(answer) == 1
    right = _letter_index(answer) if is_letter else whole_number(record, "answer")
    return choice_problem("mmlu", question, choices, right, system=system)


def _mmlu_pro_row(record: Record, system: str | None) -> ProblemRow:
    right = _letter_index(text(record, "answer"))
    if record.get("answer_index") is not None and right != whole_number(record, "answer_index"):
        expected = f"the index of answer {record['answer']!r}, which is {right}"
        raise BadRowError(expected, record["answer_index"], column="answer_index")
    key = column(record, "question_id")
    question, options = text(record, "question"), texts(record, "options")
    return choice_problem("mmlu_pro", question, options, right, system=system, key=key)


def _letter_index(letter: str) -> int:
    if len(letter) != 1 or letter not in ascii_uppercase:
        raise BadRowError("a letter from A on", letter, column="answer")
    return ascii_uppercase.index(letter)
