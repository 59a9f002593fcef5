"""How the sources read: records of a hub's data set, a file or a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast, overload

from burnish_data.files import open_rows
from burnish_data.rows import ConcatenatedRows, Rows
from burnish_data.stream import RowStream

RowT = TypeVar("RowT")
Record = dict[str, Any]


class StreamableSource(Protocol[RowT]):
    """A source that gives rows, or, with `streaming=True`, a stream of them."""

    @overload
    def __call__(
        self,
        source: str | Path = ...,
        *,
        split: str = ...,
        streaming: Literal[False] = ...,
        **options: Any,
    ) -> Rows[RowT]: ...

    @overload
    def __call__(
        self,
        source: str | Path = ...,
        *,
        split: str = ...,
        streaming: Literal[True],
        **options: Any,
    ) -> RowStream[RowT]: ...


def streamable(function: Callable[..., Rows[RowT] | RowStream[RowT]]) -> StreamableSource[RowT]:
    """The function itself; a type checker then knows which of the two it returns."""
    return cast("StreamableSource[RowT]", function)


def read(
    source: str | Path,
    *,
    split: str,
    columns: Sequence[str],
    config: str | None = None,
    streaming: bool = False,
) -> Rows[Record] | RowStream[Record]:
    """Records, all at once or one after the other."""
    return open_rows(source, split=split, config=config, columns=columns, streaming=streaming)


def read_configs(
    source: str | Path, configs: Sequence[str], *, split: str, columns: Sequence[str]
) -> Rows[Record]:
    """Records of several configurations, one after the other.

    Locally that is a folder with a folder for each, or one file or folder that holds them all.
    """
    path = Path(source).expanduser()
    if path.is_dir() and any((path / config).is_dir() for config in configs):
        return ConcatenatedRows(
            [open_rows(path / config, split=split, columns=columns) for config in configs]
        )
    if path.exists():
        return open_rows(path, split=split, columns=columns)
    return ConcatenatedRows(
        [open_rows(source, split=split, config=config, columns=columns) for config in configs]
    )
