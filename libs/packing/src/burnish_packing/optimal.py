"""As few bins as can be found, and the proof as far as it goes.

References: K. Fleszar and K. S. Hindi, "New heuristics for one-dimensional bin-packing" (Computers
& Operations Research 29, 2002) for filling bins exactly; P. C. Gilmore and R. E. Gomory, "A linear
programming approach to the cutting-stock problem" (Operations Research 9, 1961).
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from burnish_packing._checks import IntArray
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
from burnish_packing.bounds import Relaxation, patterns_of, solve_relaxation
from burnish_packing.layout import round_up

_MAX_LENGTHS = 4_000  # distinct lengths of a linear program that is solved in seconds
_MAX_CELLS = 33_000_000  # distinct lengths times capacity: work of one pricing round
_MAX_WORK = 400_000  # rounds times entries of the first patterns
_BULKS = (0.75, 0.5, 1.0, 0.6, 0.9)  # which pieces fill the most of a bin, see `fill_exactly`
_SHARES = (0.0, 0.5, 0.25)  # of one use that are added before rounding down


def fewest_bins(
    classes: Classes, capacity: int, max_sequences: int | None, bound: int
) -> tuple[Placing, int]:
    """The best placing found, and the best lower bound on its bins.

    The first placing that reaches the bound ends the search: best-fit-decreasing, bins filled
    exactly in several ways, modified first-fit- and first-fit-decreasing. Then the linear program
    of Gilmore and Gomory improves the bound, and its patterns, rounded down with the rest packed by
    the former, may improve the bins. No case is known to us where the two end up more than one bin
    apart, but none is excluded: the program is left out with a limit on sequences per bin or more
    than 4,000 distinct lengths, and ends after a number of rounds that keeps it in seconds. The
    bound holds in any case.

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


def _candidates(classes: Classes, capacity: int, seats: int) -> Iterator[Placing]:
    yield best_fit_decreasing(classes, capacity, seats)
    if all(size == 1 for _, size, _ in classes):
        for bulk in _BULKS:
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
    if not rest or len(rest) > _MAX_LENGTHS or len(rest) * capacity > _MAX_CELLS:
        return None, bound
    lengths, _, counts = np.array(rest[::-1], np.int64).T
    patterns = patterns_of(lengths, counts, capacity)
    relaxation = solve_relaxation(
        lengths,
        counts,
        capacity,
        patterns=patterns,
        bound=max(bound - num_pairs, 1),
        max_rounds=_MAX_WORK // (len(lengths) + sum(map(len, patterns))) + 1,
    )
    bound = max(bound, num_pairs + relaxation.bound)
    best: Placing | None = None
    for share in _SHARES:
        if num_bins <= bound:
            break
        last_steps, last_bins = _rounded(relaxation, share, rest, lengths, capacity)
        if num_pairs + last_bins < num_bins:
            num_bins = num_pairs + last_bins
            moved = [(kept[i], units, num_pairs + at, per) for i, units, at, per in last_steps]
            best = (steps + moved, num_bins)
    if best and classes[-1][0] == 0:  # sequences without tokens fit anywhere
        best[0].append((len(classes) - 1, left[-1], 0, left[-1]))
    return best, bound


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


def _rounded(
    relaxation: Relaxation, share: float, classes: Classes, lengths: IntArray, capacity: int
) -> Placing:
    """The patterns as often as their uses say, rounded down after adding a share of one.

    Their pieces hold the longest lengths that fit them; what is left over is packed by itself.
    """
    seats = int(sum(count for _, _, count in classes))
    uses = np.floor(relaxation.uses + share).astype(np.int64).tolist()
    bins = [p for p, n in zip(relaxation.patterns, uses, strict=True) for _ in range(n)]
    pieces = sorted(
        ((i, b) for b, pattern in enumerate(bins) for i, n in pattern for _ in range(n)),
        key=lambda piece: (-piece[0], piece[1]),
    )
    left = [count for _, _, count in classes]
    content: list[Counter[int]] = [Counter() for _ in bins]
    longest = 0  # of the classes that are left and fit
    for i, b in pieces:
        while longest < len(left) and (not left[longest] or classes[longest][0] > lengths[i]):
            longest += 1
        if longest == len(left):
            break
        content[b][longest] += 1
        left[longest] -= 1
    filled = [c for c in content if c]
    steps = [(i, units, b, units) for b, c in enumerate(filled) for i, units in c.items()]
    kept = [i for i, count in enumerate(left) if count]
    rest = [(*classes[i][:2], left[i]) for i in kept]
    if not rest:
        return steps, len(filled)
    last_steps, last_bins = min(_candidates(rest, capacity, seats), key=lambda placing: placing[1])
    steps += [(kept[i], units, len(filled) + at, per) for i, units, at, per in last_steps]
    return steps, len(filled) + last_bins


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
