"""Bin packing of sequences: which of them share a bin of `capacity` tokens.

References: D. S. Johnson, "Near-optimal bin packing algorithms" (MIT, 1973) for the three
heuristics; S. Martello and P. Toth, "Knapsack Problems" (1990), section 8.3.1, for bound L2.
"""

import json
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import (
    IntArray,
    as_integers,
    as_lengths,
    check_fits,
    check_partition,
    check_positive,
    load_versioned,
)
from burnish_packing.balance import spread
from burnish_packing.layout import round_up
from burnish_packing.metrics import fill_ratio

SCHEMA_VERSION = 1
Algorithm = Literal["best_fit_decreasing", "first_fit_decreasing", "next_fit"]


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences in bins. Every index of `lengths` is in exactly one bin, ascending inside it."""

    bins: tuple[IntArray, ...]  # each int64, read-only; empty where min_bins asked for more bins
    lengths: IntArray  # int64 [N], tokens
    capacity: int  # tokens of a bin, never exceeded
    lower_bound: int  # no packing under the same rules has fewer bins

    def metrics(self) -> dict[str, float]:
        """Numbers of bins and tokens, and `fill_ratio`: tokens held over tokens that fit."""
        num_tokens = [int(self.lengths[indices].sum()) for indices in self.bins]
        return {
            "num_sequences": len(self.lengths),
            "num_bins": len(self.bins),
            "lower_bound": self.lower_bound,
            "num_tokens": sum(num_tokens),
            "fill_ratio": fill_ratio(num_tokens, self.capacity),
        }

    def to_json(self) -> str:
        """One JSON object with a schema version."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "capacity": self.capacity,
                "lower_bound": self.lower_bound,
                "lengths": self.lengths.tolist(),
                "bins": [indices.tolist() for indices in self.bins],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Packing":
        """The inverse of `to_json`; ValueError for another schema version or a broken packing."""
        names = ("bins", "lengths", "capacity", "lower_bound")
        fields = load_versioned(text, SCHEMA_VERSION, "packing", names)
        lengths = as_lengths(fields["lengths"])
        bins = tuple(as_integers(indices, "bins") for indices in fields["bins"])
        check_partition(np.concatenate([np.zeros(0, np.int64), *bins]), len(lengths), "bins")
        check_fits([int(lengths[b].sum()) for b in bins], int(fields["capacity"]), "capacity")
        return cls(bins, lengths, int(fields["capacity"]), int(fields["lower_bound"]))


