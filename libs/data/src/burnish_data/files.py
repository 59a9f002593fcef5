"""Anyone's files as rows: local ones, folders, and data sets of the hub, by one function."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

from burnish_data._arrow_files import DatasetRows, ParquetRows, read_arrow, read_saved
from burnish_data._csv_file import CsvFile
from burnish_data._text_files import MAX_ROW_BYTES, JsonArray, JsonLines
from burnish_data.rows import BadRowError, ConcatenatedRows, Rows
from burnish_data.stream import RowStream, stream_of, stream_of_dataset

Record = dict[str, Any]

_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_TEXT = ("jsonl", "json", "csv", "tsv")  # these may be packed by gzip
_LOOKED_AT = 100  # rows that are searched for the columns before a file is refused
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")


@overload
def open_rows(
    source: str | Path,
    *,
    split: str = ...,
    config: str | None = ...,
    streaming: Literal[False] = ...,
    columns: Sequence[str] = ...,
    format: str | None = ...,
    max_row_bytes: int = ...,
) -> Rows[Record]: ...


@overload
def open_rows(
    source: str | Path,
    *,
    split: str = ...,
    config: str | None = ...,
    streaming: Literal[True],
    columns: Sequence[str] = ...,
    format: str | None = ...,
    max_row_bytes: int = ...,
) -> RowStream[Record]: ...


@overload
def open_rows(
    source: str | Path,
    *,
    split: str = ...,
    config: str | None = ...,
    streaming: bool,
    columns: Sequence[str] = ...,
    format: str | None = ...,
    max_row_bytes: int = ...,
) -> Rows[Record] | RowStream[Record]: ...


def open_rows(
    source: str | Path,
    *,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
    columns: Sequence[str] = (),
    format: str | None = None,
    max_row_bytes: int = MAX_ROW_BYTES,
) -> Rows[Record] | RowStream[Record]:
    """Records of a file, a folder or a data set of the hub, each read when it is asked for.

    Memory stays flat: text files keep an index of their rows, Parquet becomes a temporary Arrow
    file and a gzip a temporary text file (in `TMPDIR`, removed with the rows), Arrow files are
    memory-mapped. JSON comes as it is written; from Parquet, Arrow and the hub keys whose value is
    None are left out, at any depth, and images are bytes or paths. CSV has text alone.

    Args:
        source: a file (.jsonl, .json, .csv, .tsv, each also with .gz; .parquet, .arrow); a folder
            that `save_to_disk` wrote, or one with SPLIT.jsonl, `SPLIT-*.parquet` and the like, in
            it or in its folder "data" or `config`; or a hub id, such as "openai/gsm8k".
        split: of a folder or the hub. A file is read whatever it is.
        config: of the hub: the data set's configuration. Of a folder: a folder in it, if there.
        streaming: a `RowStream`, and the hub's rows are fetched as they are read.
        columns: that every row must have.
        format: "jsonl", "json", "csv", "tsv", "parquet" or "arrow", where a name does not say.
        max_row_bytes: of text files: a longer row is a bad row and is never read.

    Raises:
        ValueError: no such source, or one that is broken as a whole.
        BadRowError: a ValueError; none of the first 100 rows has the columns. Rows that are bad on
            their own raise it later, when they are asked for, so that they can be skipped.
    """
    if not str(source):
        raise ValueError("source must be a file, a folder or a hub id, got an empty text.")
    path, is_folder, is_there = _look_up(source)
    if format is not None and format not in _FORMATS.values():
        raise ValueError(f"format must be one of {sorted(set(_FORMATS.values()))}, got {format!r}.")
    rows: Rows[Record] | RowStream[Record]
    if is_folder:
        rows = _open_folder(path, split, config, format, max_row_bytes)
    elif is_there or _is_file_name(str(source)):
        rows = _open_file(path, format, max_row_bytes)
    else:
        rows = _open_hub(str(source), split, config, streaming)
    if columns:
        rows = _with_columns(rows, tuple(columns))
    return stream_of(rows) if streaming and isinstance(rows, Rows) else rows


def _look_up(source: str | Path) -> tuple[Path, bool, bool]:
    """The path, whether it is a folder, and whether anything, be it a broken link, is there."""
    try:
        path = Path(source).expanduser()
        return path, path.is_dir(), path.exists() or path.is_symlink()
    except (OSError, RuntimeError) as error:
        shown = str(source) if len(str(source)) <= 120 else f"{str(source)[:120]}..."
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"source must be a file or a folder that can be looked up, got {shown!r}: {reason}."
        ) from error


def _open_file(path: Path, format: str | None, max_row_bytes: int) -> Rows[Record]:
    if not path.is_file():
        raise ValueError(_no_file(path))
    kind = format or _format_of(path)
    if kind == "jsonl":
        return JsonLines(path, max_row_bytes=max_row_bytes)
    if kind == "json":
        opened = JsonArray if _begins_as_array(path) else JsonLines
        return opened(path, max_row_bytes=max_row_bytes)
    if kind in ("csv", "tsv"):
        delimiter = "," if kind == "csv" else "\t"
        return CsvFile(path, delimiter=delimiter, max_row_bytes=max_row_bytes)
    if kind == "parquet":
        return ParquetRows(path)
    if kind == "arrow":
        return DatasetRows(read_arrow(path, str(path)), str(path), path)
    raise ValueError(
        f"{path} must have a name that ends in one of {sorted(_FORMATS)} (text also with .gz), or "
        f"say its format: format={'jsonl'!r}."
    )


def _format_of(path: Path) -> str | None:
    if path.suffix != ".gz":
        return _FORMATS.get(path.suffix.lower())
    kind = _FORMATS.get(Path(path.stem).suffix.lower())
    return kind if kind in _TEXT else None


def _is_file_name(source: str) -> bool:
    """Whether a source that does not exist was meant as a path."""
    is_path = source.startswith(("/", ".", "~")) or source.count("/") > 1 or "\\" in source
    return is_path or _format_of(Path(source)) is not None or source.endswith(".gz")


def _no_file(path: Path) -> str:
    if path.exists():
        return f"{path} must be a file or a folder, and it is neither."
    if path.is_symlink():
        return (
            f"{path} must be a file or a folder, and it is a link to {str(path.readlink())!r}, "
            "which is not there or leads back to it."
        )
    near = path.parent if path.parent.is_dir() else None
    names = sorted(entry.name for entry in near.iterdir()) if near else []
    match = get_close_matches(path.name, names, n=1)
    hint = f"; there is {match[0]!r}" if match else ""
    return f"{path} must be a file that exists, and there is none{hint}."


def _begins_as_array(path: Path) -> bool:
    """Whether a .json file is an array; many are lines of objects."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4096)
    except (EOFError, OSError, zlib.error):
        return True  # opening it will say what is wrong
    return not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _open_folder(
    path: Path, split: str, config: str | None, format: str | None, max_row_bytes: int
) -> Rows[Record]:
    if (path / "dataset_dict.json").is_file() and (path / split).is_dir():
        path /= split
    if (path / "state.json").is_file():
        return DatasetRows(read_saved(path), str(path))
    places = [path / config, path / config / "data"] if config else []
    for place in [*places, path, path / "data"]:
        files = _files_of_split(place, split, format)
        if files:
            parts = [_open_file(file, format, max_row_bytes) for file in files]
            return parts[0] if len(parts) == 1 else ConcatenatedRows(parts)
    found = sorted(entry.name for entry in path.iterdir())[:20]
    raise ValueError(
        f"The folder {path} must hold {split}.jsonl, {split}-*.parquet or the like, or what "
        f"save_to_disk writes, got {found}; {_other_split(path)}, or name the file itself."
    )


