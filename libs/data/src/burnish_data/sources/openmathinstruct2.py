"""OpenMathInstruct-2: 14 million problems with solutions by Llama-3.1-405B (arXiv:2410.01560)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from burnish_data.messages import ChatRow, ProblemRow
from burnish_data.rows import Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import BOXED, Record, answer_text, chat, problem, text
from burnish_data.stream import RowStream

HUB_ID = "nvidia/OpenMathInstruct-2"


@streamable
def openmathinstruct2(
    source: str | Path = HUB_ID,
    *,
    split: str = "train",
    streaming: bool = False,
    system: str | None = None,
) -> Rows[ChatRow] | RowStream[ChatRow]:
    """OpenMathInstruct-2 as chats: the problem, then the generated solution.

    Columns problem, generated_solution, expected_answer, problem_source. Licence: CC BY 4.0.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" (14 million rows), "train_1M", "train_2M" or "train_5M".
        streaming: read the rows one after the other, without a copy on disk.
        system: a system message before each problem.
    """
    columns = ("problem", "generated_solution")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_chat, system=system))


@streamable
def openmathinstruct2_problems(
    source: str | Path = HUB_ID,
    *,
    split: str = "train",
    streaming: bool = False,
    system: str | None = BOXED,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """The same problems with their answers alone, of task "openmathinstruct2".

    A problem stands there once for each of its solutions. Where the original data set had no
    answer, the expected one is what most of the generated solutions said.

    Args: as `openmathinstruct2` has them.
    """
    columns = ("problem", "expected_answer")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_problem, system=system))


def _chat(record: Record, system: str | None) -> ChatRow:
    return chat(text(record, "problem"), text(record, "generated_solution"), system=system)


def _problem(record: Record, system: str | None) -> ProblemRow:
    answer = answer_text(record, "expected_answer")
    return problem("openmathinstruct2", text(record, "problem"), answer, system=system)