def pack(
    lengths: ArrayLike,
    capacity: int,
    *,
    algorithm: Algorithm = "best_fit_decreasing",
    min_bins: int = 1,
    bins_multiple_of: int = 1,
    max_sequences_per_bin: int | None = None,
    units: ArrayLike | None = None,
) -> Packing:
    """Put sequences into few bins of `capacity` tokens. No sequences: no bins.

    Args:
        lengths: int [N], tokens of each sequence, >= 0.
        capacity: tokens that fit in a bin.
        algorithm: `best_fit_decreasing` and `first_fit_decreasing` place the longest first and need
            at most 11/9 of the fewest bins, plus a constant; `next_fit` keeps the order.
        min_bins: at least so many bins; full ones are divided, and empty ones added at last.
        bins_multiple_of: the number of bins is a multiple of this.
        max_sequences_per_bin: at most so many sequences in a bin.
        units: int [N]; sequences with equal units stay in one bin (a chosen and its rejected).

    Raises:
        ValueError: a sequence or unit does not fit in a bin, or an argument is out of range.
    """
    lengths = as_lengths(lengths)
    for value, name in (
        (capacity, "capacity"),
        (min_bins, "min_bins"),
        (bins_multiple_of, "bins_multiple_of"),
    ):
        check_positive(value, name)
    capacity = int(capacity)
    if max_sequences_per_bin is not None:
        check_positive(max_sequences_per_bin, "max_sequences_per_bin")
    max_sequences = max_sequences_per_bin or max(len(lengths), 1)
    unit_of, tokens, sizes = group_units(lengths, units)
    _check_fits(tokens, sizes, unit_of, capacity, max_sequences, units is not None)
    bound = max(lower_bound(tokens, capacity), -(-len(lengths) // max_sequences))
    if len(lengths):
        bound = round_up(max(bound, min_bins), bins_multiple_of)

    match algorithm:
        case "best_fit_decreasing":
            place = _best_fit_decreasing
        case "first_fit_decreasing":
            place = _first_fit_decreasing
        case "next_fit":
            place = _next_fit
        case _:
            raise ValueError(
                f"algorithm must be best_fit_decreasing, first_fit_decreasing or next_fit, got "
                f"{algorithm!r}; choose one"
            )
    bin_of_unit = place(tokens, sizes, capacity, max_sequences)
    bins = split_by_label(bin_of_unit)
    if bins:
        bins = spread(bins, round_up(max(len(bins), min_bins), bins_multiple_of), tokens)
    if units is not None:
        members = split_by_label(unit_of)
        bins = [np.sort(np.concatenate([members[u] for u in b])) if len(b) else b for b in bins]
    for indices in bins:
        indices.flags.writeable = False
    return Packing(tuple(bins), lengths, capacity, bound)


def lower_bound(lengths: ArrayLike, capacity: int) -> int:
    """Bins that any packing needs: Martello and Toth's L2, at least total tokens over capacity.

    For every threshold t <= capacity / 2, sequences longer than capacity - t share a bin with
    nothing of t or more, those longer than capacity / 2 have a bin each, and what the latter leave
    free must hold the sequences from t to capacity / 2.
    """
    ascending = np.sort(as_lengths(lengths))
    if not ascending.size:
        return 0
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(ascending)])
    half = np.searchsorted(ascending, capacity / 2, side="right")
    thresholds = np.unique(ascending[:half])
    small = np.searchsorted(ascending, thresholds, side="left")
    alone = np.searchsorted(ascending, capacity - thresholds, side="right")
    free = (alone - half) * capacity - (sums[alone] - sums[half])
    overflow = np.maximum(-(-(sums[half] - sums[small] - free) // capacity), 0)
    num_large = len(ascending) - half
    return int(max(num_large + overflow.max(initial=0), 1))


def group_units(lengths: IntArray, units: ArrayLike | None) -> tuple[IntArray, IntArray, IntArray]:
    """Unit of each sequence, 0 to U - 1 [N], and tokens [U] and sequences [U] of each unit.

    Units are numbered by their first sequence, so that `next_fit` keeps the order.
    """
    if units is None:
        return np.arange(len(lengths)), lengths, np.ones(len(lengths), np.int64)
    ids = as_integers(units, "units")
    if len(ids) != len(lengths):
        raise ValueError(
            f"units must have one entry per sequence, {len(lengths)}, got {len(ids)}; give a "
            f"sequence that stands alone an id of its own"
        )
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    unit_of = rank[inverse]
    tokens = np.zeros(len(first), np.int64)
    np.add.at(tokens, unit_of, lengths)
    return unit_of, tokens, np.bincount(unit_of, minlength=len(first))


def split_by_label(labels: IntArray) -> list[IntArray]:
    """Indices that carry each label 0, 1, ..., max, ascending: [1, 0, 1] -> [[1], [0, 2]]."""
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels)).tolist()
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _check_fits(
    tokens: IntArray,
    sizes: IntArray,
    unit_of: IntArray,
    capacity: int,
    max_sequences: int,
    has_units: bool,
) -> None:
    """ValueError naming the first sequence or unit that no bin can hold."""
    wrong = np.flatnonzero((tokens > capacity) | (sizes > max_sequences))
    if not wrong.size:
        return
    unit = wrong[0]
    index = int(np.flatnonzero(unit_of == unit)[0])
    what = f"the unit of {sizes[unit]} sequences that begins" if has_units else "the sequence"
    limit = f" and {max_sequences} sequences" if sizes[unit] > max_sequences else ""
    raise ValueError(
        f"every sequence must fit a bin of capacity {capacity}{limit}, got {tokens[unit]} tokens "
        f"for {what} at index {index}; raise the capacity or drop it"
    )


def _classes(tokens: IntArray, sizes: IntArray) -> tuple[IntArray, list[tuple[int, int, int]]]:
    """Units sorted by decreasing tokens, then size, and the runs of equals in that order.

    Equal units are interchangeable: the algorithms place (tokens, size, count) runs, not units.
    """
    if not tokens.size:
        return tokens, []
    key = tokens * sizes.max() + sizes - 1
    # In the smallest type that holds it, since numpy sorts 16-bit keys by radix.
    descending = (key.max() - key).astype(np.min_scalar_type(key.max()))
    order = np.argsort(descending, kind="stable")
    _, starts, counts = np.unique(descending[order], return_index=True, return_counts=True)
    firsts = order[starts]
    columns = (tokens[firsts], sizes[firsts], counts)
    return order, list(zip(*(column.tolist() for column in columns), strict=True))


