"""Text files as rows: an index of where each row begins, and rows parsed when they are asked for.

JSON is not read through Arrow, whose unified structs add keys of None and merge the arguments of
different tools' calls.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil
import tempfile
import weakref
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

from burnish_data._json_text import parse_object
from burnish_data.rows import BadRowError, Rows

Record = dict[str, Any]
MAX_ROW_BYTES = 64 * 2**20

# (starts: the first byte of each row and the end of the last; the line on which each row begins)
Index = tuple["array[int]", Sequence[int]]
Stamp = tuple[int, int]  # size and time: another one is another file

_MARK = b"\xef\xbb\xbf"  # UTF-8's byte-order mark
_MAGIC = {
    b"\x1f\x8b": "gzip; name it with .gz",
    b"PAR1": "Parquet; name it .parquet",
    b"ARROW1": "Arrow; name it .arrow",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\xff\xfe": "UTF-16; convert it: iconv -f utf-16 -t utf-8",
    b"\xfe\xff": "UTF-16; convert it: iconv -f utf-16 -t utf-8",
}


class TextRows(Rows[Record]):
    """Rows of a text file, of which only an index is in memory: 8 bytes a row, or 16.

    Pickled by path: another process makes the index anew, once. A file that is changed in place
    after it was opened is a ValueError when a row of it is read.

    Args:
        path: the file; with .gz it is unpacked into a temporary file first.
        max_row_bytes: a longer row is a bad row, and is never read.

    Raises:
        ValueError: no such file, one that is no text or holds no row, or a broken gzip.
    """

    def __init__(self, path: str | Path, *, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        self._path, self._max_row_bytes = Path(path), max_row_bytes
        self._file = _open(self._path)
        self._stamp = self._file.stamp
        self._starts, self._lines = self._index(self._file.readable, self._stamp)
        if len(self._starts) < 2:
            raise ValueError(f"{path} must hold at least one row, and it holds none.")

    @abstractmethod
    def _index(self, readable: str, stamp: Stamp) -> Index: ...

    @abstractmethod
    def _parse(self, data: bytes, where: str) -> Record: ...

    def __len__(self) -> int:
        return len(self._starts) - 1

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._lines[index]}"

    def row(self, index: int) -> Record:
        start, size = self._starts[index], self._starts[index + 1] - self._starts[index]
        if size > self._max_row_bytes:
            expected = f"a row of at most max_row_bytes={self._max_row_bytes:,} bytes"
            lost = self._num_lines(index)
            raise BadRowError(
                f"{expected}{swallowed(lost)}",
                size,
                where=self.where(index),
                reason="huge row",
                num_rows=lost,
            )
        data = os.pread(self._file.descriptor, size, start)
        if len(data) != size or self._file.is_changed():
            raise changed(self._path)
        return self._parse(data, self.where(index))

    def _num_lines(self, index: int) -> int:  # noqa: ARG002 (of CSV, a row may have several)
        return 1

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_file", "_starts", "_lines"}
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = _open(self._path)
        if self._file.stamp != self._stamp:
            raise changed(self._path)
        self._starts, self._lines = self._index(self._file.readable, self._stamp)


class JsonLines(TextRows):
    """A file with a JSON object on each line; empty lines are passed over."""

    def __init__(self, path: str | Path, *, max_row_bytes: int = MAX_ROW_BYTES) -> None:
        super().__init__(path, max_row_bytes=max_row_bytes)
        first = os.pread(self._file.descriptor, 4096, self._starts[0]).partition(b"\n")[0].strip()
        if first == b"{" or (first.startswith(b"[") and not first.endswith(b"]")):
            kind = "an array; name it .json" if first != b"{" else "an object over several lines"
            raise ValueError(f"{path} must hold a JSON object on each line, and it begins {kind}.")

    def _index(self, readable: str, stamp: Stamp) -> Index:
        return _index_of_lines(readable, stamp)

    def _parse(self, data: bytes, where: str) -> Record:
        return parse_object(data, where)


class JsonArray(TextRows):
    """A file that is one JSON array of objects. It is parsed once for its index, in memory."""

    def _index(self, readable: str, stamp: Stamp) -> Index:
        return _index_of_array(readable, str(self._path), stamp)

    def _parse(self, data: bytes, where: str) -> Record:
        return parse_object(data, where)

    def where(self, index: int) -> str:
        return f"{self._path}, row {index + 1} (line {self._lines[index]})"


class _File:
    """A file open for reading at any place, also from several threads and forked processes."""

    def __init__(self, path: Path) -> None:
        self.stamp = stamp_of(path.stat())
        self.readable = str(path)
        if path.suffix == ".gz":
            self.readable = _unpacked(path)
            remove_with(self, self.readable)
        self.descriptor = os.open(self.readable, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self._own = stamp_of(os.fstat(self.descriptor))  # of what is read, which may be a copy

    def is_changed(self) -> bool:
        """Whether the file was written to; one that another took the place of is as it was."""
        return stamp_of(os.fstat(self.descriptor)) != self._own


def stamp_of(status: os.stat_result) -> Stamp:
    """What tells a file from one that was changed."""
    return status.st_size, status.st_mtime_ns


def _open(path: Path) -> _File:
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        raise ValueError(f"{path} must be a file that exists, and it is {kind}.")
    try:
        file = _File(path)
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read, but {error}.") from error
    head = os.pread(file.descriptor, 4096, 0)
    if not head:
        raise ValueError(f"{path} must hold at least one row, and it is empty.")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            raise ValueError(f"{path} must be text in UTF-8, and it is {kind}.")
    if b"\0" in head:
        raise ValueError(
            f"{path} must be text in UTF-8, and it holds zero bytes; it is binary, or UTF-16."
        )
    return file


def _unpacked(path: Path) -> str:
    descriptor, name = tempfile.mkstemp(prefix="burnish_data_", suffix=path.stem)
    try:
        with os.fdopen(descriptor, "wb") as unpacked, gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, unpacked, 2**20)
    except BaseException as error:  # a full disk and Ctrl-C among them
        Path(name).unlink(missing_ok=True)
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            raise ValueError(f"{path} must be a whole gzip, but {error}; fetch it anew.") from error
        if is_full(error):
            raise no_room(path, error) from error
        raise
    return name


def is_full(error: BaseException) -> bool:
    """Whether a file could not be written for want of room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_room(path: Path, error: BaseException) -> ValueError:
    """For a temporary copy of a file."""
    return ValueError(
        f"{tempfile.gettempdir()} must have room for what {path} holds, but {error}; set TMPDIR to "
        f"a folder that has."
    )


