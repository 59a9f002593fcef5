"""How few bins there can be: bounds that no packing beats.

References: S. Martello and P. Toth, "Knapsack Problems" (1990), section 8.3.1, for bound L2;
P. C. Gilmore and R. E. Gomory, "A linear programming approach to the cutting-stock problem"
(Operations Research 9, 1961); A. A. Farley, "A note on bounding a class of linear programming
problems, including cutting stock problems" (Operations Research 38, 1990); J. M. Valerio de
Carvalho, "Using extra dual cuts to accelerate column generation" (INFORMS Journal on Computing 17,
2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish_packing._checks import IntArray, as_lengths, check_positive
from burnish_packing._exact_fill import exact_fillings
from burnish_packing._heuristics import Classes

Pattern = tuple[tuple[int, int], ...]  # (index of a length, how many of it) in one bin

_SCALE = 1 << 36  # of the integers that stand for dual prices: sums of 2**27 of them fit int64
_MAX_CAPACITY = 1 << 24  # of the knapsack, whose time and memory grow with it
_COLUMNS_PER_ROUND = 24
_SMOOTHING = 0.5  # share of the best prices so far in those that are tried next


def lower_bound(lengths: ArrayLike, capacity: int) -> int:
    """Bins that any packing needs: Martello and Toth's L2, at least total tokens over capacity.

    For every threshold t <= capacity / 2, sequences longer than capacity - t share a bin with
    nothing of t or more, those longer than capacity / 2 have a bin each, and what the latter leave
    free must hold the sequences from t to capacity / 2.

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
    half = np.searchsorted(lengths, capacity / 2, side="right")
    small = np.arange(half)
    alone = np.searchsorted(lengths, capacity - lengths[:half], side="right")
    free = (held[alone] - held[half]) * capacity - (sums[alone] - sums[half])
    overflow = np.maximum(-(-(sums[half] - sums[small] - free) // capacity), 0)
    num_large = held[-1] - held[half]
    return int(max(num_large + overflow.max(initial=0), 1))


def lp_bound(lengths: ArrayLike, capacity: int) -> int:
    """Gilmore and Gomory's bound: the linear relaxation over all ways to fill a bin, rounded up.

    At least `lower_bound`; no instance is known whose fewest bins exceed it by more than one. The
    time grows with the number of distinct lengths (a few hundred: seconds). The result is proven
    in integers from the dual prices, whatever the solver's rounding.

    Raises:
        ValueError: a length exceeds the capacity, or an argument is out of range.
        ModuleNotFoundError: scipy is missing.
    """
    lengths = _checked(lengths, capacity)
    capacity = int(capacity)
    if capacity > _MAX_CAPACITY:
        raise ValueError(
            f"capacity must be at most {_MAX_CAPACITY} for this bound, got {capacity}; divide it "
            f"and the lengths (rounded down) by a common number, which keeps it a bound"
        )
    bound = lower_bound(lengths, capacity)
    positive, counts = np.unique(lengths[lengths > 0], return_counts=True)
    if not positive.size:
        return bound
    patterns = patterns_of(positive, counts, capacity)
    return solve_relaxation(positive, counts, capacity, patterns=patterns, bound=bound).bound


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


@dataclass(frozen=True)
class Relaxation:
    """What column generation found. `bound` holds in any case; it is the LP's if `is_solved`."""

    bound: int
    is_solved: bool
    patterns: list[Pattern]
    uses: NDArray[np.float64]  # [patterns] >= 0, how often each is used; a longer piece of a
    # pattern may stand for a shorter length


def solve_relaxation(
    lengths: IntArray,
    counts: IntArray,
    capacity: int,
    *,
    patterns: Sequence[Pattern] = (),
    bound: int = 1,
    max_rounds: int | None = None,
) -> Relaxation:
    """Gilmore and Gomory's linear program by column generation, with exchanges as extra dual cuts.

    Minimise the uses of patterns such that every length is covered. Each round prices lengths by
    the duals; the best filling of a bin at these prices (a knapsack, in integers) is a new pattern
    and at the same time Farley's bound: total price over the best filling's price.

    Args:
        lengths: int64 [D], ascending, distinct, > 0; counts: [D], how many of each.
        patterns: to begin with, beside bins of one length.
        bound: known; the search ends as soon as the program's value is not above it.
        max_rounds: give up after so many; None: go on until the bound is the program's.

    Raises:
        ModuleNotFoundError: scipy is missing.
    """
    solve = _solver()
    known = set(patterns) | {((i, int(capacity // w)),) for i, w in enumerate(lengths.tolist())}
    columns = sorted(known)
    num_rounds = 0
    center, best_ratio = lengths / capacity, 0.0  # prices of the best bound so far
    while True:
        value, uses, prices = solve(columns, counts)
        new: list[Pattern] = []
        # The program's own prices jump about at first: those near the best ones bound better and
        # find patterns that last. Where they find none that improves the program, its own do.
        for weight in (_SMOOTHING, 0.0):
            smooth = weight * center + (1 - weight) * prices
            integers = np.floor(np.maximum(smooth, 0) * _SCALE).astype(np.int64)
            best, found = _fill_by_price(lengths, integers, capacity)
            total = sum(c * p for c, p in zip(counts.tolist(), integers.tolist(), strict=True))
            bound = max(bound, -(-total // best))
            if total / best > best_ratio:
                center, best_ratio = smooth * (_SCALE / best), total / best
            new = [
                pattern
                for pattern in found
                if pattern not in known and sum(n * prices[i] for i, n in pattern) > 1 + 1e-9
            ]
            if new or bound >= value - 1e-6:
                break
        num_rounds += 1
        # The 1e-6 is the solver's rounding: it may end the search early, never raise the bound.
        is_solved = bound >= value - 1e-6
        if is_solved or not new or num_rounds == max_rounds:
            return Relaxation(bound, is_solved, columns, uses)
        known.update(new)
        columns += new


def _solver() -> Any:
    """Function (patterns, counts) -> value, uses [patterns], prices [D] of the restricted LP."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csc_array, hstack
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'the Gilmore-Gomory bound needs scipy: pip install "burnish-packing[optimal]"'
        ) from error

    def solve(
        columns: list[Pattern], counts: IntArray
    ) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
        rows = np.array([i for pattern in columns for i, _ in pattern])
        held = np.array([n for pattern in columns for _, n in pattern], np.float64)
        starts = np.cumsum([0, *map(len, columns)])
        fillings = csc_array((held, rows, starts), shape=(len(counts), len(columns)))
        # A piece for a longer length may hold a shorter one: the prices never fall with length.
        num = len(counts) - 1
        pairs = np.stack([np.arange(num), np.arange(1, num + 1)], axis=1).ravel()
        exchanges = csc_array(
            (np.tile([1.0, -1.0], num), pairs, 2 * np.arange(num + 1)), shape=(num + 1, num)
        )
        result = linprog(
            np.concatenate([np.ones(len(columns)), np.zeros(num)]),
            A_ub=-hstack([fillings, exchanges], format="csc"),
            b_ub=-counts.astype(np.float64),
            method="highs-ds",
        )
        if result.status != 0:
            raise RuntimeError(f"HiGHS could not solve the relaxation: {result.message}")
        return result.fun, result.x[: len(columns)], -result.ineqlin.marginals

    return solve


def _fill_by_price(lengths: IntArray, prices: IntArray, capacity: int) -> tuple[int, list[Pattern]]:
    """Highest price of a bin's filling, and fillings of about that price, best first.

    An unbounded knapsack by dynamic programming over the capacity: each length is offered 1, 2, 4,
    ... times. A length that is not dearer than a shorter one is left out.
    """
    dearer = np.flatnonzero(prices > np.maximum.accumulate(np.concatenate([[0], prices[:-1]])))
    value = np.zeros(capacity + 1, np.int64)
    taken: list[tuple[int, int, NDArray[np.bool_]]] = []
    for i in dearer.tolist():
        length, price, times = int(lengths[i]), int(prices[i]), 1
        while times * length <= capacity:
            offered = value[: -times * length] + times * price
            better = offered > value[times * length :]
            np.maximum(value[times * length :], offered, out=value[times * length :])
            taken.append((i, times, better))
            times *= 2
    # Fillings of a smaller room are near the best too: one round then adds several columns.
    rooms = np.flatnonzero(np.diff(value, prepend=-1))[::-1]
    new = []
    for room in rooms[:_COLUMNS_PER_ROUND].tolist():
        pattern: dict[int, int] = {}
        for i, times, better in reversed(taken):
            start = times * int(lengths[i])
            if room >= start and better[room - start]:
                pattern[i] = pattern.get(i, 0) + times
                room -= start
        new.append(tuple(sorted(pattern.items())))
    return int(value[-1]), list(dict.fromkeys(new))
