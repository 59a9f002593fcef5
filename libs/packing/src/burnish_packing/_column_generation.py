"""Gilmore and Gomory's linear program of bin packing, by column generation.

References: P. C. Gilmore and R. E. Gomory, "A linear programming approach to the cutting-stock
problem" (Operations Research 9, 1961); A. A. Farley, "A note on bounding a class of linear
programming problems, including cutting stock problems" (Operations Research 38, 1990); J. M.
Valerio de Carvalho, "Using extra dual cuts to accelerate column generation" (INFORMS Journal on
Computing 17, 2005).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burnish_packing._checks import IntArray

Pattern = tuple[tuple[int, int], ...]  # (index of a length, how many of it) in one bin
FloatArray = NDArray[np.float64]

_MAX_ROWS = 2_000  # of a program; the prices of more lengths are interpolated
_SCALE = 1 << 36  # of the integers that stand for dual prices: sums of 2**27 of them fit int64
_SMOOTHING = 0.5  # share of the best prices so far in those that are tried next
_MAX_TRACED = 1 << 20  # pieces of one round's patterns
_COLUMNS_PER_ROW = 6  # more are thinned out to half of it
_ROWS_OF_DOUBLE_WORK = 700  # an entry of so many rows takes twice the time of one of a few
_CELLS_PER_WORK = 8_000  # of the knapsack, against an entry of a program
_SOLVER_ROUNDING = 1e-6  # may end a search early, never raise a bound


@dataclass(frozen=True)
class Relaxation:
    """What column generation found. `bound` holds in any case; it is the LP's if `is_solved`."""

    lengths: IntArray  # [D], counts and capacity: as given
    counts: IntArray
    capacity: int
    bound: int
    is_solved: bool
    value: float  # of the program over `patterns`
    patterns: list[Pattern]
    uses: FloatArray  # [patterns] >= 0, how often each is used; a longer piece of a pattern may
    # stand for a shorter length
    prices: FloatArray  # [D], of the best bound
    work: int  # of all programs and knapsacks that were solved, in about 5 microseconds


