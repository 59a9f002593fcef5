"""Placing rules: which bin each unit goes to, worked on runs of equal units and of equal bins.

Equal units are interchangeable, and so are bins with equal room, so that most rules need about as
many steps as there are distinct lengths. A step (class, units placed, first bin, units per bin)
puts units of one class into consecutive bins; `place_units` expands the steps at the end.

References: D. S. Johnson, "Near-optimal bin packing algorithms" (MIT, 1973); D. S. Johnson and
M. R. Garey, "A 71/60 theorem for bin packing" (Journal of Complexity 1, 1985); E. G. Coffman,
M. R. Garey and D. S. Johnson, "An application of bin-packing to multiprocessor scheduling" (SIAM
Journal on Computing 7, 1978); R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969).
"""

from bisect import bisect_right
from heapq import heappop, heappush

import numpy as np

from burnish_packing._by_seats import RoomTrees, SeatHeaps, set_room
from burnish_packing._checks import IntArray

Classes = list[tuple[int, int, int]]  # (tokens, sequences, units), tokens and sequences decreasing
Step = tuple[int, int, int, int]  # (class, units placed, first bin, units per bin)
Placing = tuple[list[Step], int]  # steps and the number of bins

_MANY_CLASSES = 10_000  # distinct units of which best-fit-decreasing takes 0.05 s


