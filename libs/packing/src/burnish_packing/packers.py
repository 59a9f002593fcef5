"""Bin packing of sequences: which of them share a bin of `capacity` tokens."""

import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import (
    IntArray,
    as_integers,
    as_lengths,
    check_count,
    check_fits,
    check_partition,
    check_positive,
    load_versioned,
    read_only,
    shown,
    split_lists,
)
from burnish_packing._heuristics import (
    best_fit_decreasing,
    classes_of,
    first_fit,
    first_fit_decreasing,
    next_fit,
    place_units,
    stable_argsort,
)
from burnish_packing._modified_first_fit import modified_first_fit_decreasing
from burnish_packing._pieces import (
    TOO_LONG,
    TooLong,
    check_choice,
    check_lost,
    check_pieces,
    check_sort_keys,
    cut_to_fit,
)
from burnish_packing.balance import spread
from burnish_packing.bounds import histogram_bound, lower_bound
from burnish_packing.layout import round_up
from burnish_packing.metrics import fill_ratio
from burnish_packing.optimal import balanced, fewest_bins

__all__ = ["Algorithm", "Packing", "TooLong", "lower_bound", "pack"]

SCHEMA_VERSION = 2
Algorithm = Literal[
    "best_fit_decreasing",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "optimal",
    "balanced",
    "next_fit",
    "first_fit_shuffle",
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences in bins. A bin holds pieces; unless sequences were split, piece i is sequence i.

    Pieces 0 to N - 1 are the heads of the N sequences, the others continue split ones, in order.
    Every piece is in exactly one bin, ascending inside it, except those of skipped sequences; where
    `next_fit` splits, bins keep the order of the sequences and of the pieces in them instead.
    Arrays are read-only.
    """

    bins: tuple[IntArray, ...]  # each int64, pieces; empty where min_bins asked for more bins
    lengths: IntArray  # int64 [M], tokens of each piece (of a skipped sequence: all of its tokens)
    capacity: int  # tokens of a bin, never exceeded
    lower_bound: int  # no packing of these pieces under the same rules has fewer bins
    piece_sequences: IntArray  # int64 [M], the sequence each piece belongs to
    piece_starts: IntArray  # int64 [M], the piece's first token in its sequence
    skipped: IntArray  # int64, ascending: sequences that are in no bin
    truncated: IntArray  # int64, ascending: sequences of which only the head is in a bin
    num_lost_tokens: int  # of skipped and truncated sequences

    @cached_property
    def num_sequences(self) -> int:
        """N, skipped sequences included."""
        return int(self.piece_sequences.max(initial=-1)) + 1

    def segments(self, k: int) -> IntArray:
        """What bin k holds, int64 [n, 3]: rows (sequence, first token, end) in the bin's order."""
        pieces = self.bins[k]
        starts = self.piece_starts[pieces]
        columns = (self.piece_sequences[pieces], starts, starts + self.lengths[pieces])
        return np.stack(columns, axis=1)

    def metrics(self) -> dict[str, float]:
        """Numbers of bins, sequences and tokens, and `fill_ratio`: tokens held over what fits.

        `num_sequences` counts those given, `num_skipped`, `num_truncated` and `num_split` those of
        them that were too long; `num_tokens` those that are in bins, `num_lost_tokens` the others.
        """
        num_tokens = int(self.lengths.sum() - self.lengths[self.skipped].sum())
        continued = self.piece_sequences[self.num_sequences :]
        return {
            "num_sequences": self.num_sequences,
            "num_bins": len(self.bins),
            "lower_bound": self.lower_bound,
            "num_tokens": num_tokens,
            "fill_ratio": fill_ratio([num_tokens], self.capacity * max(len(self.bins), 1)),
            "num_skipped": len(self.skipped),
            "num_truncated": len(self.truncated),
            "num_split": int(np.count_nonzero(np.diff(continued, prepend=-1))),
            "num_lost_tokens": self.num_lost_tokens,
        }

    def to_json(self) -> str:
        """One JSON object with a schema version."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "capacity": self.capacity,
                "lower_bound": self.lower_bound,
                "num_lost_tokens": self.num_lost_tokens,
                **{name: getattr(self, name).tolist() for name in _ARRAYS},
                "bins": [pieces.tolist() for pieces in self.bins],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Packing":
        """The inverse of `to_json`; ValueError for another schema version or a broken packing."""
        names = ("bins", "capacity", "lower_bound", "num_lost_tokens", *_ARRAYS)
        fields = load_versioned(text, SCHEMA_VERSION, "packing", names)
        capacity = check_positive(fields["capacity"], "capacity")
        arrays = {name: as_integers(fields[name], name) for name in _ARRAYS}
        lengths = as_lengths(arrays["lengths"])
        skipped, truncated = arrays["skipped"], arrays["truncated"]
        check_pieces(**{name.removeprefix("piece_"): array for name, array in arrays.items()})
        pieces, counts = split_lists(fields["bins"], "bins", "pack again")
        check_partition(
            np.concatenate([skipped, pieces]), len(lengths), "bins and skipped", "pack again"
        )
        lost = check_lost(fields["num_lost_tokens"], lengths, skipped, truncated, capacity)
        ends = np.cumsum([0, *counts])
        is_first = np.isin(np.arange(len(pieces)), ends)
        place = np.argsort(stable_argsort(arrays["piece_sequences"]))[pieces]  # of `next_fit`
        if not any((is_first | (np.diff(keys, prepend=-1) > 0)).all() for keys in (pieces, place)):
            raise ValueError("every bin must ascend, got one that does not; pack again")
        held = np.diff(np.append(0, np.cumsum(lengths[pieces]))[ends])
        check_fits(held.tolist(), capacity, "capacity", "pack again")
        bins = tuple(pieces[start:end] for start, end in itertools.pairwise(ends.tolist()))
        least = 1 if bins else 0
        bound = check_count(fields["lower_bound"], least, len(bins), "lower_bound", "pack again")
        return cls(bins, capacity=capacity, lower_bound=bound, num_lost_tokens=lost, **arrays)


_ARRAYS = ("lengths", "piece_sequences", "piece_starts", "skipped", "truncated")


def pack(
    lengths: ArrayLike,
    capacity: int,
    *,
    algorithm: Algorithm = "best_fit_decreasing",
    min_bins: int = 1,
    bins_multiple_of: int = 1,
    max_sequences_per_bin: int | None = None,
    too_long: TooLong = "error",
    units: ArrayLike | None = None,
    seed: int | None = None,
) -> Packing:
    """Put sequences into few bins of `capacity` tokens. No sequences: no bins.

    Algorithms: `best_fit_decreasing` and `first_fit_decreasing` place the longest first. They need
    at most 11/9 of the fewest bins, `modified_first_fit_decreasing` 71/60, each plus a constant.
    `optimal` searches until the bins reach a lower bound or its work is spent; what is not proven
    shows as `lower_bound` below the number of bins (see `optimal.fewest_bins` for what was
    measured; hard cases need scipy). `balanced` takes as many bins as best-fit-decreasing needs, or
    as filling bins exactly does if these are fewer, and makes the fullest as small as it can.
    `next_fit` keeps the order; `first_fit_shuffle` draws it from `seed`, which keeps what meets in
    a bin independent of length.

    Args:
        lengths: int [N], tokens of each sequence, >= 0.
        capacity: tokens that fit in a bin.
        algorithm: see above.
        min_bins: at least so many bins, unless there is nothing to pack; full ones are divided,
            and empty ones added at last.
        bins_multiple_of: the number of bins is a multiple of this.
        max_sequences_per_bin: at most so many sequences (or pieces of them) in a bin.
        too_long: for sequences longer than the capacity: `error`; `skip`: they are in no bin;
            `truncate`: the first `capacity` tokens are kept; `split`: pieces of `capacity` tokens
            and a last one of the rest.
        units: int [N]; sequences with equal units stay in one bin (a chosen and its rejected).
            A unit of several sequences that fits no bin is an error or skipped as a whole.
        seed: of `first_fit_shuffle`, >= 0; the same one gives the same packing in any process.

    Raises:
        ValueError: a sequence or unit does not fit in a bin, or an argument is out of range.
    """
    given = as_lengths(lengths)
    capacity = check_positive(capacity, "capacity")
    min_bins = check_positive(min_bins, "min_bins")
    bins_multiple_of = check_positive(bins_multiple_of, "bins_multiple_of")
    if max_sequences_per_bin is not None:
        max_sequences_per_bin = check_positive(max_sequences_per_bin, "max_sequences_per_bin")
    _check_choices(algorithm, too_long, seed)
    pieces = cut_to_fit(given, capacity, max_sequences_per_bin, too_long, units)
    check_sort_keys(pieces.unit_tokens, pieces.unit_sizes)
    kept = None  # the pieces that bins hold, where they are not all or not in their order
    fitting = pieces.fitting
    if algorithm == "next_fit" and too_long == "split":  # every piece is a unit
        kept = fitting = stable_argsort(pieces.sequences)
    labels, num_bins, bound = _place(
        pieces.unit_tokens[fitting],
        pieces.unit_sizes[fitting],
        capacity,
        max_sequences_per_bin,
        algorithm,
        min_bins,
        bins_multiple_of,
        seed,
    )
    bin_of_unit = np.full(len(pieces.unit_tokens), -1)
    bin_of_unit[fitting] = labels
    bin_of_piece = bin_of_unit[pieces.unit_of]
    if len(pieces.skipped):
        kept = np.flatnonzero(bin_of_piece >= 0)
    if kept is not None:
        bin_of_piece = bin_of_piece[kept]
    return Packing(
        bins=tuple(split_by_label(bin_of_piece, num_bins, kept)),
        lengths=read_only(pieces.lengths),
        capacity=capacity,
        lower_bound=bound,
        piece_sequences=read_only(pieces.sequences),
        piece_starts=read_only(pieces.starts),
        skipped=read_only(pieces.skipped),
        truncated=read_only(pieces.truncated),
        num_lost_tokens=pieces.num_lost_tokens,
    )


def _place(
    tokens: IntArray,
    sizes: IntArray,
    capacity: int,
    max_sequences_per_bin: int | None,
    algorithm: Algorithm,
    min_bins: int,
    bins_multiple_of: int,
    seed: int | None,
) -> tuple[IntArray, int, int]:
    """Bin of every unit, the number of bins, and a lower bound on it; all units fit."""
    if not len(tokens):
        return np.zeros(0, np.int64), 0, 0
    order, classes = classes_of(tokens, sizes)
    seats = max_sequences_per_bin or int(sizes.sum())
    bound = max(histogram_bound(classes, capacity), -(-int(sizes.sum()) // seats))
    match algorithm:
        case "next_fit":
            labels = next_fit(tokens, sizes, capacity, seats)
        case "first_fit_shuffle":
            shuffled = np.random.default_rng(seed).permutation(len(tokens))
            labels = np.empty(len(tokens), np.int64)
            labels[shuffled] = first_fit(tokens[shuffled], sizes[shuffled], capacity, seats)
        case "balanced":
            labels = balanced(
                tokens, sizes, order, classes, capacity, seats, bound, min_bins, bins_multiple_of
            )
        case "optimal":
            placing, bound = fewest_bins(classes, capacity, max_sequences_per_bin, bound)
            labels = place_units(order, placing[0])
        case _:
            labels = place_units(order, _DECREASING[algorithm](classes, capacity, seats)[0])
    num_bins = round_up(max(int(labels.max()) + 1, min_bins), bins_multiple_of)
    bound = round_up(max(bound, min_bins), bins_multiple_of)
    labels = _divide(labels, num_bins, tokens)
    if algorithm == "next_fit":  # bins are stretches of the order, divided ones too
        labels = np.cumsum(np.diff(labels, prepend=labels[0]) != 0)
    return labels, num_bins, bound


def _divide(labels: IntArray, num_bins: int, tokens: IntArray) -> IntArray:
    """The same bins, the fullest of them divided until there are `num_bins`, if units allow."""
    counts = np.bincount(labels)
    missing = num_bins - len(counts)
    if not missing:
        return labels
    # Each division takes the fullest bin, so that only so many of the fullest can matter.
    held = np.zeros(len(counts), np.int64)
    np.add.at(held, labels, tokens)
    divisible = np.flatnonzero(counts > 1)
    fullest = np.sort(divisible[np.argsort(-held[divisible], kind="stable")[:missing]])
    units = np.flatnonzero(np.isin(labels, fullest))
    position = np.searchsorted(fullest, labels[units])
    parts = [units[part] for part in split_by_label(position, len(fullest))]
    parts = spread(parts, len(fullest) + missing, tokens)
    labels = labels.copy()
    for part, label in zip(parts[len(fullest) :], range(len(counts), num_bins), strict=True):
        labels[part] = label
    return labels


def split_by_label(
    labels: IntArray, num_labels: int = 0, values: IntArray | None = None
) -> list[IntArray]:
    """Indices that carry each label 0, 1, ..., max, ascending: [1, 0, 1] -> [[1], [0, 2]].

    At least `num_labels` arrays, read-only; of `values` [N] at these indices where they are given.
    """
    order = stable_argsort(labels)
    if values is not None:
        order = values[order]
    order.flags.writeable = False  # here, so that a million slices have it for nothing
    ends = np.cumsum(np.bincount(labels, minlength=num_labels)).tolist()
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _check_choices(algorithm: str, too_long: str, seed: int | None) -> None:
    check_choice(algorithm, ALGORITHMS, "algorithm")
    check_choice(too_long, TOO_LONG, "too_long")
    is_seed = isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0
    if not is_seed and (seed is not None or algorithm == "first_fit_shuffle"):
        raise ValueError(
            f"seed must be an integer >= 0 (first_fit_shuffle needs one), got {shown(seed)}; pass "
            f"one, so that the order is the same in every process"
        )


_DECREASING = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