def solve_relaxation(
    lengths: IntArray,
    counts: IntArray,
    capacity: int,
    *,
    patterns: Iterable[Pattern] = (),
    prices: FloatArray | None = None,
    bound: int = 1,
    max_rounds: int | None = None,
    max_work: int | None = None,
    max_rows: int = _MAX_ROWS,
) -> Relaxation:
    """Gilmore and Gomory's linear program by column generation, with exchanges as extra dual cuts.

    Minimise the uses of patterns such that every length is covered. Each round prices lengths by
    the duals; the best filling of a bin at these prices (a knapsack, in integers) bounds the
    program (Farley): total price over the filling's price. The best filling with each length in it
    is a new pattern.

    The time of a round grows with the capacity times the distinct lengths, and with the entries of
    the program; its memory with the capacity alone. With more lengths than `max_rows` (at least 32)
    the prices are interpolated between so many of them: the bound still holds, as a rule a little
    below the program's, and the uses cover the lengths about every knot instead of each.

    Args:
        lengths: int64 [D], ascending, distinct, > 0; counts: [D], how many of each.
        patterns: to begin with, beside bins of one length.
        prices: [D], near the best ones.
        bound: known; the search ends as soon as the program's value is not above it.
        max_rounds, max_work: give up after so many rounds, or so much `Relaxation.work`.

    Raises:
        ModuleNotFoundError: scipy is missing.
    """
    program = _Program(lengths, counts, capacity, max_rows)
    known = set(patterns) | {((i, int(capacity // w)),) for i, w in enumerate(lengths.tolist())}
    columns = sorted(known)
    center, best_ratio = (lengths / capacity if prices is None else prices), 0.0
    num_rounds = work = 0
    thinned_at = np.inf  # a value; only below it again, so that no column comes and goes forever
    while True:
        value, uses, duals = program.solve(columns)
        work += program.work
        too_many = len(columns) > _COLUMNS_PER_ROW * len(program.demand)
        if too_many and value < thinned_at - _SOLVER_ROUNDING:
            thinned_at = value
            kept = _cheapest(columns, uses, duals, _COLUMNS_PER_ROW * len(program.demand) // 2)
            columns, uses = [columns[j] for j in kept], uses[kept]
            known = set(columns)
        new: list[Pattern] = []
        # The program's own prices jump about at first: those near the best ones bound better and
        # find patterns that last. Where they find none that improves the program, its own do.
        for weight in (_SMOOTHING, 0.0):
            smooth = weight * center + (1 - weight) * duals
            integers = np.floor(np.maximum(smooth, 0) * _SCALE).astype(np.int64)
            best, found = fillings_by_price(lengths, integers, capacity)
            work += len(lengths) * capacity // _CELLS_PER_WORK
            total = sum(c * p for c, p in zip(counts.tolist(), integers.tolist(), strict=True))
            if best:
                bound = max(bound, -(-total // best))
                if total / best > best_ratio:
                    center, best_ratio = smooth * (_SCALE / best), total / best
            worth = np.array([sum(n * duals[i] for i, n in pattern) for pattern in found])
            better = np.flatnonzero(worth > 1 + 1e-9).tolist()
            new = [found[j] for j in better if found[j] not in known]
            if new or bound >= value - _SOLVER_ROUNDING:
                break
        num_rounds += 1
        is_solved = bound >= value - _SOLVER_ROUNDING
        is_over = num_rounds == max_rounds or (max_work is not None and work >= max_work)
        if is_solved or not new or is_over:
            return Relaxation(
                lengths, counts, capacity, bound, is_solved, value, columns, uses, center, work
            )
        known.update(new)
        columns += new


def _cheapest(
    columns: list[Pattern], uses: FloatArray, duals: FloatArray, num_kept: int
) -> list[int]:
    """Indices of the columns in use and of those of least reduced cost, ascending."""
    worth = np.array([sum(n * duals[i] for i, n in pattern) for pattern in columns])
    least = np.sort(worth)[-num_kept]
    return np.flatnonzero((worth >= least) | (uses > 0)).tolist()


class _Program:
    """The linear program over given patterns, as HiGHS takes it."""

    def __init__(self, lengths: IntArray, counts: IntArray, capacity: int, max_rows: int) -> None:
        try:
            from scipy import sparse
            from scipy.optimize import linprog
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'the Gilmore-Gomory bound needs scipy: pip install "burnish-packing[optimal]"'
            ) from error
        self._sparse: Any = sparse
        self._linprog: Any = linprog
        self._weights: Any = sparse.csr_array(sparse.eye(len(lengths)))
        if len(lengths) > max_rows:
            knots, *weights = _interpolation(lengths, capacity, max_rows)
            self._weights = sparse.csr_array(tuple(weights), shape=(len(knots), len(lengths)))
        self.demand = self._weights @ counts.astype(np.float64)
        self.work = 0  # of the last solution
        # A piece for a longer length may hold a shorter one: the prices never fall with length.
        num = len(self.demand) - 1
        pairs = np.stack([np.arange(num), np.arange(1, num + 1)], axis=1).ravel()
        self._exchanges = sparse.csc_array(
            (np.tile([1.0, -1.0], num), pairs, 2 * np.arange(num + 1)), shape=(num + 1, num)
        )

    def solve(self, columns: list[Pattern]) -> tuple[float, FloatArray, FloatArray]:
        """Value, uses [columns] and dual prices [D]."""
        rows = np.array([i for pattern in columns for i, _ in pattern])
        held = np.array([n for pattern in columns for _, n in pattern], np.float64)
        starts = np.cumsum([0, *map(len, columns)])
        shape = (self._weights.shape[1], len(columns))
        fillings = self._weights @ self._sparse.csc_array((held, rows, starts), shape=shape)
        covers = self._sparse.hstack([fillings, self._exchanges], format="csc")
        self.work = int(covers.nnz * (1 + len(self.demand) / _ROWS_OF_DOUBLE_WORK))
        for method in ("highs-ipm", "highs-ds"):  # the second where the first has trouble
            result = self._linprog(
                np.concatenate([np.ones(len(columns)), np.zeros(len(self.demand) - 1)]),
                A_ub=-covers,
                b_ub=-self.demand,
                method=method,
            )
            if result.status == 0:
                break
        else:
            raise RuntimeError(f"HiGHS could not solve the relaxation: {result.message}")
        prices = self._weights.T @ -result.ineqlin.marginals
        return result.fun, result.x[: len(columns)], prices


def _interpolation(
    lengths: IntArray, capacity: int, max_rows: int
) -> tuple[IntArray, FloatArray, tuple[IntArray, IntArray]]:
    """Knots among the lengths [D], and weights of the lengths: entries, then (knots, lengths).

    Prices are linear between knots, which are spread evenly; both sides of capacity / k, where
    prices jump, are among them.
    """
    last = len(lengths) - 1
    jumps = np.searchsorted(lengths, capacity // np.arange(1, 9), side="right")
    even = np.round(np.linspace(0, last, max_rows - 2 * len(jumps))).astype(np.int64)
    knots = np.unique(np.concatenate([even, jumps - 1, jumps]).clip(0, last))
    place = np.interp(lengths, lengths[knots], np.arange(len(knots)))
    left = np.minimum(place.astype(np.int64), len(knots) - 2)
    share = place - left
    columns = np.arange(last + 1)
    rows = np.concatenate([left, left + 1])
    return knots, np.concatenate([1 - share, share]), (rows, np.tile(columns, 2))


def fillings_by_price(
    lengths: IntArray, prices: IntArray, capacity: int
) -> tuple[int, list[Pattern]]:
    """Highest price of a bin's filling, and the best filling with each of the lengths in it.

    An unbounded knapsack by dynamic programming over the capacity: each length is offered 1, 2, 4,
    ... times. A length that is not dearer than a shorter one is left out.
    """
    dearer = np.flatnonzero(prices > np.maximum.accumulate(np.concatenate([[0], prices[:-1]])))
    value = np.zeros(capacity + 1, np.int64)
    last = np.full(capacity + 1, -1, np.int32)  # a length of the best filling of each room
    for i in dearer.tolist():
        length, price, times = int(lengths[i]), int(prices[i]), 1
        while times * length <= capacity:
            offered = value[: -times * length] + times * price
            better = offered > value[times * length :]
            np.copyto(value[times * length :], offered, where=better)
            np.copyto(last[times * length :], i, where=better)
            times *= 2
    if not dearer.size:
        return 0, []
    # Taking out `last` leaves the best filling of the smaller room: any better one would do here.
    depth = capacity // int(lengths[dearer[0]]) + 1
    with_it = prices[dearer] + value[capacity - lengths[dearer]]
    firsts = dearer[np.argsort(-with_it, kind="stable")[: max(_MAX_TRACED // depth, 16)]]
    rooms = capacity - lengths[firsts]
    pieces = [firsts]
    while True:
        taken = last[rooms].astype(np.int64)
        if (taken < 0).all():
            break
        pieces.append(taken)
        rooms = rooms - np.where(taken >= 0, lengths[taken], 0)
    found = []
    for column in np.sort(np.stack(pieces, axis=1), axis=1).tolist():
        counts: dict[int, int] = {}
        for i in column:
            if i >= 0:
                counts[i] = counts.get(i, 0) + 1
        found.append(tuple(counts.items()))
    return int(value[-1]), list(dict.fromkeys(found))
