"""MATH: 12,500 competition problems in seven subjects (arXiv:2103.03874), and MATH-500."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from burnish_data.files import open_rows
from burnish_data.messages import ProblemRow
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read_configs
from burnish_data.sources._records import BOXED, Record, answer_text, boxed, problem, text

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_LEVEL = re.compile(r"(?:Level )?([1-5?])")


def math_hendrycks(
    source: str | Path = "EleutherAI/hendrycks_math",
    *,
    split: str = "train",
    subjects: Sequence[str] = SUBJECTS,
    system: str | None = BOXED,
) -> Rows[ProblemRow]:
    r"""MATH as rows of task "math", one subject after the other.

    Columns problem, level, type, solution. `answer` is what the solution's last \boxed{} holds;
    `level` is from 1 to 5, and 0 where the data set has "Level ?". Licence: MIT.

    Args:
        source: a hub id whose configurations are the subjects, a folder with a folder for each
            subject, or one file or folder with all of them.
        split: "train" (7,500 rows) or "test" (5,000).
        subjects: which; all by default. One file is read whatever it is.
        system: the system message; None leaves it out.
    """
    unknown = sorted(set(subjects) - set(SUBJECTS))
    if unknown or not subjects:
        raise ValueError(f"subjects must be some of {list(SUBJECTS)}, got {list(subjects)}.")
    columns = ("problem", "solution", "level")
    rows = read_configs(source, subjects, split=split, columns=columns)
    return rows.map(partial(_hendrycks_row, system=system))


def math500(
    source: str | Path = "HuggingFaceH4/MATH-500",
    *,
    split: str = "test",
    system: str | None = BOXED,
) -> Rows[ProblemRow]:
    """MATH-500, the 500 problems of MATH's test split that are usually reported on: task "math500".

    Columns problem, solution, answer, subject, level, unique_id. Licence: that of MATH (MIT).

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "test" is the only one.
        system: the system message; None leaves it out.
    """
    rows = open_rows(source, split=split, columns=("problem", "answer", "level", "unique_id"))
    return rows.map(partial(_math500_row, system=system))


def _hendrycks_row(record: Record, system: str | None) -> ProblemRow:
    solution = text(record, "solution")
    answer = boxed(solution)
    if not answer:
        raise BadRowError(r"an answer in \boxed{}", solution, column="solution")
    question = text(record, "problem")
    return problem("math", question, answer, level=_level(record), system=system)


def _math500_row(record: Record, system: str | None) -> ProblemRow:
    question, answer = text(record, "problem"), answer_text(record, "answer")
    key = text(record, "unique_id")
    return problem("math500", question, answer, level=_level(record), system=system, key=key)


def _level(record: Record) -> int:
    written = answer_text(record, "level")
    match = _LEVEL.fullmatch(written)
    if not match:
        raise BadRowError("a level from 1 to 5", written, column="level")
    return 0 if match[1] == "?" else int(match[1])
