"""Modified first-fit-decreasing, on runs of equal bins and classes of equal units.

Reference: D. S. Johnson and M. R. Garey, "A 71/60 theorem for bin packing" (Journal of Complexity
1, 1985).
"""

from bisect import bisect_left

from burnish_packing._heuristics import (
    Classes,
    Placing,
    Step,
    first_fit_decreasing,
    units_per_bin,
)

Run = tuple[int, int, int, int]  # room, first bin, bins, seats
Pattern = list[tuple[int, int]]  # (class, units of it) in one bin


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
    stock = _Stock(classes, num_large)
    runs: list[Run] = []
    num_bins = 0
    for index, (length, size, count) in enumerate(classes[:num_large]):
        stock.steps.append((index, count, num_bins, 1))
        runs.append((capacity - length, num_bins, count, max_sequences - size))
        num_bins += count

    with_medium, without = _add_medium(stock, runs, num_large, num_medium)
    with_small = _add_small_pairs(stock, without, num_medium, num_small)
    for room, first, bins, seats in sorted(with_medium + with_small, key=lambda run: run[1]):
        while bins and (pattern := _largest_fitting(stock, room, seats)):
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
    for room, first, bins, seats in runs:
        while bins:
            index = stock.largest(room, seats, first_class, end_class)
            if index is None:
                without.append((room, first, bins, seats))
                break
            times = stock.put([(index, 1)], first, bins)
            length, size, _ = stock.classes[index]
            done.append((room - length, first, times, seats - size))
            first, bins = first + times, bins - times
    return done, without


def _add_small_pairs(
    stock: "_Stock", runs: list[Run], first_class: int, end_class: int
) -> list[Run]:
    """Step 3, from the last bin back: all these bins, with what room they have left."""
    done = []
    smallest = end_class - 1
    for room, first, bins, seats in reversed(runs):
        while bins:
            while smallest >= first_class and not stock.left[smallest]:
                smallest -= 1
            pair = None
            if smallest >= first_class:
                pair = _small_pair(stock, room, seats, first_class, smallest)
            if pair is None:
                done.append((room, first, bins, seats))
                break
            bins -= (times := stock.put(pair, first, bins, from_the_end=True))
            tokens = sum(units * stock.classes[index][0] for index, units in pair)
            size = sum(units * stock.classes[index][1] for index, units in pair)
            done.append((room - tokens, first + bins, times, seats - size))
    return done


class _Stock:
    """Units left of each class, and the steps.

    A tree over the classes knows the smallest size under every node of those that have units left
    (class i at width + i), so that the next one that fits is found in O(log classes).
    """

    def __init__(self, classes: Classes, first: int) -> None:
        self.classes = classes
        self.steps: list[Step] = []
        self.left = [count for _, _, count in classes]
        self._shorter = [-length for length, _, _ in classes]  # ascending, for bisection
        self._width = 1 << max(len(classes) - 1, 0).bit_length()
        self._none = 1 + max((size for _, size, _ in classes), default=0)  # where none is left
        sizes = [self._none] * first + [size for _, size, _ in classes[first:]]
        self._sizes = [0] * self._width + sizes + [self._none] * (self._width - len(sizes))
        for node in range(self._width - 1, 0, -1):
            self._sizes[node] = min(self._sizes[2 * node], self._sizes[2 * node + 1])

    def put(self, pattern: Pattern, first: int, bins: int, *, from_the_end: bool = False) -> int:
        """The units of one bin into as many of `bins` equal ones as there are units; how many."""
        times = min(bins, *(self.left[index] // units for index, units in pattern))
        at = first + bins - times if from_the_end else first
        for index, units in pattern:
            self.steps.append((index, times * units, at, units))
            self.left[index] -= times * units
            if not self.left[index]:
                self._drop(index)
        return times

    def largest(self, room: int, seats: int, first: int, end: int) -> int | None:
        """The class of most tokens that fits, among classes first <= i < end with units left."""
        begin = max(bisect_left(self._shorter, -room), first)
        if begin >= end:
            return None
        seats = min(seats, self._none - 1)
        sizes, node = self._sizes, self._width + begin
        while sizes[node] > seats:  # on to the subtree that begins where this one ends
            node += 1
            if not node & (node - 1):
                return None
            while not node & 1:
                node >>= 1
        while node < self._width:
            node *= 2
            if sizes[node] > seats:
                node += 1
        return node - self._width if node - self._width < end else None

    def _drop(self, index: int) -> None:
        sizes, node = self._sizes, self._width + index
        sizes[node] = self._none
        while node > 1:
            node >>= 1
            sizes[node] = min(sizes[2 * node], sizes[2 * node + 1])


def _small_pair(stock: _Stock, room: int, seats: int, first: int, smallest: int) -> Pattern | None:
    """The smallest class and the largest that fits with it; None where no two fit together."""
    length, size, _ = stock.classes[smallest]
    partner = stock.largest(room - length, seats - size, first, smallest + 1)
    if partner is None:
        return None
    if partner != smallest:
        return [(smallest, 1), (partner, 1)]
    return [(smallest, 2)] if stock.left[smallest] > 1 else None


def _largest_fitting(stock: _Stock, room: int, seats: int) -> Pattern:
    """What goes into one bin when the largest that fits is placed again and again.

    No class is met twice: it is used up, or a unit more of it finds no room or no seats.
    """
    pattern: Pattern = []
    begin, end = 0, len(stock.classes)
    while (index := stock.largest(room, seats, begin, end)) is not None:
        length, size, _ = stock.classes[index]
        units = min(stock.left[index], units_per_bin(room, seats, length, size))
        pattern.append((index, units))
        room -= units * length
        seats -= units * size
        begin = index + 1
    return pattern
