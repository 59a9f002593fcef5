"""Problems about images: CLEVR (arXiv:1612.06890) and Geometry3K (arXiv:2105.04165)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from burnish_data.messages import ImagePart, ProblemRow, TextPart
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import (
    BOXED,
    Record,
    answer_text,
    column,
    image_part,
    problem,
    text,
)
from burnish_data.stream import RowStream

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PLACE = "<image>"


@streamable
def clevr(
    source: str | Path = "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
    *,
    split: str = "train",
    streaming: bool = False,
    system: str | None = BOXED,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """CLEVR-CoGenT as rows of task "clevr": an image, and a question about what is on it.

    Columns image, problem, solution (the answer between <answer> tags, or alone). CLEVR itself is
    CC BY 4.0; the hub's copy names no licence.

    Args:
        source: a hub id, or a file or folder of the same columns. MMInstruction/Clevr_CoGenT_ValA
            and ..._ValB are there to validate with.
        split: "train" is the only one of these data sets.
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    columns = ("image", "problem", "solution")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_clevr_row, system=system))


@streamable
def geometry3k(
    source: str | Path = "hiyouga/geometry3k",
    *,
    split: str = "train",
    streaming: bool = False,
    system: str | None = BOXED,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """Geometry3K as rows of task "geometry3k": drawings, and what is asked about them.

    Columns images (a list), problem (where <image> is the place of one), answer, id. Licence: MIT.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" (2,101 rows), "validation" or "test".
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    columns = ("images", "problem", "answer")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_geometry_row, system=system))


def _clevr_row(record: Record, system: str | None) -> ProblemRow:
    solution = text(record, "solution")
    match = _ANSWER.search(solution)
    answer = (match[1] if match else solution).strip()
    if not answer:
        raise BadRowError("an answer", solution, column="solution")
    question: TextPart = {"type": "text", "text": text(record, "problem").strip()}
    image = image_part(column(record, "image"), "image")
    return problem("clevr", [image, question], answer, system=system)


def _geometry_row(record: Record, system: str | None) -> ProblemRow:
    images = column(record, "images")
    images = images if isinstance(images, list | tuple) else [images]
    made = [image_part(image, f"images[{index}]") for index, image in enumerate(images)]
    parts = place_images(text(record, "problem"), made)
    answer, key = answer_text(record, "answer"), record.get("id")
    return problem("geometry3k", parts, answer, system=system, key=key)


def place_images(question: str, images: Sequence[ImagePart]) -> list[TextPart | ImagePart]:
    """The question as parts, with an image at each `<image>`; without any they stand first.

    Raises:
        BadRowError: another number of places than of images.
    """
    texts = question.split(_PLACE) if _PLACE in question else ["", *[""] * len(images)]
    if _PLACE not in question:
        texts[-1] = question
    if len(texts) != len(images) + 1:
        expected = f"{len(images)} times {_PLACE}, since there are as many images"
        raise BadRowError(expected, question, column="problem")
    parts: list[TextPart | ImagePart] = []
    for words, image in zip(texts, [*images, None], strict=True):
        if words.strip():
            parts.append({"type": "text", "text": words.strip()})
        if image is not None:
            parts.append(image)
    return parts
