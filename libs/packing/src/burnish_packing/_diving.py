"""Bins from the uses of patterns that a linear program found: fixed step by step, solved again.

Reference: A. Wäscher and T. Gau, "Heuristics for the integer one-dimensional cutting stock problem"
(OR Spektrum 18, 1996), for sequential rounding by residual programs.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from burnish_packing._checks import IntArray
from burnish_packing._column_generation import (
    FloatArray,
    Pattern,
    Relaxation,
    solve_relaxation,
)

Bins = list[dict[int, int]]  # what each holds: index of a length -> how many of it

_MAX_ROUNDS = 20  # of pricing, for each program of what is left


def dive(
    relaxation: Relaxation,
    rest_bins: Callable[[IntArray], int],
    *,
    num_bins: int,
    bound: int,
    share: float,
    kept_back: float,
    max_work: int,
) -> tuple[tuple[Bins, IntArray] | None, int]:
    """Bins and the counts left [D] that together need fewer than `num_bins`; and the work done.

    The patterns are used as often as their uses say, rounded down; then those of the largest
    fractions. What is left is packed by itself, and is a smaller linear program, whose patterns are
    used in the same way, until `bound` is reached or the program says that fewer than the bins
    found so far are out of reach.

    Args:
        rest_bins: counts left [D] -> how many bins hold them.
        share: of the bins of a program, that are fixed at least before it is solved again.
        kept_back: of the uses of a pattern, before they are rounded down.
        max_work: of the programs (`Relaxation.work`), which ends the search.
    """
    lengths, left = relaxation.lengths, relaxation.counts.copy()
    patterns, uses, prices = relaxation.patterns, relaxation.uses, relaxation.prices
    fixed: Bins = []
    best: tuple[Bins, IntArray] | None = None
    work = 0
    while True:
        fixed += _fix(patterns, uses, left, share, kept_back)
        total = len(fixed) + rest_bins(left)
        if total < num_bins:
            num_bins, best = total, (fixed[:], left.copy())
        if num_bins <= bound or not left.any() or work >= max_work:
            return best, work
        alive = np.flatnonzero(left)
        smaller = solve_relaxation(
            lengths[alive],
            left[alive],
            relaxation.capacity,
            patterns=_mapped(patterns, alive, len(lengths)),
            prices=prices[alive],
            bound=max(bound - len(fixed), 1),  # not known, but good enough
            max_rounds=_MAX_ROUNDS,
            max_work=max_work - work,
        )
        work += smaller.work
        # As a bound this holds if the program is solved; if not, it is a guess worth following.
        if len(fixed) + int(np.ceil(smaller.value - 1e-6)) >= num_bins:
            return best, work
        patterns = [tuple((int(alive[i]), n) for i, n in p) for p in smaller.patterns]
        uses = smaller.uses
        prices = np.interp(lengths, lengths[alive], smaller.prices)


def _mapped(patterns: list[Pattern], alive: IntArray, num_lengths: int) -> list[Pattern]:
    """The patterns in terms of the lengths that are left: a piece holds the longest of them."""
    place = (np.searchsorted(alive, np.arange(num_lengths), side="right") - 1).tolist()
    mapped: dict[Pattern, None] = {}
    for pattern in patterns:
        content: Counter[int] = Counter()
        for i, n in pattern:
            if place[i] >= 0:
                content[place[i]] += n
        if content:
            mapped[tuple(sorted(content.items()))] = None
    return list(mapped)


def _fix(
    patterns: list[Pattern], uses: FloatArray, left: IntArray, share: float, kept_back: float
) -> Bins:
    """Bins of patterns of whole uses, and of the largest fractions; their units leave `left`."""
    whole = np.floor((uses - kept_back).clip(0) + 1e-6).astype(np.int64)
    often = [p for p, n in zip(patterns, whole.tolist(), strict=True) for _ in range(n)]
    bins = _filled(often, left)
    fractions = uses - whole
    missing = max(share * uses.sum(), 1) - len(bins)
    for j in np.argsort(-fractions, kind="stable").tolist():
        if missing <= 0 or fractions[j] < 1e-6:
            break
        if all(left[i] for i, _ in patterns[j]):
            bins += _filled([patterns[j]], left)
            missing -= 1
    return bins


def _filled(patterns: list[Pattern], left: IntArray) -> Bins:
    """Bins of the patterns, whose pieces hold the longest lengths that are left and fit them."""
    pieces = sorted(
        ((i, b) for b, pattern in enumerate(patterns) for i, n in pattern for _ in range(n)),
        key=lambda piece: (-piece[0], piece[1]),
    )
    content: list[Counter[int]] = [Counter() for _ in patterns]
    longest = len(left) - 1
    for i, b in pieces:
        longest = min(longest, i)
        while longest >= 0 and not left[longest]:
            longest -= 1
        if longest < 0:
            break
        content[b][longest] += 1
        left[longest] -= 1
    return [dict(c) for c in content if c]