def _best_fit_decreasing(
    tokens: IntArray, sizes: IntArray, capacity: int, max_sequences: int
) -> IntArray:
    """Bin of every unit: longest first, each into the fullest bin that still has room.

    Bins with equal room are interchangeable too, so open bins are kept as runs of consecutive bin
    numbers by their room, and one step places one run of equal units on one run of bins. The steps
    number about the distinct lengths, not the sequences; their effect is expanded at the end.
    """
    order, classes = _classes(tokens, sizes)
    rooms: list[int] = []  # ascending, the keys of `open_bins`
    open_bins: dict[int, list[tuple[int, int, int]]] = {}  # room -> (first bin, bins, sequences)
    steps: list[tuple[int, int, int]] = []  # (units placed, first bin, units per bin)
    num_bins = 0

    def add(room: int, first: int, count: int, held: int) -> None:
        if count and held < max_sequences:
            if room not in open_bins:
                open_bins[room] = []
                insort(rooms, room)
            open_bins[room].append((first, count, held))

    def take_tightest(length: int, size: int) -> tuple[int, int, int, int] | None:
        for at in range(bisect_left(rooms, length), len(rooms)):
            room = rooms[at]
            runs = open_bins[room]
            for i in range(len(runs) - 1, -1, -1):
                if runs[i][2] + size <= max_sequences:
                    first, count, held = runs.pop(i)
                    if not runs:
                        del rooms[at], open_bins[room]
                    return room, first, count, held
        return None

    for length, size, count in classes:
        left = count
        while left:
            found = take_tightest(length, size)
            if found is None:
                per_bin = _units_per_bin(capacity, 0, length, size, max_sequences)
                found = (capacity, num_bins, -(-left // per_bin), 0)
                num_bins += found[2]
            room, first, bins, held = found
            per_bin = _units_per_bin(room, held, length, size, max_sequences)
            full = min(bins, left // per_bin)
            if full:
                steps.append((full * per_bin, first, per_bin))
                left -= full * per_bin
                add(room - per_bin * length, first, full, held + per_bin * size)
            if full < bins and left:
                steps.append((left, first + full, left))
                add(room - left * length, first + full, 1, held + left * size)
                full, left = full + 1, 0
            add(room, first + full, bins - full, held)

    bin_of_unit = np.empty(len(tokens), np.int64)
    if steps:
        bin_of_unit[order] = _expand(steps)
    return bin_of_unit


def _expand(steps: list[tuple[int, int, int]]) -> IntArray:
    """Bin of every unit in the order of placing, from (units placed, first bin, units per bin)."""
    placed, first_bin, per_bin = (np.array(column) for column in zip(*steps, strict=True))
    within = np.arange(placed.sum()) - np.repeat(np.cumsum(placed) - placed, placed)
    return np.repeat(first_bin, placed) + within // np.repeat(per_bin, placed)


def _units_per_bin(room: int, held: int, length: int, size: int, max_sequences: int) -> int:
    by_count = (max_sequences - held) // size
    return min(room // length, by_count) if length else by_count


def _first_fit_decreasing(
    tokens: IntArray, sizes: IntArray, capacity: int, max_sequences: int
) -> IntArray:
    """Bin of every unit: longest first, each into the first bin that still has room."""
    order, classes = _classes(tokens, sizes)
    bin_of_sorted: list[IntArray] = [np.zeros(0, np.int64)]
    room = np.full(len(tokens), capacity)  # of every bin
    held = np.zeros(len(tokens), np.int64)
    num_bins = 0
    for length, size, count in classes:
        end = num_bins + count
        fits = (max_sequences - held[:end]) // size
        if length:
            fits = np.minimum(fits, room[:end] // length)
        before = np.cumsum(fits) - fits
        takes = np.clip(count - before, 0, fits)
        room[:end] -= takes * length
        held[:end] += takes * size
        bin_of_sorted.append(np.repeat(np.arange(end), takes))
        num_bins = max(num_bins, int(np.flatnonzero(takes)[-1]) + 1)
    bin_of_unit = np.empty(len(tokens), np.int64)
    bin_of_unit[order] = np.concatenate(bin_of_sorted)
    return bin_of_unit


def _next_fit(tokens: IntArray, sizes: IntArray, capacity: int, max_sequences: int) -> IntArray:
    """Bin of every unit: in order, a new bin whenever the next unit does not fit the last one."""
    token_sums = [0, *np.cumsum(tokens).tolist()]
    sequence_sums = [0, *np.cumsum(sizes).tolist()]
    starts = []
    start = 0
    while start < len(tokens):
        starts.append(start)
        by_tokens = bisect_right(token_sums, token_sums[start] + capacity, lo=start)
        by_count = bisect_right(sequence_sums, sequence_sums[start] + max_sequences, lo=start)
        start = min(by_tokens, by_count) - 1
    return np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1