def remove_with(owner: object, name: str) -> None:
    """Remove a temporary file when its owner is collected, or this process ends."""
    weakref.finalize(owner, _remove, name, os.getpid())


def _remove(name: str, process: int) -> None:
    if os.getpid() == process:  # a forked process shares its parent's
        Path(name).unlink(missing_ok=True)


def changed(path: Path) -> ValueError:
    """For a file that is no more what it was when it was opened."""
    return ValueError(f"{path} must stay as it was when opened, and it changed; open it anew.")


def swallowed(num_lines: int) -> str:
    """What to say of a row that takes up several lines, most of which may be others' rows."""
    return f"; a quote swallowed {num_lines:,} lines" if num_lines > 1 else ""


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Lines; one that is very long comes in several pieces, so that memory stays flat."""
    return iter(partial(file.readline, 2**20), b"")


def shortened(lines: array[int]) -> Sequence[int]:
    """The same numbers without memory, where each line is a row."""
    if lines and lines[-1] - lines[0] == len(lines) - 1:
        return range(lines[0], lines[-1] + 1)
    return lines


def begin(file: BinaryIO) -> int:
    """Pass over a byte-order mark; return its length."""
    return 3 if file.read(3) == _MARK else file.seek(0)


@lru_cache(maxsize=64)  # for a process that gets the same rows with every task
def _index_of_lines(readable: str, stamp: Stamp) -> Index:  # noqa: ARG001
    starts, lines = array("q"), array("q")
    line, is_new = 1, True
    with Path(readable).open("rb") as file:
        offset = begin(file)
        for piece in pieces(file):
            if is_new and not piece.isspace():
                starts.append(offset)
                lines.append(line)
                is_new = False
            offset += len(piece)
            if piece.endswith(b"\n"):
                line, is_new = line + 1, True
    starts.append(offset)
    return starts, shortened(lines)


_JSON = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


@lru_cache(maxsize=64)
def _index_of_array(readable: str, name: str, stamp: Stamp) -> Index:  # noqa: ARG001
    text = _whole_text(Path(readable), name)
    starts, lines = array("q"), array("q")
    position = line_position = offset = 0
    line = 1
    try:
        position = _after(text, "[", _skip(text, 0))
        while not text.startswith("]", position):
            offset += len(text[line_position:position].encode())
            line += text.count("\n", line_position, position)
            line_position = position
            starts.append(offset)
            lines.append(line)
            position = _skip(text, _JSON.raw_decode(text, position)[1])
            if not text.startswith("]", position):
                position = _after(text, ",", position)
                if text.startswith("]", position):
                    raise json.JSONDecodeError("Illegal trailing comma", text, position)
        starts.append(offset + len(text[line_position:position].encode()))
        end = _skip(text, position + 1)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        got = text[max(0, error.pos - 20) : error.pos + 40]
        raise ValueError(
            f"{name}, line {error.lineno}, character {error.colno}: expected a whole JSON array of "
            f"objects ({error.msg}), got {got!r}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: expected JSON of usual depth and numbers ({error}).") from error
    return starts, lines


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _after(text: str, mark: str, position: int) -> int:
    if not text.startswith(mark, position):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, position)
    return _skip(text, position + 1)


def _whole_text(path: Path, name: str) -> str:
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        got = data[max(0, error.start - 20) : error.start + 20]
        raise ValueError(
            f"{name}, line {line}: expected UTF-8 (byte {error.start + 1} is none), got {got!r}."
        ) from error
    # A byte-order mark becomes white space of its length, so that offsets are those of the file.
    return f"   {text[1:]}" if data.startswith(_MARK) else text
