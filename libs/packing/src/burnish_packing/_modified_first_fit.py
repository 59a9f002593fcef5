"""Modified first-fit-decreasing, on runs of equal bins and classes of equal units.

Reference: D. S. Johnson and M. R. Garey, "A 71/60 theorem for bin packing" (Journal of Complexity
1, 1985).
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from burnish_packing._heuristics import Classes, Placing, Step, first_fit_decreasing

Run = tuple[int, int, int, int]  # room, first bin, bins, sequences held


def modified_first_fit_decreasing(classes: Classes, capacity: int, max_sequences: int) -> Placing:
    """Johnson and Garey's five steps: at most 71/60 of the fewest bins, plus a constant.

    Items are large (> 1/2 of the capacity), medium (> 1/3), small (> 1/6) or tiny. (1) Large ones
    get a bin each, in decreasing order. (2) Forward over these bins: where the smallest remaining
    medium item fits, place the largest that fits. (3) Backward over those without a medium one:
    where the two smallest remaining small items fit together, place the smallest and the largest
    that fits with it. (4) Forward: while the smallest remaining item fits, place the largest that
    fits. (5) First-fit-decreasing for the rest, in new bins. An item fits where its tokens and its
    sequences do.
    """
    num_large = sum(2 * length > capacity for length, _, _ in classes)
    num_medium = sum(3 * length > capacity for length, _, _ in classes)
    num_small = sum(6 * length > capacity for length, _, _ in classes)
    stock = _Stock(classes, num_large, max_sequences)
    runs: list[Run] = []
    num_bins = 0
    for index, (length, size, count) in enumerate(classes[:num_large]):
        stock.steps.append((index, count, num_bins, 1))
        runs.append((capacity - length, num_bins, count, size))
        num_bins += count

    with_medium, without = _add_medium(stock, runs, num_large, num_medium)
    with_small = _add_small_pairs(stock, without, num_medium, num_small)
    for room, first, bins, held in sorted(with_medium + with_small, key=lambda run: run[1]):
        while bins and (pattern := _largest_fitting(stock, room, max_sequences - held)):
            times = stock.put(pattern, first, bins)
            first, bins = first + times, bins - times

    kept = [i for i in range(num_large, len(classes)) if stock.left[i]]
    rest = [(*classes[i][:2], stock.left[i]) for i in kept]
    last_steps, num_bins = first_fit_decreasing(rest, capacity, max_sequences, num_bins)
    stock.steps += [(kept[i], units, at, per_bin) for i, units, at, per_bin in last_steps]
    return stock.steps, num_bins


def _add_medium(
    stock: "_Stock", runs: list[Run], first_class: int, end_class: int
) -> tuple[list[Run], list[Run]]:
    """Step 2: the bins that got a medium unit, with what room they have left, and the others."""
    done, without = [], []
    for room, first, bins, held in runs:
        while bins:
            index = stock.largest(room, stock.max_sequences - held, first_class, end_class)
            if index is None:
                without.append((room, first, bins, held))
                break
            times = stock.put([index], first, bins)
            length, size, _ = stock.classes[index]
            done.append((room - length, first, times, held + size))
            first, bins = first + times, bins - times
    return done, without


def _add_small_pairs(
    stock: "_Stock", runs: list[Run], first_class: int, end_class: int
) -> list[Run]:
    """Step 3, from the last bin back: all these bins, with what room they have left."""
    done = []
    for room, first, bins, held in reversed(runs):
        while bins:
            seats = stock.max_sequences - held
            pair = _small_pair(stock, room, seats, first_class, end_class)
            if pair is None:
                done.append((room, first, bins, held))
                break
            times = stock.put(pair, first, bins, from_the_end=True)
            bins -= times
            tokens = sum(stock.classes[index][0] for index in pair)
            size = sum(stock.classes[index][1] for index in pair)
            done.append((room - tokens, first + bins, times, held + size))
    return done


class _Stock:
    """Units left of each class, those that have some found by their tokens; and the steps."""

    def __init__(self, classes: Classes, first: int, max_sequences: int) -> None:
        self.classes = classes
        self.max_sequences = max_sequences
        self.steps: list[Step] = []
        self.left = [count for _, _, count in classes]
        self.indices = list(range(first, len(classes)))  # ascending: tokens decrease
        self.shorter = [-classes[i][0] for i in self.indices]  # ascending, for bisection

    def put(self, pattern: list[int], first: int, bins: int, *, from_the_end: bool = False) -> int:
        """Classes of one bin into as many of `bins` equal ones as the units allow; how many."""
        per_bin = Counter(pattern)
        times = min(bins, *(self.left[index] // units for index, units in per_bin.items()))
        at = first + bins - times if from_the_end else first
        for index, units in per_bin.items():
            self.steps.append((index, times * units, at, units))
            self.left[index] -= times * units
            if not self.left[index]:
                gone = bisect_left(self.indices, index)
                del self.indices[gone], self.shorter[gone]
        return times

    def largest(
        self, room: int, seats: int, first: int, end: int, used: Sequence[int] = ()
    ) -> int | None:
        """The class of most tokens that fits, among classes first <= i < end, without `used`."""
        begin = max(bisect_left(self.shorter, -room), bisect_left(self.indices, first))
        for index in itertools.islice(self.indices, begin, None):
            if index >= end:
                return None
            if self.classes[index][1] <= seats and self.left[index] > used.count(index):
                return index
        return None

    def smallest(self, first: int, end: int) -> int | None:
        """The class of fewest tokens among classes first <= i < end."""
        at = bisect_left(self.indices, end) - 1
        return self.indices[at] if at >= 0 and self.indices[at] >= first else None


def _small_pair(stock: _Stock, room: int, seats: int, first: int, end: int) -> list[int] | None:
    """The smallest class and the largest that fits with it; None where no two fit together."""
    smallest = stock.smallest(first, end)
    if smallest is None:
        return None
    length, size, _ = stock.classes[smallest]
    partner = stock.largest(room - length, seats - size, first, end, [smallest])
    return None if partner is None else [smallest, partner]


def _largest_fitting(stock: _Stock, room: int, seats: int) -> list[int]:
    """Classes that go into one bin when the largest that fits is placed again and again."""
    pattern: list[int] = []
    end = len(stock.classes)
    while (index := stock.largest(room, seats, 0, end, pattern)) is not None:
        length, size, _ = stock.classes[index]
        per_bin = stock.left[index] - pattern.count(index)
        per_bin = min(per_bin, seats // size, room // length if length else per_bin)
        pattern += [index] * per_bin
        room -= per_bin * length
        seats -= per_bin * size
    return pattern
