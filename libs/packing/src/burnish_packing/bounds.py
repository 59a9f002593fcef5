"""How few bins there can be: bounds that no packing beats.

References: S. Martello and P. Toth, "Knapsack Problems" (1990), section 8.3.1, for bound L2;
S. P. Fekete and J. Schepers, "New classes of fast lower bounds for bin packing problems"
(Mathematical Programming 91, 2001), for the dual feasible functions u^(k).
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import IntArray, as_lengths, check_positive
from burnish_packing._column_generation import Pattern, solve_relaxation
from burnish_packing._exact_fill import exact_fillings
from burnish_packing._heuristics import Classes

_MAX_CELLS = 1 << 30  # distinct lengths times capacity, of a bound that must be exact
_MAX_CAPACITY = 1 << 24  # of a table of 20 bytes for each token
_MAX_PER_BIN = 16  # sequences that u^(k) counts in a bin


def lower_bound(lengths: ArrayLike, capacity: int) -> int:
    """Bins that any packing needs, in integers: at least total tokens over capacity, rounded up.

    The larger of two bounds. Martello and Toth's L2: for every threshold t <= capacity / 2,
    sequences longer than capacity - t share a bin with nothing of t or more, those longer than
    capacity / 2 have a bin each, and what the latter leave free must hold the sequences from t to
    capacity / 2. Fekete and Schepers' u^(k), for k up to 16 and for as many as fit of the longest:
    of sequences longer than capacity / (k + 1), no more than k share a bin.

    Raises:
        ValueError: a length exceeds the capacity, or an argument is out of range.
    """
    lengths, counts = np.unique(_checked(lengths, capacity), return_counts=True)
    classes = zip(lengths.tolist(), [1] * len(lengths), counts.tolist(), strict=True)
    return histogram_bound(list(classes)[::-1], int(capacity))


def histogram_bound(classes: Classes, capacity: int) -> int:
    """`lower_bound` of classes (tokens, sequences, units), tokens decreasing and <= capacity."""
    if not classes:
        return 0
    lengths, _, counts = np.array(classes[::-1], np.int64).T
    held = np.concatenate([[0], np.cumsum(counts)])  # units, and tokens, of the shorter classes
    sums = np.concatenate([[0], np.cumsum(lengths * counts)])
    half = np.searchsorted(lengths, capacity // 2, side="right")
    small = np.arange(half)
    alone = np.searchsorted(lengths, capacity - lengths[:half], side="right")
    free = (held[alone] - held[half]) * capacity - (sums[alone] - sums[half])
    overflow = np.maximum(-(-(sums[half] - sums[small] - free) // capacity), 0)
    num_large = held[-1] - held[half]
    return max(int(num_large + overflow.max(initial=0)), _counted(lengths, counts, capacity), 1)


def _counted(lengths: IntArray, counts: IntArray, capacity: int) -> int:
    """The largest of the bounds u^(k): x = length / capacity counts as floor((k + 1) x) / k.

    Where (k + 1) x is an integer, x counts as itself.
    """
    longest = int(lengths[-1])
    bound = 0
    for k in {*range(1, _MAX_PER_BIN + 1), capacity // longest if longest else 1}:
        if (k + 1) * longest > capacity:  # else every length counts as 0 or as itself
            whole, part = np.divmod(lengths * (k + 1), capacity)
            parts = int((counts * whole)[part > 0].sum())  # of 1 / k of a bin
            tokens = int((counts * lengths)[part == 0].sum())
            bound = max(bound, -(-(parts * capacity + k * tokens) // (k * capacity)))
    return bound


def lp_bound(lengths: ArrayLike, capacity: int) -> int:
    """Gilmore and Gomory's bound: the linear relaxation over all ways to fill a bin, rounded up.

    At least `lower_bound`; no instance is known whose fewest bins exceed it by more than one. The
    result is proven in integers from the dual prices, whatever the solver's rounding.

    What it costs, once the lengths and the capacity are divided by the lengths' common divisor:
    memory of 30 bytes for each token of the capacity, and some 100 MB; about 5 to 20 rounds, each
    of a table of distinct lengths times capacity (about a second for 500 million cells) and of a
    linear program (0.2 s for 1,000 distinct lengths, 2 s for 3,000).

    Raises:
        ValueError: a length exceeds the capacity, the distinct lengths times the capacity exceed
            2**30 or the capacity 2**24 (divided as above), or an argument is out of range.
        ModuleNotFoundError: scipy is missing.
    """
    lengths = _checked(lengths, capacity)
    capacity = int(capacity)
    bound = lower_bound(lengths, capacity)
    positive, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if not positive.size:
        return bound
    positive, capacity = without_divisor(positive, capacity)
    if capacity > _MAX_CAPACITY or len(positive) * capacity > _MAX_CELLS:
        raise ValueError(
            f"distinct lengths times capacity must be at most {_MAX_CELLS} for this bound, and the "
            f"capacity at most {_MAX_CAPACITY}, got {len(positive)} times {capacity}; divide the "
            f"capacity and the lengths, rounded down, by a common number, which keeps it a bound"
        )
    patterns = patterns_of(positive, counts, capacity)
    return solve_relaxation(
        positive, counts, capacity, patterns=patterns, bound=bound, max_rows=len(positive)
    ).bound


def without_divisor(lengths: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Lengths [D > 0] > 0 over their greatest common divisor, and the capacity, rounded down."""
    divisor = math.gcd(*lengths.tolist())
    return lengths // divisor, capacity // divisor


def _checked(lengths: ArrayLike, capacity: int) -> IntArray:
    lengths = as_lengths(lengths)
    check_positive(capacity, "capacity")
    if lengths.max(initial=0) > capacity:
        i = int(np.argmax(lengths > capacity))
        raise ValueError(
            f"every length must fit capacity {capacity}, got lengths[{i}] = {lengths[i]}; cut or "
            f"drop that sequence"
        )
    return lengths


def patterns_of(lengths: IntArray, counts: IntArray, capacity: int) -> list[Pattern]:
    """Fillings of two good packings of `counts` [D] sequences of `lengths` [D] (ascending, > 0)."""
    last = len(lengths) - 1
    classes = [(w, 1, n) for w, n in zip(lengths.tolist(), counts.tolist(), strict=True)][::-1]
    seats = int(counts.sum())
    patterns: set[Pattern] = set()
    for bulk in (0.75, 1.0):
        for content, _ in exact_fillings(classes, capacity, seats, bulk)[0]:
            patterns.add(tuple(sorted((last - index, units) for index, units in content)))
    return sorted(patterns)
