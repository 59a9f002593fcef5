"""Parquet, Arrow and the hub as rows: memory-mapped by `datasets`, read when they are asked for."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from burnish_data._text_files import changed, is_full, no_room, remove_with, stamp_of
from burnish_data.rows import Rows

if TYPE_CHECKING:
    from datasets import Dataset

Record = dict[str, Any]
_BLOCK_ROWS = 256


class DatasetRows(Rows[Record]):
    """Rows of a `datasets.Dataset`, as plain values.

    Keys of None are left out, since Arrow adds them to rows that lack them. Images are not decoded:
    they stay what the data set holds, bytes or a path.

    Args:
        dataset: at least one row.
        name: begins the rows' places.
        path: the file that is mapped into memory, if one is. It is a ValueError to read on after it
            was changed in place; one that another took the place of stays as it was.

    Raises:
        ValueError: no row.
    """

    def __init__(self, dataset: Dataset, name: str, path: Path | None = None) -> None:
        if not len(dataset):
            raise ValueError(f"{name} must hold at least one row, and it holds none.")
        self._dataset, self._name = dataset.with_format("arrow"), name
        self._last, self._block = -1, (0, list[Record]())
        self._path = path
        self._stamp = None if path is None else _stamp(path)

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return list(self._dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Record:
        start, block = self._block
        if not start <= index < start + len(block):
            if self._path is not None and self._is_changed(self._path):
                raise changed(self._path)
            # Who reads on gets a block at once, which is much faster; others one row.
            stop = index + (_BLOCK_ROWS if index == self._last + 1 else 1)
            start, block = index, to_records(self._dataset[index : min(stop, len(self))])
            self._block = (start, block)
        self._last = index
        made: Record = plain(block[index - start])
        return made

    def _is_changed(self, path: Path) -> bool:
        now, then = _stamp(path), self._stamp
        return now is not None and then is not None and now[0] == then[0] and now != then

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": (0, [])}


class ParquetRows(DatasetRows):
    """Rows of a Parquet file, through a temporary Arrow file, which is removed with them."""

    def __init__(self, path: Path) -> None:
        converted = _converted(path)
        remove_with(self, converted)
        super().__init__(read_arrow(Path(converted), str(path)), str(path))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Which file it is, its size and its time; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, *stamp_of(status)


def _converted(path: Path) -> str:
    """The name of a new Arrow file with a Parquet file's rows."""
    from pyarrow import parquet

    descriptor, name = tempfile.mkstemp(prefix="burnish_data_", suffix=".arrow")
    os.close(descriptor)
    try:
        with (
            parquet.ParquetFile(path) as file,
            pa.OSFile(name, "wb") as sink,
            pa.ipc.new_stream(sink, file.schema_arrow) as writer,
        ):
            for batch in file.iter_batches(batch_size=1000):
                writer.write_batch(batch)
    except BaseException as error:  # a full disk and Ctrl-C among them
        Path(name).unlink(missing_ok=True)
        if is_full(error):
            raise no_room(path, error) from error
        if isinstance(error, pa.ArrowException | OSError):
            raise ValueError(f"{path} must be a whole Parquet file, but {error}.") from error
        raise
    return name


def read_arrow(path: Path, name: str) -> Dataset:
    """An Arrow file, a stream or one with random access, memory-mapped.

    Raises:
        ValueError: it is neither, or cut.
    """
    from datasets import Dataset

    try:
        with path.open("rb") as file:
            is_stream = file.read(6) != b"ARROW1"
        if is_stream:
            return Dataset.from_file(str(path))
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            return Dataset(reader.read_all())
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{name} must be a whole Arrow file, but {error}.") from error


def read_saved(path: Path) -> Dataset:
    """A folder that `Dataset.save_to_disk` wrote.

    Raises:
        ValueError: a file of it is missing or broken.
    """
    from datasets import load_from_disk

    try:
        return load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} must be a whole folder of save_to_disk, but {error}.") from error


def to_records(table: pa.Table) -> list[Record]:
    """A table's rows, with columns of JSON text as what they say."""
    columns = [
        [_parsed(item, field.type) for item in table.column(number).to_pylist()]
        if _has_json(field.type)
        else table.column(number).to_pylist()
        for number, field in enumerate(table.schema)
    ]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _children(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(kind):
        return [kind.field(number) for number in range(kind.num_fields)]
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return [kind.value_field] if is_list or pa.types.is_fixed_size_list(kind) else []


def _has_json(kind: pa.DataType) -> bool:
    # By name: older versions of pyarrow have no such type.
    if getattr(kind, "extension_name", "") == "arrow.json":
        return True
    return any(_has_json(field.type) for field in _children(kind))


def _parsed(value: Any, kind: pa.DataType) -> Any:
    if value is None or not _has_json(kind):
        return value
    if isinstance(value, str):
        return json.loads(value)
    if isinstance(value, list):
        (item,) = _children(kind)
        return [_parsed(each, item.type) for each in value]
    return {field.name: _parsed(value[field.name], field.type) for field in _children(kind)}


def plain(value: Any) -> Any:
    """A copy without keys whose value is None, at any depth, and images as bytes or a path."""
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:  # how `datasets` stores images
            return value["path"] if value["bytes"] is None else value["bytes"]
        return {key: plain(item) for key, item in value.items() if item is not None}
    return [plain(item) for item in value] if isinstance(value, list) else value
