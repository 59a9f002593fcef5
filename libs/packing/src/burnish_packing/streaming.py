"""Packing of a stream whose end is not in sight: best fit over open bins, with a bounded buffer."""

import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeVar

import numpy as np

from burnish_packing._checks import check_count, check_positive, shown
from burnish_packing._pieces import TOO_LONG, TooLong, check_choice
from burnish_packing.metrics import fill_ratio

SCHEMA_VERSION = 1
Item = TypeVar("Item")

_SETTINGS = ("capacity", "buffer_size", "too_long", "max_sequences_per_bin")
_COUNTS = (
    "num_items",
    "num_bins",
    "num_tokens",
    "num_skipped",
    "num_truncated",
    "num_split",
    "num_lost_tokens",
)


class StreamPacker(Generic[Item]):
    """Puts items into bins of `capacity` tokens while they arrive.

    Each item goes into the fullest open bin that has room, the oldest of equals, else into a new
    one. A bin is given out as soon as it is full; when more than `buffer_size` items are held, the
    fullest is. What comes out depends on the items and their order only, not on how they are cut
    into batches, and nothing is lost at the end. For an iterable data set::

        packer = StreamPacker(8192)
        packer.load_state_dict(state)  # to go on where a run stopped
        for sequences in packer.pack(itertools.islice(source(), packer.num_items, None)):
            ...
            state = packer.state_dict()

    Under several data-loader workers each packs its own share with its own packer.

    Args:
        capacity: tokens of a bin.
        buffer_size: items that are held at most; more of them fill the bins better.
        too_long: for items longer than the capacity: `error`; `skip`; `truncate` to the first
            `capacity` tokens; `split` into pieces of at most `capacity` tokens.
        max_sequences_per_bin: items of a bin at most.
        length: tokens of an item; by default the length of a sequence (list, array, tensor), or of
            the columns of a mapping, which must be equally long.
        cut: (item, start, end) -> the item's tokens start to end, for `truncate` and `split`; by
            default a slice, of every column if it is a mapping. The pieces are measured by
            `length`.

    Raises:
        ValueError: an argument is out of range; later, an item is too long or has no clear length.
    """

    def __init__(
        self,
        capacity: int,
        *,
        buffer_size: int = 1024,
        too_long: TooLong = "error",
        max_sequences_per_bin: int | None = None,
        length: Callable[[Item], int] | None = None,
        cut: Callable[[Item, int, int], Item] | None = None,
    ) -> None:
        self.capacity = check_positive(capacity, "capacity")
        self.buffer_size = check_positive(buffer_size, "buffer_size")
        check_choice(too_long, TOO_LONG, "too_long")
        self.too_long = too_long
        if max_sequences_per_bin is not None:
            max_sequences_per_bin = check_positive(max_sequences_per_bin, "max_sequences_per_bin")
        self.max_sequences_per_bin = max_sequences_per_bin
        self._length: Callable[[Any], int] = length or _length
        self._cut: Callable[[Any, int, int], Any] = cut or _cut
        self.num_items = 0  # received, also those that were skipped
        self.num_bins = 0  # given out, as are the tokens
        self.num_tokens = 0
        self.num_skipped = 0
        self.num_truncated = 0
        self.num_split = 0
        self.num_lost_tokens = 0
        self._rooms: list[tuple[int, int]] = []  # ascending (room, number) of the open bins
        self._open: dict[int, list[Item]] = {}  # by number, oldest first
        self._num_opened = 0
        self._num_held = 0
        self._ready: deque[tuple[list[Item], int]] = deque()  # full bins and their tokens

    def pack(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        """All bins of `items` and of what was held before, the open ones at the end.

        The state may be taken between any two bins.
        """
        yield from self._drain()
        for item in items:
            self._take(item)
            yield from self._drain()
        self._close_all()
        yield from self._drain()

    def add(self, item: Item) -> list[list[Item]]:
        """Take one item; the bins that this completes, mostly none."""
        self._take(item)
        return list(self._drain())

    def flush(self) -> list[list[Item]]:
        """The open bins, oldest first; afterwards the packer holds nothing."""
        self._close_all()
        return list(self._drain())

    def metrics(self) -> dict[str, float]:
        """Counts of items (all that came), of bins and tokens given out, and their `fill_ratio`."""
        counts: dict[str, float] = {name: getattr(self, name) for name in _COUNTS}
        capacity = self.capacity * max(self.num_bins, 1)
        return {**counts, "fill_ratio": fill_ratio([self.num_tokens], capacity)}

    def state_dict(self) -> dict[str, Any]:
        """Settings, counts and the items held, with which `load_state_dict` goes on.

        Plain data as far as the items are; the source is to be continued at item `num_items`.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in (*_SETTINGS, *_COUNTS)},
            "open_bins": [
                {"number": number, "room": room, "items": list(self._open[number])}
                for room, number in self._rooms
            ],
            "num_opened": self._num_opened,
            "ready_bins": [list(items) for items, _ in self._ready],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: it is of another version or of other settings, or its bins are not what
                these settings make; the packer is then as it was before.
        """
        _check_state(state, {name: getattr(self, name) for name in _SETTINGS})
        opened = sorted(state["open_bins"], key=lambda entry: entry["number"])
        tokens = [sum(map(self._tokens_of, entry["items"])) for entry in opened]
        for entry, held in zip(opened, tokens, strict=True):
            if entry["room"] != self.capacity - held or not 0 <= held < self.capacity:
                raise ValueError(
                    f"the open bins of a state must have the room that their items leave of "
                    f"{self.capacity}, got room {shown(entry['room'])} beside {held} tokens; save "
                    f"the state again"
                )
        ready = [(list(items), sum(map(self._tokens_of, items))) for items in state["ready_bins"]]
        if max((held for _, held in ready), default=0) > self.capacity:
            raise ValueError(
                f"the ready bins of a state must hold at most {self.capacity} tokens, got "
                f"{max(held for _, held in ready)}; save the state again"
            )
        for name in _COUNTS:
            setattr(self, name, state[name])
        self._rooms = sorted((entry["room"], entry["number"]) for entry in opened)
        self._open = {entry["number"]: list(entry["items"]) for entry in opened}
        self._num_opened = state["num_opened"]
        self._num_held = sum(map(len, self._open.values()))
        self._ready = deque(ready)

    def _tokens_of(self, item: Item) -> int:
        length = self._length(item)
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 0:
            raise ValueError(
                f"the length of an item must be an integer >= 0, got {shown(length)} at item "
                f"{self.num_items}; correct `length`"
            )
        return int(length)

    def _piece(self, item: Item, start: int, end: int) -> Item:
        piece = self._cut(item, start, end)
        length = self._tokens_of(piece)
        if length != end - start:
            raise ValueError(
                f"a piece of an item must have the {end - start} tokens from {start} to {end}, got "
                f"{length} at item {self.num_items}; correct `cut` (or `length`)"
            )
        return piece

    def _take(self, item: Item) -> None:
        length = self._tokens_of(item)
        if length <= self.capacity:
            self._place(item, length)
        elif self.too_long == "error":
            raise ValueError(
                f"every sequence must fit a bin of capacity {self.capacity}, got {length} tokens "
                f"for item {self.num_items}; raise the capacity, drop it or choose too_long"
            )
        elif self.too_long == "skip":
            self.num_skipped += 1
            self.num_lost_tokens += length
        elif self.too_long == "truncate":
            self._place(self._piece(item, 0, self.capacity), self.capacity)
            self.num_truncated += 1
            self.num_lost_tokens += length - self.capacity
        else:
            starts = range(0, length, self.capacity)
            spans = [(start, min(start + self.capacity, length)) for start in starts]
            pieces = [self._piece(item, start, end) for start, end in spans]
            for piece, (start, end) in zip(pieces, spans, strict=True):
                self._place(piece, end - start)
            self.num_split += 1
        self.num_items += 1

    def _place(self, item: Item, length: int) -> None:
        at = bisect_left(self._rooms, (length, -1))
        if at < len(self._rooms):
            room, number = self._rooms.pop(at)
        else:
            room, number = self.capacity, self._num_opened
            self._open[number] = []
            self._num_opened += 1
        items = self._open[number]
        items.append(item)
        self._num_held += 1
        room -= length
        if not room or len(items) == self.max_sequences_per_bin:
            self._close(number, room)
        else:
            insort(self._rooms, (room, number))
        while self._num_held > self.buffer_size:
            room, number = self._rooms.pop(0)
            self._close(number, room)

    def _close(self, number: int, room: int) -> None:
        items = self._open.pop(number)
        self._num_held -= len(items)
        self._ready.append((items, self.capacity - room))

    def _close_all(self) -> None:
        room_of = {number: room for room, number in self._rooms}
        self._rooms.clear()
        for number in list(self._open):
            self._close(number, room_of[number])

    def _drain(self) -> Iterator[list[Item]]:
        while self._ready:
            items, num_tokens = self._ready.popleft()
            self.num_bins += 1
            self.num_tokens += num_tokens
            yield items


def pack_stream(
    items: Iterable[Item],
    capacity: int,
    *,
    buffer_size: int = 1024,
    too_long: TooLong = "error",
    max_sequences_per_bin: int | None = None,
    length: Callable[[Item], int] | None = None,
    cut: Callable[[Item, int, int], Item] | None = None,
) -> Iterator[list[Item]]:
    """Bins of items, as they fill: `StreamPacker(...).pack(items)` where no state is needed."""
    packer = StreamPacker(
        capacity,
        buffer_size=buffer_size,
        too_long=too_long,
        max_sequences_per_bin=max_sequences_per_bin,
        length=length,
        cut=cut,
    )
    return packer.pack(items)


def _check_state(state: Any, settings: Mapping[str, Any]) -> None:
    """ValueError unless it has the form of `StreamPacker.state_dict`, made with these settings."""
    version = state.get("schema_version") if isinstance(state, Mapping) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"a stream packer's state must have schema_version {SCHEMA_VERSION}, got "
            f"{shown(version)}; write it again with this version"
        )
    names = {*_SETTINGS, *_COUNTS, "open_bins", "num_opened", "ready_bins"}
    remedy = "save the state again"
    if missing := sorted(names - state.keys()):
        raise ValueError(f"a state must have {sorted(names)}, got {missing} missing; {remedy}")
    differing = [name for name in settings if state[name] != settings[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"a state must be loaded with the settings it was made with, got {name} = "
            f"{settings[name]!r} for {state[name]!r}; make the packer with these"
        )
    for name in (*_COUNTS, "num_opened"):
        check_count(state[name], 0, sys.maxsize, name, remedy)
    opened, ready = state["open_bins"], state["ready_bins"]
    seats = settings["max_sequences_per_bin"] or sys.maxsize
    is_sound = (
        isinstance(opened, list | tuple)
        and isinstance(ready, list | tuple)
        and all(isinstance(entry, Mapping) for entry in opened)
        and all(entry.keys() == {"number", "room", "items"} for entry in opened)
        and all(isinstance(entry["items"], list | tuple) and entry["items"] for entry in opened)
        and all(len(entry["items"]) < seats for entry in opened)
        and all(isinstance(items, list | tuple) and 0 < len(items) <= seats for items in ready)
        and sum(len(entry["items"]) for entry in opened) <= settings["buffer_size"]
    )
    if not is_sound:
        raise ValueError(
            f"the bins of a state must be lists of items that these settings hold, got others; "
            f"{remedy}"
        )
    numbers = [entry["number"] for entry in opened]
    for number in numbers:
        check_count(number, 0, state["num_opened"] - 1, "the number of an open bin", remedy)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"open bins must have different numbers, got {shown(numbers)}; {remedy}")


