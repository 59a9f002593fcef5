"""Rows as a model will be trained on them: what to show of them; how it looks is others' affair.

`inspect_html` makes a page of it, the command `burnish data inspect` text for a terminal.
"""

from __future__ import annotations

import itertools
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from burnish_data.encode import LeftOutError
from burnish_data.rows import BadRowError, OnBadRow, Rows, Skipped, check_on_bad_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowT = TypeVar("RowT")
IntArray = NDArray[np.int64]

MUCH_SKIPPED = 0.1  # a share of skipped rows that is warned of
REPEATS_SHOWN = 4  # of one same token one after the other; of more, one and the number
_MAX_TOKENS_OF_A_CHARACTER = 4  # UTF-8 has no character of more bytes


@dataclass(frozen=True)
class Piece:
    """The text of one token, or of the few tokens that are one character together.

    `weight` is how much it is trained; 0 is not at all.
    """

    text: str
    num_tokens: int
    weight: float


@dataclass(frozen=True)
class ShownText:
    """One sequence of tokens. `name` is "chosen", say, where a row has several, else ""."""

    name: str
    pieces: tuple[Piece, ...]
    num_tokens: int
    num_trained: int
    truncated: bool


@dataclass(frozen=True)
class ShownRow:
    """A row that is shown in full, and where it stands."""

    where: str
    texts: tuple[ShownText, ...]


@dataclass(frozen=True)
class Bin:
    """How many sequences have `low` to `high` tokens, both included."""

    low: int
    high: int
    count: int


@dataclass(frozen=True)
class Inspection:
    """What was found in rows. A row with several sequences (chosen, rejected) counts each of them.

    Attributes:
        name: what was looked at.
        num_rows: rows read, good and bad.
        shown: the first good rows.
        lengths: tokens of each sequence, int64 [N].
        trained: trained tokens of each sequence, int64 [N].
        num_truncated: sequences that were cut at `max_length`.
        skipped: bad rows by reason, with examples.
        max_length: the limit in tokens, or None.
        form: by what the rows were made of which columns, if that is known.
    """

    name: str
    num_rows: int
    shown: tuple[ShownRow, ...]
    lengths: IntArray
    trained: IntArray
    num_truncated: int
    skipped: Skipped
    max_length: int | None = None
    form: str = ""

    @property
    def share_skipped(self) -> float:
        """Skipped rows of all, from 0 to 1."""
        return self.skipped.total / self.num_rows if self.num_rows else 0.0

    @property
    def warning(self) -> str:
        """What is to be seen before all else, or ""."""
        if self.share_skipped <= MUCH_SKIPPED:
            return ""
        return (
            f"WARNING: {self.share_skipped:.1%} of the rows cannot be used and would not be "
            "trained on; look at the reasons."
        )


@dataclass
class _Found:
    """What is known so far."""

    shown: list[ShownRow] = field(default_factory=list)
    lengths: array[int] = field(default_factory=lambda: array("q"))
    trained: array[int] = field(default_factory=lambda: array("q"))
    num_truncated: int = 0
    skipped: Skipped = field(default_factory=Skipped)