def _other_split(folder: Path) -> str:
    """What to pass instead, if the folder leaves no choice."""
    names = [
        file.name.partition(".")[0].partition("-")[0]
        for place in (folder, folder / "data")
        if place.is_dir()
        for file in place.iterdir()
        if _format_of(file) is not None and file.is_file()
    ]
    if len(set(names)) == 1:
        return f"pass split={names[0]!r}"
    return "name a split that is there"


def _files_of_split(folder: Path, split: str, format: str | None) -> list[Path]:
    if not folder.is_dir():
        return []
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        kind = _format_of(file)
        name = file.name.partition(".")[0]
        is_split = name == split or name.startswith(f"{split}-")
        if kind is not None and is_split and format in (None, kind) and file.is_file():
            found.setdefault(kind, []).append(file)
    if len(found) > 1:
        names = [files[0].name for files in found.values()]
        raise ValueError(
            f"The folder {folder} must hold split {split!r} in one format, got {names}; name the "
            "file itself, or the format."
        )
    files = next(iter(found.values()), [])
    _check_shards(folder, files)
    return files


def _check_shards(folder: Path, files: list[Path]) -> None:
    shards = [match.groups() for file in files if (match := _SHARD.search(file.name))]
    for total in {total for _, total in shards}:
        there = {int(number) for number, of in shards if of == total}
        missing = sorted(set(range(int(total))) - there)
        if missing:
            raise ValueError(
                f"The folder {folder} must hold all {int(total)} parts of the split, and number "
                f"{missing[0]:05d} of {total} is missing ({len(missing)} in all); fetch it anew."
            )


def _open_hub(
    name: str, split: str, config: str | None, streaming: bool
) -> Rows[Record] | RowStream[Record]:
    from datasets import load_dataset

    place = f"{name} ({split})"
    try:
        dataset = load_dataset(name, config, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be a file or folder that exists, or a hub id that can be reached with "
            f"split {split!r} and config {config!r}, but {type(error).__name__}: {error}"
        ) from error
    return stream_of_dataset(dataset, place) if streaming else DatasetRows(dataset, place)


def _with_columns(
    rows: Rows[Record] | RowStream[Record], columns: tuple[str, ...]
) -> Rows[Record] | RowStream[Record]:
    checked = rows.map(_RequireColumns(columns))
    if isinstance(checked, RowStream):
        return checked  # nothing is fetched before it is asked for
    first: BadRowError | None = None
    for index in range(min(len(checked), _LOOKED_AT)):
        try:
            checked.row(index)
        except BadRowError as error:
            if error.reason != "missing column":
                continue
            first = first or error
        else:
            return checked
    if first is not None:
        raise first
    return checked


class _RequireColumns:
    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns

    def __call__(self, record: Record) -> Record:
        require_columns(record, *self._columns)
        return record


def require_columns(record: Mapping[str, Any], *columns: str) -> None:
    """Whether a record has these columns.

    Raises:
        BadRowError: one is missing; names what there is, and the nearest.
    """
    for column in columns:
        if column not in record:
            match = get_close_matches(column, record, n=1, cutoff=0.5)
            near = f" (is it {match[0]!r}?)" if match else ""
            raise BadRowError(
                f"a column of this name{near}", list(record), column=column, reason="missing column"
            )