def _length(item: Any) -> int:
    if isinstance(item, Mapping):
        lengths = {name: len(column) for name, column in item.items() if _is_column(column)}
        if len(set(lengths.values())) != 1 or len(lengths) < len(item):
            raise ValueError(
                f"the columns of an item must be equally long, got lengths {lengths} of columns "
                f"{list(item)}; say which counts: length=lambda row: len(row['input_ids'])"
            )
        return next(iter(lengths.values()))
    if not _is_column(item):
        raise ValueError(
            f"an item must be a sequence of tokens or a mapping of columns, got "
            f"{type(item).__name__}; tokenise it first, or pass `length`"
        )
    return len(item)


def _is_column(value: Any) -> bool:
    # Arrays and tensors of no dimension are Sized too, and have no length.
    is_sized = isinstance(value, Sized) and not isinstance(value, str | bytes)
    return is_sized and getattr(value, "ndim", 1) != 0


def _cut(item: Any, start: int, end: int) -> Any:
    if not isinstance(item, Mapping):
        return item[start:end]
    if not all(map(_is_column, item.values())) or len(set(map(len, item.values()))) != 1:
        raise ValueError(
            f"the columns of an item must be equally long to be cut, got columns {list(item)}; "
            f"pass `cut`"
        )
    return {name: column[start:end] for name, column in item.items()}