def inspect_rows(
    rows: Rows[RowT],
    encode: Callable[[Sequence[RowT]], Sequence[Mapping[str, Any] | BadRowError]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str = "rows",
    form: str = "",
    num_shown: int = 3,
    on_bad_row: OnBadRow = "skip",
    max_length: int | None = None,
    batch_rows: int = 256,
    show_progress: bool = False,
) -> Inspection:
    """Encode every row once, keep the first in full, and of all the lengths and what was wrong.

    Args:
        rows: any; each is made once.
        encode: for each row in order the columns `token_ids`, `token_mask`, and `token_weights` if
            there, of one sequence; or a mapping of names to such columns ("chosen", "rejected"); or
            the error. A column `truncated` that is true says that the tail was cut.
        tokenizer: turns ids into the text that is shown.
        name: what is looked at: a file, say.
        form: to be shown beside it: the format, and the columns it was told from.
        num_shown: so many good rows are kept in full.
        on_bad_row: "skip" counts bad rows by reason; "error" raises the first.
        max_length: to be shown beside the lengths; `encode` does the cutting.
        batch_rows: rows that are encoded together.
        show_progress: a bar with rate and ETA, on stderr.

    Raises:
        BadRowError: see `on_bad_row`.
        ValueError: an option that cannot be.
    """
    check_on_bad_row(on_bad_row)
    if num_shown < 0 or batch_rows < 1:
        raise ValueError(
            f"num_shown must be 0 or more and batch_rows 1 or more, got {num_shown} and "
            f"{batch_rows}; pass others."
        )
    found = _Found()
    with tqdm(total=len(rows), desc="inspecting", unit="row", disable=not show_progress) as bar:
        for start in range(0, len(rows), batch_rows):
            indices = range(start, min(start + batch_rows, len(rows)))
            for index, encoded in _encode(rows, indices, encode):
                if isinstance(encoded, BadRowError):
                    placed = encoded.at(rows.where(index))
                    # What the caller asked to leave out is no error.
                    if on_bad_row == "error" and not isinstance(encoded, LeftOutError):
                        raise placed from encoded
                    found.skipped.add(placed)
                    continue
                _count(found, encoded)
                if len(found.shown) < num_shown:
                    texts = (_shown_text(*each, tokenizer) for each in _sequences(encoded))
                    found.shown.append(ShownRow(rows.where(index), tuple(texts)))
            bar.update(len(indices))
    return Inspection(
        name=name,
        num_rows=len(rows),
        shown=tuple(found.shown),
        lengths=np.array(found.lengths, np.int64),
        trained=np.array(found.trained, np.int64),
        num_truncated=found.num_truncated,
        skipped=found.skipped,
        max_length=max_length,
        form=form,
    )


def skipped_text(inspection: Inspection) -> str:
    """How many rows were skipped, and of how many."""
    if not inspection.skipped.total:
        return "0"
    total, share = inspection.skipped.total, inspection.share_skipped
    return f"{total:,} of {inspection.num_rows:,} ({share:.1%})"


def length_histogram(lengths: Sequence[int] | IntArray, *, max_bins: int = 16) -> list[Bin]:
    """Lengths in bins of one round width (1, 2 or 5 times a power of ten), from least to greatest.

    Args:
        lengths: tokens of each sequence, [N].
        max_bins: at most so many bins.
    """
    values = np.asarray(lengths, np.int64)
    if not values.size:
        return []
    low, high = int(values.min()), int(values.max())
    width = next(w for w in _round_widths() if high // w - low // w < max_bins)
    first = low // width
    counts = np.bincount(values // width - first)
    return [
        Bin((first + i) * width, (first + i + 1) * width - 1, int(count))
        for i, count in enumerate(counts)
    ]


def visible(text: str) -> str:
    r"""The text with what a screen would obey rather than show written out, as in `\x1b`.

    That is control characters but for line ends and tabs; characters of format, which turn the
    direction of reading around or are not seen at all, but for the joiner that emoji are made with
    (U+200D); and halves of surrogate pairs, which cannot be written as UTF-8.
    """
    return "".join(ascii(char)[1:-1] if _is_obeyed(char) else char for char in text)


def runs_of(pieces: Sequence[Piece]) -> list[tuple[float, list[tuple[str, int]]]]:
    """Neighbours of one weight together: the weight, and their texts with how often each follows.

    An image is hundreds of one same token, of which one is to be shown.
    """
    return [
        (
            weight,
            [(text, len(list(same))) for text, same in itertools.groupby(run, _text_of)],
        )
        for weight, run in itertools.groupby(pieces, key=lambda piece: piece.weight)
    ]


def pieces_of(
    token_ids: Sequence[int], weights: Sequence[float], tokenizer: PreTrainedTokenizerBase
) -> list[Piece]:
    """The text of each token; of tokens that are one character only together, their common text.

    Args:
        token_ids: [T].
        weights: how much each is trained, [T].
        tokenizer: decodes them.
    """
    pieces: list[Piece] = []
    known: dict[tuple[int, ...], str] = {}

    def decode(ids: tuple[int, ...]) -> str:
        if ids not in known:
            known[ids] = cast(
                str,
                tokenizer.decode(
                    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                ),
            )
        return known[ids]

    before: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    for position, (token_id, weight) in enumerate(zip(token_ids, weights, strict=True)):
        pending = (*pending, int(token_id))
        # Decoded after the token before it: at the beginning of a text some decoders drop a space.
        text = decode((*before, *pending))[len(decode(before)) if before else 0 :]
        more = position + 1 < len(token_ids) and weights[position + 1] == weight
        if text.endswith("\ufffd") and more and len(pending) < _MAX_TOKENS_OF_A_CHARACTER:
            continue
        pieces.append(Piece(text, len(pending), float(weight)))
        before, pending = (() if text.endswith("\ufffd") else pending), ()
    return pieces


def _encode(
    rows: Rows[RowT],
    indices: Sequence[int],
    encode: Callable[[Sequence[RowT]], Sequence[Mapping[str, Any] | BadRowError]],
) -> Iterator[tuple[int, Mapping[str, Any] | BadRowError]]:
    """What becomes of each of these rows, in order."""
    made: dict[int, RowT | BadRowError] = {}
    for index in indices:
        try:
            made[index] = rows.row(index)
        except BadRowError as error:
            made[index] = error
    good = [row for row in made.values() if not isinstance(row, BadRowError)]
    encoded = iter(_results(good, encode) if good else [])
    for index, row in made.items():
        yield index, (row if isinstance(row, BadRowError) else next(encoded))


def _results(
    rows: Sequence[RowT],
    encode: Callable[[Sequence[RowT]], Sequence[Mapping[str, Any] | BadRowError]],
) -> Sequence[Mapping[str, Any] | BadRowError]:
    try:
        encoded = encode(rows)
    except BadRowError as error:  # of one of them: which?
        if len(rows) == 1:
            return [error]
        return [result for row in rows for result in _results([row], encode)]
    if len(encoded) != len(rows):
        raise ValueError(
            f"encode must give one result for each row, got {len(encoded)} for {len(rows)} rows; "
            "return a BadRowError in the place of a bad one."
        )
    return encoded


def _sequences(encoded: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The token columns within what a row was encoded to, each with its name."""
    if "token_ids" in encoded:
        return [("", encoded)]
    return [
        (f"{name} {i + 1}" if isinstance(value, list) else name, columns)
        for name, value in encoded.items()
        for i, columns in enumerate(value if isinstance(value, list) else [value])
        if isinstance(columns, Mapping) and "token_ids" in columns
    ]


def _count(found: _Found, encoded: Mapping[str, Any]) -> None:
    for _, columns in _sequences(encoded):
        found.lengths.append(len(columns["token_ids"]))
        found.trained.append(int(np.count_nonzero(columns["token_mask"])))
        found.num_truncated += bool(columns.get("truncated", False))


def _shown_text(
    name: str, columns: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> ShownText:
    token_ids = np.asarray(columns["token_ids"])
    mask = np.asarray(columns["token_mask"], np.float32)
    weights = mask * np.asarray(columns.get("token_weights", mask), np.float32)
    return ShownText(
        name=name,
        pieces=tuple(pieces_of(token_ids.tolist(), weights.tolist(), tokenizer)),
        num_tokens=len(token_ids),
        num_trained=int(np.count_nonzero(mask)),
        truncated=bool(columns.get("truncated", False)),
    )


def _text_of(piece: Piece) -> str:
    return piece.text


def _round_widths() -> Iterator[int]:
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _is_obeyed(char: str) -> bool:
    if char in "\n\t\u200d":
        return False
    return unicodedata.category(char) in ("Cc", "Cf", "Cs")
