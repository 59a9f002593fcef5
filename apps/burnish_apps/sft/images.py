"""Chats with images: encoded once for their lengths, and once more for the pixels of a batch.

Pixels are a thousand times as large as token ids. So only ids and masks are kept, and with each row
the place it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish_data import BadRowError
from burnish_data.rows import Rows
from transformers import AutoProcessor

from burnish_apps.shell.config import blame
from burnish_apps.supervised.data import Row

PIXELS = ("pixel_values", "image_grid_thw")
EncodeOne = Callable[[Any], Mapping[str, Any]]  # as `burnish_data.encode_images`; BadRowError


def load_processor(folder: Path) -> Any:
    """The processor of texts and images in a checkpoint folder."""
    with blame("model.source: its processor cannot be read"):
        return AutoProcessor.from_pretrained(folder)


def encode_without_pixels(
    rows: Sequence[Any], encode_one: EncodeOne
) -> list[Mapping[str, Any] | BadRowError]:
    """Token columns of each row, and ``source``, its place among all; see `Numbered`."""
    made: list[Mapping[str, Any] | BadRowError] = []
    for row in rows:
        try:
            encoded = encode_one(row)
        except BadRowError as error:
            made.append(error)
            continue
        kept = {name: value for name, value in encoded.items() if name not in PIXELS}
        made.append({**kept, "source": row["source"]})
    return made


class Numbered(Rows[Row]):
    """Rows with their place as a column ``source``."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return {**self._rows[index], "source": index}

    def where(self, index: int) -> str:
        rows = self._rows
        return rows.where(index) if isinstance(rows, Rows) else f"rows, row {index + 1}"


class WithPixels:
    """Encoded rows, each with the pixels of its images when it is asked for."""

    def __init__(self, encoded: Any, rows: Sequence[Row], encode_one: EncodeOne) -> None:
        self._encoded, self._rows, self._encode_one = encoded, rows, encode_one

    def __len__(self) -> int:
        return len(self._encoded)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self._encoded[index]
        whole = self._encode_one(self._rows[int(row["source"])])
        return {**row, **{name: whole[name] for name in PIXELS if name in whole}}