def classes_of(tokens: IntArray, sizes: IntArray) -> tuple[IntArray, Classes]:
    """Units [U] sorted by decreasing tokens, then size, and the runs of equals in that order."""
    if not tokens.size:
        return np.zeros(0, np.int64), []
    key = tokens * sizes.max() + sizes - 1
    order = stable_argsort(key.max() - key)
    ordered = key[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(starts, append=len(ordered))
    firsts = order[starts]
    columns = (tokens[firsts], sizes[firsts], counts)
    return order, list(zip(*(column.tolist() for column in columns), strict=True))


def stable_argsort(keys: IntArray) -> IntArray:
    """Stable argsort of integers >= 0; numpy sorts 16-bit keys by radix, so in 16-bit digits."""
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    top = int(keys.max(initial=0))
    for shift in range(16, top.bit_length(), 16):
        digit = ((keys[order] >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
    return order


def place_units(order: IntArray, steps: list[Step]) -> IntArray:
    """Bin of every unit: the units of each class, in `order`, follow the steps of that class."""
    bin_of_unit = np.empty(len(order), np.int64)
    if steps:
        columns = np.array(steps, np.int64)
        _, placed, first_bin, per_bin = columns[np.argsort(columns[:, 0], kind="stable")].T
        within = np.arange(len(order)) - np.repeat(np.cumsum(placed) - placed, placed)
        if (per_bin > 1).any():
            within //= np.repeat(per_bin, placed)
        bin_of_unit[order] = np.repeat(first_bin, placed) + within
    return bin_of_unit


def units_per_bin(room: int, seats: int, length: int, size: int) -> int:
    """Equal units of `length` tokens and `size` sequences that fit into such room and seats."""
    by_count = seats // size
    return min(room // length, by_count) if length else by_count


def best_fit_decreasing(
    classes: Classes, capacity: int, max_sequences: int, *, max_bins: int | None = None
) -> Placing:
    """Longest first, each into the fullest bin that still has room.

    With more than `max_bins` bins it ends there, with units left.
    """
    return _fit_decreasing(classes, capacity, max_sequences, 0, max_bins, fullest_first=True)


def first_fit_decreasing(
    classes: Classes, capacity: int, max_sequences: int, first_bin: int = 0
) -> Placing:
    """Longest first, each into the first bin that still has room; bins count from `first_bin`."""
    return _fit_decreasing(classes, capacity, max_sequences, first_bin, None, fullest_first=False)


def _fit_decreasing(
    classes: Classes,
    capacity: int,
    max_sequences: int,
    first_bin: int,
    max_bins: int | None,
    *,
    fullest_first: bool,
) -> Placing:
    """Longest first, each into the first bin, in an order, that has room; O(steps log steps).

    Since lengths decrease, a bin that has room for a unit has room for all that follow: such bins
    are ready, in heaps by their seats. Bins of less room wait for shorter units, that of most room
    first. Both hold runs of equal consecutive bins, (keys of the order, room, first bin, bins,
    seats), and one step places one run of equal units on one run of bins.
    """
    ready = SeatHeaps(size for _, size, _ in classes)
    waiting: list[tuple[int, tuple[int, ...]]] = []  # (-room, run)
    steps: list[Step] = []
    num_bins, num_runs = first_bin, 0
    shortest = classes[-1][0] if classes else 0
    for index, (length, size, count) in enumerate(classes):
        while waiting and -waiting[0][0] >= length:
            ready.push(heappop(waiting)[1])
        left = count
        while left:
            run = ready.pop(size)
            if run is None:
                bins = -(-left // units_per_bin(capacity, max_sequences, length, size))
                run = (0, 0, capacity, num_bins, bins, max_sequences)
                num_bins += bins
                if max_bins is not None and num_bins > max_bins:
                    return steps, num_bins
            placed, pieces = _put_run(run[2:], length, size, left)
            for units, at, per_bin in placed:
                steps.append((index, units, at, per_bin))
                left -= units
            for piece in pieces:
                room, first, _, seats = piece
                if room < shortest or not seats:
                    continue
                num_runs += 1  # of equal room, the run that came last is first
                entry = (room, -num_runs, *piece) if fullest_first else (0, first, *piece)
                if room >= length:
                    ready.push(entry)
                else:
                    heappush(waiting, (-room, entry))
    return steps, num_bins


def _put_run(
    run: tuple[int, int, int, int], length: int, size: int, left: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
    """`left` equal units into a run of equal bins: steps (units, first bin, per bin), new runs."""
    room, first, bins, seats = run
    per_bin = units_per_bin(room, seats, length, size)
    full = min(bins, left // per_bin)
    placed, pieces = [], []
    if full:
        placed.append((full * per_bin, first, per_bin))
        pieces.append((room - per_bin * length, first, full, seats - per_bin * size))
        left -= full * per_bin
    if full < bins and left:
        placed.append((left, first + full, left))
        pieces.append((room - left * length, first + full, 1, seats - left * size))
        full += 1
    if full < bins:
        pieces.append((room, first + full, bins - full, seats))
    return placed, pieces


def next_fit(tokens: IntArray, sizes: IntArray, capacity: int, max_sequences: int) -> IntArray:
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


def first_fit(tokens: IntArray, sizes: IntArray, capacity: int, max_sequences: int) -> IntArray:
    """Bin of every unit: in order, each into the first bin that still has room and seats."""
    # Of two neighbours, the second began with a unit that the first lacked room or seats for.
    overfull = 2 * int(tokens.sum()) // capacity + 2 * int(sizes.sum()) // max_sequences
    width = 1 << min(len(tokens), overfull).bit_length()
    trees = RoomTrees(np.unique(sizes).tolist(), width, capacity)
    ranks = [len(trees.sizes)] * width  # how many of the sizes each bin has seats for
    rooms, seats = [capacity] * width, [max_sequences] * width
    bin_of_unit = []
    for length, size in zip(tokens.tolist(), sizes.tolist(), strict=True):
        leaf = 2 * width
        for tree in trees.to_search[size]:
            if tree[1] >= length:
                node = 1
                while node < width:
                    node *= 2
                    if tree[node] < length:
                        node += 1
                leaf = min(leaf, node)
        chosen = leaf - width
        bin_of_unit.append(chosen)
        rooms[chosen] -= length
        seats[chosen] -= size
        rank = bisect_right(trees.sizes, seats[chosen])
        for tree in trees.holding[rank]:
            set_room(tree, leaf, rooms[chosen])
        if rank < ranks[chosen]:
            trees.move(leaf, ranks[chosen], rank)
            ranks[chosen] = rank
    return np.array(bin_of_unit, np.int64)


def longest_to_emptiest(
    tokens: IntArray, sizes: IntArray, num_bins: int, capacity: int, max_sequences: int
) -> IntArray | None:
    """Bin of every unit: longest first, each to the bin of fewest tokens (LPT, Graham 1969).

    None when a unit finds no room there. Among bins of equal tokens the one of fewest sequences.
    """
    bin_of_unit = np.empty(len(tokens), np.int64)
    bins = SeatHeaps(np.unique(sizes).tolist())
    for k in range(num_bins):
        bins.push((0, 0, k, max_sequences))
    order = stable_argsort(tokens.max(initial=0) - tokens)
    columns = (order.tolist(), tokens[order].tolist(), sizes[order].tolist())
    for unit, length, size in zip(*columns, strict=True):
        emptiest = bins.pop(size)
        if emptiest is None or emptiest[0] + length > capacity:
            return None
        held_tokens, held, chosen, seats = emptiest
        bin_of_unit[unit] = chosen
        bins.push((held_tokens + length, held + size, chosen, seats - size))
    return bin_of_unit


def multifit(classes: Classes, num_bins: int, capacity: int, max_sequences: int) -> Placing | None:
    """Best-fit-decreasing at the smallest capacity found by bisection that needs `num_bins`.

    None when even `capacity` needs more (Coffman, Garey and Johnson 1978). The bisection ends when
    at most one part in 2 ** 14 of the capacity could still be saved, or in 2 ** 10 where there are
    so many distinct units that every round takes long.
    """
    best = best_fit_decreasing(classes, capacity, max_sequences, max_bins=num_bins)
    if best[1] > num_bins:
        return None
    total = sum(length * count for length, _, count in classes)
    low = max(classes[0][0], -(-total // num_bins), 1) if classes else 1
    least = best_fit_decreasing(classes, low, max_sequences, max_bins=num_bins)
    if least[1] <= num_bins:  # no capacity below is enough
        return least
    high = capacity
    is_slow = len(classes) > _MANY_CLASSES
    tolerance = low >> (10 if is_slow else 14)
    while high - low > tolerance:
        middle = (low + high) // 2
        if is_slow:  # twice the mean is enough as a rule, if not with few seats
            middle = min(middle, 2 * low)
        placing = best_fit_decreasing(classes, middle, max_sequences, max_bins=num_bins)
        if placing[1] <= num_bins:
            best, high = placing, middle
        else:
            low = middle + 1
    return best
