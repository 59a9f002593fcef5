"""As few bins as can be found, and the proof as far as it goes.

References: K. Fleszar and K. S. Hindi, "New heuristics for one-dimensional bin-packing" (Computers
& Operations Research 29, 2002) for filling bins exactly; P. C. Gilmore and R. E. Gomory, "A linear
programming approach to the cutting-stock problem" (Operations Research 9, 1961).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from burnish_packing._checks import IntArray
from burnish_packing._column_generation import Relaxation, solve_relaxation
from burnish_packing._diving import Bins, dive
from burnish_packing._exact_fill import fill_exactly
from burnish_packing._heuristics import (
    Classes,
    Placing,
    Step,
    best_fit_decreasing,
    first_fit_decreasing,
    longest_to_emptiest,
    multifit,
    place_units,
)
from burnish_packing._modified_first_fit import modified_first_fit_decreasing
from burnish_packing.bounds import patterns_of, without_divisor
from burnish_packing.layout import round_up

_BULKS = (0.75, 0.5, 1.0, 0.6, 0.9)  # which pieces fill the most of a bin, see `fill_exactly`
_MAX_FILLED = 4_000  # distinct lengths: of more, only two of the fills are tried
_MAX_REST_FILLED = 200  # the same for what is left while diving
_MAX_CELLS = 1 << 27  # distinct lengths times capacity: a knapsack of 0.3 s
_MAX_WORK = 800_000  # of the linear programs: 4 s, and more with lengths of six digits
_MAX_DIVING = 300_000  # of the programs that are solved while diving: 2 s
_ROWS = (400, 2_000)  # of a first program, and of one that has to be exact
# Of each dive: the share of bins that are fixed at least before a program is solved again, and what
# is kept back of the uses of a pattern when they are rounded down.
_DIVES = ((0.1, 0.0), (0.1, 0.5), (0.03, 0.0))


def fewest_bins(
    classes: Classes, capacity: int, max_sequences: int | None, bound: int
) -> tuple[Placing, int]:
    """The best placing found, and the best lower bound on its bins.

    The first placing that reaches the bound ends the search: best-fit-decreasing, bins filled
    exactly in several ways, modified first-fit- and first-fit-decreasing. Then the linear program
    of Gilmore and Gomory improves the bound, and diving into it improves the bins: patterns are
    fixed and the program of what is left is solved again, in up to three ways.

    Measured, not proven: the two meet or end one bin apart on all sets of `benchmarks/lengths` at
    capacities of 2,048 to 8,192 tokens, and on up to 5,000 lengths drawn evenly from a range, such
    as a third to a half of the capacity, where best-fit-decreasing takes 7% more; with 20,000 such
    lengths they end up to 6 bins in 6,000 apart. Where a packing would leave no token free, it is
    often missed by one bin. The program is left out with a limit on sequences per bin. It stops
    after fixed numbers of computations, the same on every machine: about 10 s, and 20 s for tens of
    thousands of distinct lengths. The bound holds in any case.

    Raises:
        ModuleNotFoundError: the linear program is needed and scipy is missing.
    """
    seats = max_sequences or max(sum(size * count for _, size, count in classes), 1)
    best: Placing | None = None
    for candidate in _candidates(classes, capacity, seats):
        if best is None or candidate[1] < best[1]:
            best = candidate
        if best[1] <= bound:
            return best, bound
    assert best is not None
    if max_sequences:
        return best, bound
    placing, lp_bound = _by_relaxation(classes, capacity, best[1], bound)
    return placing or best, lp_bound


def _candidates(
    classes: Classes, capacity: int, seats: int, max_filled: int = _MAX_FILLED
) -> Iterator[Placing]:
    yield best_fit_decreasing(classes, capacity, seats)
    if all(size == 1 for _, size, _ in classes):
        for bulk in _BULKS if len(classes) <= max_filled else _BULKS[:2]:
            yield fill_exactly(classes, capacity, seats, bulk=bulk)
    yield modified_first_fit_decreasing(classes, capacity, seats)
    yield first_fit_decreasing(classes, capacity, seats)


def _by_relaxation(
    classes: Classes, capacity: int, num_bins: int, bound: int
) -> tuple[Placing | None, int]:
    """A packing from the linear program's patterns if it is better than `num_bins`, and the bound.

    Two lengths that fill a bin share one: some best packing has all such pairs, since what stands
    beside the one can take the place of the other. The program covers the rest.
    """
    steps, num_pairs, left = _exact_pairs(classes, capacity)
    kept = [i for i, count in enumerate(left) if count and classes[i][0]]
    rest = [(*classes[i][:2], left[i]) for i in kept]
    if not rest:
        return None, bound
    tokens, _, counts = np.array(rest, np.int64).T
    tokens, small = without_divisor(tokens, capacity)
    relaxation, group, lp_bound = _relaxed(tokens, counts, small, max(bound - num_pairs, 1))
    bound = max(bound, num_pairs + lp_bound)
    best: Placing | None = None
    grouped = _Grouped(rest, group, capacity)
    spent = 0
    for share, kept_back in _DIVES:
        if num_bins <= bound or spent >= _MAX_DIVING:
            break
        found, work = dive(
            relaxation,
            grouped.rest_bins,
            num_bins=num_bins - num_pairs,
            bound=bound - num_pairs,
            share=share,
            kept_back=kept_back,
            max_work=_MAX_DIVING - spent,
        )
        spent += work
        if found:
            last_steps, last_bins = grouped.placing(*found)
            num_bins = num_pairs + last_bins
            moved = [(kept[i], units, num_pairs + at, per) for i, units, at, per in last_steps]
            best = (steps + moved, num_bins)
    if best and classes[-1][0] == 0:  # sequences without tokens fit anywhere
        best[0].append((len(classes) - 1, left[-1], 0, left[-1]))
    return best, bound


def _relaxed(
    tokens: IntArray, counts: IntArray, capacity: int, bound: int
) -> tuple[Relaxation, IntArray, int]:
    """The program of classes (decreasing tokens), the length of it that each class has, a bound.

    Where there are too many cells for a knapsack, lengths and capacity are in multiples of a grid:
    lengths rounded down for the bound, up for the program whose patterns make bins.
    """
    grid = 1
    while True:
        room = capacity // grid
        lengths, group = np.unique(np.minimum(-(-tokens // grid), room), return_inverse=True)
        if len(lengths) * room <= _MAX_CELLS:
            break
        grid *= 2
    if grid > 1:
        below, of_length = np.unique(tokens // grid, return_inverse=True)
        held = np.zeros(len(below), np.int64)
        np.add.at(held, of_length, counts)
        positive = below > 0
        bound = _solved(below[positive], held[positive], room, bound, _ROWS[:1]).bound
    held = np.zeros(len(lengths), np.int64)
    np.add.at(held, group, counts)
    relaxation = _solved(lengths, held, room, bound, _ROWS)
    return relaxation, group, relaxation.bound if grid == 1 else bound


def _solved(
    lengths: IntArray, counts: IntArray, capacity: int, bound: int, all_rows: Sequence[int]
) -> Relaxation:
    """The program of few rows, then from its patterns that of more, which covers each length."""
    patterns, prices = patterns_of(lengths, counts, capacity), lengths / capacity
    work = 0
    for max_rows in all_rows:
        relaxation = solve_relaxation(
            lengths,
            counts,
            capacity,
            patterns=patterns,
            prices=prices,
            bound=bound,
            max_work=_MAX_WORK - work,
            max_rows=max_rows,
        )
        if len(lengths) <= max_rows:
            break
        patterns, prices, bound = relaxation.patterns, relaxation.prices, relaxation.bound
        work += relaxation.work
    return relaxation


class _Grouped:
    """Classes by the length that stands for each; of equals, the first are the first in bins."""

    def __init__(self, classes: Classes, group: IntArray, capacity: int) -> None:
        self._classes = classes
        self._group = group  # [classes], decreasing
        self._capacity = capacity
        self._counts = np.array([count for _, _, count in classes])
        self._totals = np.bincount(group, weights=self._counts).astype(np.int64)
        ends = np.cumsum(self._counts)
        firsts = np.searchsorted(-group, -group)  # the first class of each group
        self._ends = ends - np.concatenate([[0], ends])[firsts]  # units up to here in its group

    def rest(self, left: IntArray) -> IntArray:
        """Units of each class that are in no bin when so many [groups] are left."""
        taken = (self._totals - left)[self._group]
        return (self._ends - taken).clip(0, self._counts)

    def rest_bins(self, left: IntArray) -> int:
        """How many bins they need by themselves."""
        return self._pack(self.rest(left))[1][1]

    def _pack(self, rest: IntArray) -> tuple[Sequence[int], Placing]:
        kept = np.flatnonzero(rest).tolist()
        if not kept:
            return kept, ([], 0)
        classes = [(*self._classes[i][:2], int(rest[i])) for i in kept]
        seats = sum(size * count for _, size, count in classes)
        packed = _candidates(classes, self._capacity, seats, _MAX_REST_FILLED)
        return kept, min(packed, key=lambda placing: placing[1])

    def placing(self, bins: Bins, left: IntArray) -> Placing:
        """The bins, and behind them those of what is left."""
        rest = self.rest(left)
        unplaced = (self._counts - rest).tolist()
        at = np.searchsorted(-self._group, -np.arange(len(self._totals))).tolist()
        steps: list[Step] = []
        for b, content in enumerate(bins):
            for g, units in content.items():
                while units:
                    i = at[g]
                    taken = min(units, unplaced[i])
                    if taken:
                        steps.append((i, taken, b, taken))
                    unplaced[i] -= taken
                    units -= taken
                    at[g] += not unplaced[i]
        kept, (last_steps, last_bins) = self._pack(rest)
        steps += [(kept[i], units, len(bins) + b, per) for i, units, b, per in last_steps]
        return steps, len(bins) + last_bins


def _exact_pairs(classes: Classes, capacity: int) -> tuple[list[Step], int, list[int]]:
    """Steps that pair lengths that fill a bin, the bins they take, and the units left [classes]."""
    left = [count for _, _, count in classes]
    index_of = {length: i for i, (length, _, _) in enumerate(classes)}
    steps: list[Step] = []
    num_bins = 0
    for i, (length, _, count) in enumerate(classes):
        j = index_of.get(capacity - length)
        if j is None or 2 * length < capacity or length == capacity:
            continue
        pairs = count // 2 if i == j else min(count, left[j])
        if pairs:
            per_bin = 2 if i == j else 1
            steps += [(k, pairs * per_bin, num_bins, per_bin) for k in {i, j}]
            left[i] -= pairs
            left[j] -= pairs
            num_bins += pairs
    return steps, num_bins, left


def balanced(
    tokens: IntArray,
    sizes: IntArray,
    order: IntArray,
    classes: Classes,
    capacity: int,
    seats: int,
    bound: int,
    min_bins: int,
    bins_multiple_of: int,
) -> IntArray:
    """Bin of every unit, of few bins with the fullest as small as it gets: LPT or MULTIFIT.

    The number of bins is what best-fit-decreasing or exact filling need, at least `min_bins`,
    rounded up to `bins_multiple_of`.
    """
    fewest = best_fit_decreasing(classes, capacity, seats)
    if fewest[1] > bound and bool((sizes == 1).all()):
        fewest = min(fewest, fill_exactly(classes, capacity, seats), key=lambda p: p[1])
    num_bins = round_up(max(fewest[1], min_bins), bins_multiple_of)
    bisected = multifit(classes, num_bins, capacity, seats) or fewest
    candidates = [place_units(order, bisected[0])]
    emptiest = longest_to_emptiest(tokens, sizes, num_bins, capacity, seats)
    if emptiest is not None:
        candidates.insert(0, emptiest)  # preferred among equals: its other bins are more even
    return min(candidates, key=lambda labels: np.bincount(labels, weights=tokens).max())
