"""DeepScaleR-Preview: 40,000 problems of AIME, AMC, Omni-MATH and STILL."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from burnish_data.messages import ProblemRow
from burnish_data.rows import Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import BOXED, Record, answer_text, problem, text
from burnish_data.stream import RowStream


@streamable
def deepscaler(
    source: str | Path = "agentica-org/DeepScaleR-Preview-Dataset",
    *,
    split: str = "train",
    streaming: bool = False,
    system: str | None = BOXED,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """DeepScaleR-Preview as rows of task "deepscaler".

    Columns problem, answer, solution. Licence: MIT.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" is the only one.
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    rows = read(source, split=split, streaming=streaming, columns=("problem", "answer"))
    return rows.map(partial(_row, system=system))


def _row(record: Record, system: str | None) -> ProblemRow:
    answer = answer_text(record, "answer")
    return problem("deepscaler", text(record, "problem"), answer, system=system)
