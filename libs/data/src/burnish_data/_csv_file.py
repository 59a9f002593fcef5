"""Comma-separated values as rows: quotes as Python's csv reads them, and what they swallow."""

from __future__ import annotations

import csv
import io
import os
from array import array
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from typing import Any

from burnish_data._json_text import decode
from burnish_data._text_files import (
    MAX_ROW_BYTES,
    Index,
    Stamp,
    TextRows,
    begin,
    pieces,
    shortened,
    swallowed,
)
from burnish_data.rows import BadRowError

Record = dict[str, Any]


class CsvFile(TextRows):
    """A file of comma-separated values, all text, whose first line names the columns.

    A quote that begins a field begins quoting, as in Python's csv; others are text. A quoted field
    that does not end as it should is a bad row that is counted as the lines that it swallowed.
    """

    def __init__(
        self, path: str | Path, *, delimiter: str = ",", max_row_bytes: int = MAX_ROW_BYTES
    ) -> None:
        self._delimiter, self._header = delimiter, list[str]()
        super().__init__(path, max_row_bytes=max_row_bytes)

    def _index(self, readable: str, stamp: Stamp) -> Index:
        starts, lines = _index_of_csv(readable, stamp, self._delimiter.encode())
        if len(starts) < 2:
            return starts, lines
        data = os.pread(self._file.descriptor, min(starts[1] - starts[0], 2**20), starts[0])
        try:
            names = self._fields(data, f"{self._path}, line {lines[0]}")
        except BadRowError as error:
            raise ValueError(f"{self._path} must begin with the columns' names: {error}") from error
        if len(set(names)) < len(names) or not all(map(str.strip, names)):
            raise ValueError(
                f"{self._path} must begin with a line of the columns' names, each once, "
                f"got {names}."
            )
        self._header = names
        return starts[1:], lines[1:]

    def _parse(self, data: bytes, where: str) -> Record:
        fields = self._fields(data, where)
        if len(fields) != len(self._header):
            expected = f"{len(self._header)} fields {self._header}"
            raise BadRowError(expected, fields, where=where, reason="ragged line")
        return dict(zip(self._header, fields, strict=True))

    def _fields(self, data: bytes, where: str) -> list[str]:
        if len(data) > csv.field_size_limit():
            csv.field_size_limit(len(data))  # the module's own, which has no other way
        text = decode(data, where)
        try:
            lines = io.StringIO(text, newline="")
            reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
            records = [record for record in reader if record]
        except csv.Error as error:
            lost = len(text.rstrip("\r\n").split("\n"))
            raise BadRowError(
                f"CSV ({error}{swallowed(lost)})",
                text,
                where=where,
                reason="not CSV",
                num_rows=lost,
            ) from error
        if len(records) != 1:
            expected = "CSV with one row here (a carriage return alone ends a row, too)"
            raise BadRowError(expected, text, where=where, reason="not CSV")
        return records[0]

    def _num_lines(self, index: int) -> int:
        return self._lines[index + 1] - self._lines[index]


@lru_cache(maxsize=64)
def _index_of_csv(readable: str, stamp: Stamp, delimiter: bytes) -> Index:  # noqa: ARG001
    """The lines have one more, that behind the last row."""
    starts, lines = array("q"), array("q")
    line, is_new, state = 1, True, _CsvState.START
    with Path(readable).open("rb") as file:
        offset, piece = begin(file), b""
        for piece in pieces(file):
            if is_new and not piece.isspace():
                starts.append(offset)
                lines.append(line)
                is_new = False
            offset += len(piece)
            state = _after_piece(piece, state, delimiter)
            if piece.endswith(b"\n"):
                line += 1
                is_new = state is not _CsvState.QUOTED  # a line within quotes belongs to the row
    starts.append(offset)
    lines.append(line if piece.endswith(b"\n") else line + 1)
    return starts, shortened(lines)


class _CsvState(Enum):
    START = auto()  # of a field
    FIELD = auto()  # in one, outside quotes
    QUOTED = auto()
    QUOTE = auto()  # behind a quote in quotes, which another may follow


def _after_piece(piece: bytes, state: _CsvState, delimiter: bytes) -> _CsvState:
    """Where a piece of a line leaves off, by the rules of Python's csv."""
    position, opening = 0, delimiter + b'"'
    while True:
        if state is _CsvState.QUOTE:
            state = _CsvState.QUOTED if piece.startswith(b'"', position) else _CsvState.FIELD
            position += state is _CsvState.QUOTED
            if state is _CsvState.FIELD and piece.startswith(delimiter, position):
                state, position = _CsvState.START, position + 1
        elif state is _CsvState.QUOTED:
            end = piece.find(b'"', position)
            if end < 0:
                return state
            state, position = _CsvState.QUOTE, end + 1
            if position == len(piece):
                return state
        elif state is _CsvState.START and piece.startswith(b'"', position):
            state, position = _CsvState.QUOTED, position + 1
        else:
            found = piece.find(opening, position)
            if found < 0:
                break
            state, position = _CsvState.QUOTED, found + len(opening)
    if piece.endswith(b"\n") or (position == len(piece) and state is _CsvState.START):
        return _CsvState.START
    return _CsvState.START if piece.endswith(delimiter) else _CsvState.FIELD
