"""Rows as token ids on disk, encoded once, by worker processes, in the order of the rows."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa
from tqdm.auto import tqdm

from burnish_data._arguments import check_many, check_no_stream
from burnish_data._columns import ArrowFolder, as_batch, conform, union
from burnish_data._workers import Workers, as_num_workers
from burnish_data.encode import LeftOutError
from burnish_data.rows import BadRowError, ListRows, OnBadRow, Rows, Skipped, check_on_bad_row

if TYPE_CHECKING:
    from datasets import Dataset

RowT = TypeVar("RowT")
Results = Generator[tuple[pa.RecordBatch | None, Skipped], None, None]  # of each span
Encode = Callable[[Sequence[RowT]], Sequence[Mapping[str, Any] | BadRowError]]

_AHEAD = 4  # batches per worker


def encode_rows(
    rows: Rows[RowT] | Sequence[RowT],
    encode: Encode[RowT],
    *,
    output: str | Path | None = None,
    num_workers: int = 1,
    on_bad_row: OnBadRow = "error",
    batch_rows: int = 1000,
    show_progress: bool = True,
) -> tuple[Dataset, Skipped]:
    """Encode rows into a data set; what was left out is counted::

        encode = functools.partial(encode_chats, tokenizer=tokenizer, max_length=8192)
        dataset, skipped = encode_rows(rows, encode, output="train.tokens", num_workers=8)

    The result depends on the rows and `encode` alone, not on `num_workers`. It has the columns that
    `encode` gives (arrays [T] as lists; numbers; text; a mapping, such as that of a chosen
    completion, as a struct), and beside every `token_ids`

    - `length`: int32, its tokens, for a plan of batches;
    - `truncated`: bool, whether the tail was cut, so that `sum(dataset["truncated"])` counts.

    `token_weights`, which an encoded row has only if it needs them, are there for all rows as soon
    as one has them: 1.0 where `token_mask` is True, else 0.0. Likewise `margin`, null for rows that
    have none.

    Memory holds a few batches per worker, however many the rows: workers read the rows themselves,
    results go to disk, and the data set maps them into memory.

    Args:
        rows: with more than one worker, picklable; best those of files, which workers open anew. A
            list is rows, too.
        encode: makes of a list of rows one mapping of columns, or a BadRowError, each. Picklable
            with more than one worker: a function from the top level of a module, or a
            `functools.partial` of one.
        output: a new folder, for `datasets.load_from_disk` later. It is written under another name
            beside it and renamed when it is complete, so that it is never there by half. A process
            that is ended by SIGTERM or SIGKILL leaves that other one, `.NAME.partial-*`, behind;
            the next that starts on this machine with this output removes it. None: the result is
            held in memory.
        num_workers: processes; 1 encodes in this one. They are spawned: a script that asks for more
            does so under `if __name__ == "__main__":`. Ctrl-C ends them all.
        on_bad_row: "error" raises the first error by the order of the rows; "skip" leaves such rows
            out and counts them. A row that `encode` itself is asked to leave out (`LeftOutError`,
            `too_long="skip"`) is counted in both cases.
        batch_rows: rows that one call of `encode` gets.
        show_progress: a bar with rate and ETA.

    Raises:
        BadRowError: see `on_bad_row`; it says file and line.
        ValueError: no row was good; `output` is there; an argument is out of range or cannot be
            pickled; rows were encoded to different columns.
        WorkerDiedError: a worker process ended, killed for memory, say.
    """
    check_on_bad_row(on_bad_row)
    as_num_workers(num_workers, 1)
    if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
        raise ValueError(f"batch_rows must be a number of rows, 1 or more, got {batch_rows!r}.")
    check_no_stream(rows, "encode_rows")
    check_many(rows, "encode_chat", "encode_rows")
    if not callable(encode):
        raise ValueError(
            f"encode must be a function of a list of rows, got a {type(encode).__name__}; pass "
            "functools.partial(encode_chats, tokenizer=tokenizer)."
        )
    if not isinstance(rows, Rows):
        rows = ListRows(rows)
    if not len(rows):
        raise ValueError("There must be rows to encode, got none; check what the source read.")
    target = None if output is None else Path(output)
    if target is not None and (target.exists() or target.is_symlink()):
        raise _is_there(target)
    work = _Work(rows, encode, on_bad_row)
    spans = [
        (start, min(start + batch_rows, len(rows))) for start in range(0, len(rows), batch_rows)
    ]
    with tqdm(total=len(rows), desc="encoding", unit="row", disable=not show_progress) as bar:
        results = _shown(work.results(spans, min(num_workers, len(spans))), spans, bar)
        with closing(results):
            return _to_memory(results) if target is None else _to_folder(results, target)


@dataclass(frozen=True)
class _Work(Generic[RowT]):
    """What encodes a span of rows, here or in a worker."""

    rows: Rows[RowT]
    encode: Encode[RowT]
    on_bad_row: OnBadRow

    def results(self, spans: Sequence[tuple[int, int]], num_workers: int) -> Results:
        if num_workers == 1:
            yield from map(self, spans)
            return
        workers = Workers(self, num_workers)
        with closing(workers):
            yield from workers.map(spans, ahead=_AHEAD)

    def __call__(self, span: tuple[int, int]) -> tuple[pa.RecordBatch | None, Skipped]:
        """The rows from start to end that are good, and what was left out."""
        good, skipped = [], Skipped()
        for index, result in zip(range(*span), self._encoded(span), strict=True):
            if not isinstance(result, BadRowError):
                good.append(result)
                continue
            error = result.at(self.rows.where(index))
            if self.on_bad_row == "error" and not isinstance(error, LeftOutError):
                raise error from result
            skipped.add(error)
        return (as_batch(good) if good else None), skipped

    def _encoded(self, span: tuple[int, int]) -> list[Mapping[str, Any] | BadRowError]:
        results: list[Any] = []
        for index in range(*span):
            try:
                results.append(self.rows.row(index))
            except BadRowError as error:
                results.append(error)
        places = [i for i, row in enumerate(results) if not isinstance(row, BadRowError)]
        encoded = self._encode([results[i] for i in places])
        for i, result in zip(places, encoded, strict=True):
            results[i] = result
        return results

    def _encode(self, rows: Sequence[RowT]) -> Sequence[Mapping[str, Any] | BadRowError]:
        if not rows:
            return []
        try:
            encoded = self.encode(rows)
        except BadRowError as error:  # of one of them: which?
            if len(rows) == 1:
                return [error]
            return [result for row in rows for result in self._encode([row])]
        if isinstance(encoded, Mapping):
            raise ValueError(
                "encode must give a list with one result for each row, got one result; pass a "
                "function of many rows, such as encode_chats."
            )
        if len(encoded) != len(rows):
            raise ValueError(
                f"encode must give one result for each row, got {len(encoded)} for {len(rows)} "
                f"rows; return a BadRowError in the place of a bad one."
            )
        return encoded


def _shown(
    results: Results,
    spans: Sequence[tuple[int, int]],
    bar: tqdm[Any],
) -> Results:
    num_skipped = 0
    for (start, end), (batch, skipped) in zip(spans, results, strict=True):
        yield batch, skipped
        num_skipped += skipped.total
        if num_skipped:
            bar.set_postfix(skipped=num_skipped, refresh=False)
        bar.update(end - start)


def _to_memory(
    results: Results,
) -> tuple[Dataset, Skipped]:
    from datasets import Dataset  # here, since its import takes a second

    batches, skipped = [], Skipped()
    for batch, left_out in results:
        skipped += left_out
        if batch is not None:
            batches.append(batch)
    _check_some(len(batches), skipped)
    schema = batches[0].schema
    for batch in batches:
        schema = union(schema, batch.schema)
    table = pa.Table.from_batches([conform(batch, schema) for batch in batches])
    return Dataset(table), skipped


def _to_folder(results: Results, target: Path) -> tuple[Dataset, Skipped]:
    from datasets import Dataset, load_from_disk

    skipped, num_batches = Skipped(), 0
    with _complete_or_absent(target) as folder:
        writer = ArrowFolder(folder)
        try:
            for batch, left_out in results:
                skipped += left_out
                if batch is not None:
                    num_batches += 1
                    writer.write(batch)
            _check_some(num_batches, skipped)
            writer.finish()
        finally:
            writer.close()
    dataset = load_from_disk(str(target))
    assert isinstance(dataset, Dataset)
    return dataset, skipped


@contextmanager
def _complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write in, which becomes the target if all goes well, else is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(target)
    name = f".{target.name}.partial-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = target.with_name(name)
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError as error:  # another was faster
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise _is_there(target) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _is_there(target: Path) -> ValueError:
    return ValueError(
        f"output must be a new folder, but {str(target)!r} is there; load it with "
        f"datasets.load_from_disk, remove it, or choose another."
    )


def _machine() -> str:
    """Of this machine, since a process of another is none of those that are known here."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _remove_left_over(target: Path) -> None:
    """Remove what processes of this machine that are dead have left by half."""
    ours = re.compile(rf"\.{re.escape(target.name)}\.partial-{_machine()}-(\d+)-[0-9a-f]{{8}}")
    for folder in list(target.parent.iterdir()):
        match = ours.fullmatch(folder.name)
        if match and not _is_alive(int(match[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _check_some(num_batches: int, skipped: Skipped) -> None:
    if not num_batches:
        raise ValueError(f"At least one row must be good, got none: {skipped}")
