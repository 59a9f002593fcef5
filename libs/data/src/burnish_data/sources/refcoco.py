"""RefCOCO: which part of a photograph a phrase means (arXiv:1608.00272)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from burnish_data.messages import ImagePart, ProblemRow, TextPart
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import Record, column, image_part, problem, text, texts
from burnish_data.stream import RowStream

Caption = Literal["first", "longest", "shortest"]

_SCALE = 1000  # in which Qwen2-VL and others say where something is
_PROMPT = (
    "Give the bounding box of what this phrase describes as [x1, y1, x2, y2], with coordinates "
    "from 0 to {scale}: {phrase}"
)


@streamable
def refcoco(
    source: str | Path = "jxu124/refcoco",
    *,
    images: str | Path,
    split: str = "train",
    caption: Caption = "longest",
    streaming: bool = False,
    system: str | None = None,
) -> Rows[ProblemRow] | RowStream[ProblemRow]:
    """RefCOCO as rows of task "refcoco": a photograph and a phrase; the answer is a box.

    Columns image_path, bbox (x1, y1, x2, y2 in pixels), captions, ref_id, raw_image_info (JSON with
    width and height). The photographs are not on the hub: COCO's train2014 images must be there.
    `answer` is "[x1, y1, x2, y2]" with whole numbers from 0 to 1000 of width and height. The
    card names no licence; the photographs are under the terms of their owners (Flickr).

    Args:
        source: a hub id, or a file or folder of the same columns.
        images: the folder that holds train2014 (of cocodataset.org).
        split: "train" (42,404 rows), "validation", "test" or "testB".
        caption: which of a box's phrases: "longest" says most, and is seldom of two boxes.
        streaming: read the rows one after the other, without a copy on disk.
        system: the system message; None leaves it out.
    """
    folder = Path(images)
    if not folder.is_dir():
        raise ValueError(f"images must be the folder that holds COCO's train2014, got {folder}.")
    if caption not in ("first", "longest", "shortest"):
        raise ValueError(f'caption must be "first", "longest" or "shortest", got {caption!r}.')
    columns = ("image_path", "bbox", "captions", "raw_image_info")
    rows = read(source, split=split, streaming=streaming, columns=columns)
    return rows.map(partial(_row, folder=folder, caption=caption, system=system))


def _row(record: Record, folder: Path, caption: Caption, system: str | None) -> ProblemRow:
    captions = texts(record, "captions")
    phrase = {
        "first": captions[0],
        "longest": max(captions, key=len),
        "shortest": min(captions, key=len),
    }[caption]
    asked: TextPart = {"type": "text", "text": _PROMPT.format(scale=_SCALE, phrase=phrase)}
    image = _image(record, folder)
    answer = str(_box(record))
    key = record.get("ref_id")
    return problem("refcoco", [image, asked], answer, system=system, key=key)


def _image(record: Record, folder: Path) -> ImagePart:
    written = text(record, "image_path")
    # It is "coco/train2014/COCO_train2014_000000000009.jpg", say.
    path = folder / written.removeprefix("coco/")
    if not path.is_file():
        raise BadRowError(f"an image in {folder}", written, column="image_path", reason="no image")
    return image_part(str(path), "image_path")


def _box(record: Record) -> list[int]:
    """The box in whole thousandths of the image's width and height."""
    box = column(record, "bbox")
    is_box = isinstance(box, Sequence) and len(box) == 4
    if not is_box or not all(isinstance(number, int | float) for number in box):
        raise BadRowError("four numbers", box, column="bbox")
    width, height = _size(record)
    x1, y1, x2, y2 = box
    # One pixel of tolerance: the annotations were rounded.
    if not (0 <= x1 < x2 <= width + 1 and 0 <= y1 < y2 <= height + 1):
        expected = f"[x1, y1, x2, y2] within {width} by {height} pixels"
        raise BadRowError(expected, box, column="bbox")
    parts = (x1 / width, y1 / height, x2 / width, y2 / height)
    return [min(_SCALE, round(_SCALE * part)) for part in parts]


def _size(record: Record) -> tuple[int, int]:
    info: Any = column(record, "raw_image_info")
    if isinstance(info, str):
        try:
            info = json.loads(info)
        except json.JSONDecodeError as error:
            raise BadRowError(f"JSON ({error})", info, column="raw_image_info") from error
    if isinstance(info, Mapping):
        width, height = info.get("width"), info.get("height")
        if isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0:
            return width, height
    raise BadRowError("an object with width and height", info, column="raw_image_info")
