"""AIME 2024 and 2025: thirty problems each, whose answers are whole numbers from 0 to 999."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from burnish_data.files import open_rows
from burnish_data.messages import ProblemRow
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read_configs
from burnish_data.sources._records import BOXED, Record, answer_text, column, problem, text

_PARTS = ("AIME2025-I", "AIME2025-II")
_DEGREES = re.compile(r"\s*(\^\s*\{?\\circ\}?|°)$")  # a copy of AIME 2025 has 336^\circ


def aime24(
    source: str | Path = "HuggingFaceH4/aime_2024",
    *,
    split: str = "train",
    system: str | None = BOXED,
) -> Rows[ProblemRow]:
    """AIME 2024 I and II as rows of task "aime24".

    Columns id, problem, solution, answer, url, year. The card names no licence; the problems are
    the Mathematical Association of America's.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" is the only one, and holds all thirty.
        system: the system message; None leaves it out.
    """
    rows = open_rows(source, split=split, columns=("id", "problem", "answer"))
    return rows.map(partial(_row24, system=system))


def aime25(
    source: str | Path = "opencompass/AIME2025",
    *,
    split: str = "test",
    system: str | None = BOXED,
) -> Rows[ProblemRow]:
    """AIME 2025 I and II as rows of task "aime25".

    Columns question, answer. The problems are the Mathematical Association of America's.

    Args:
        source: a hub id whose configurations are AIME2025-I and AIME2025-II, a folder with a folder
            for each, or one file or folder with both.
        split: "test" is the only one.
        system: the system message; None leaves it out.
    """
    rows = read_configs(source, _PARTS, split=split, columns=("question", "answer"))
    return rows.map(partial(_row25, system=system))


def _row24(record: Record, system: str | None) -> ProblemRow:
    key = column(record, "id")
    return problem("aime24", text(record, "problem"), _answer(record), system=system, key=key)


def _row25(record: Record, system: str | None) -> ProblemRow:
    return problem("aime25", text(record, "question"), _answer(record), system=system)


def _answer(record: Record) -> str:
    written = answer_text(record, "answer")
    number = _DEGREES.sub("", written)
    if not re.fullmatch(r"\d{1,3}", number):
        raise BadRowError("a whole number from 0 to 999", written, column="answer")
    return str(int(number))
