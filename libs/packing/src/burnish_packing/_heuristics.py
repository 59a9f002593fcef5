"""Placing rules: which bin each unit goes to, worked on runs of equal units and of equal bins.

Equal units are interchangeable, and so are bins with equal room, so that most rules need about as
many steps as there are distinct lengths. A step (class, units placed, first bin, units per bin)
puts units of one class into consecutive bins; `place_units` expands the steps at the end.

References: D. S. Johnson, "Near-optimal bin packing algorithms" (MIT, 1973); D. S. Johnson and
M. R. Garey, "A 71/60 theorem for bin packing" (Journal of Complexity 1, 1985); E. G. Coffman,
M. R. Garey and D. S. Johnson, "An application of bin-packing to multiprocessor scheduling" (SIAM
Journal on Computing 7, 1978); R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969).
"""

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from burnish_packing._checks import IntArray

Classes = list[tuple[int, int, int]]  # (tokens, sequences, units), tokens and sequences decreasing
Step = tuple[int, int, int, int]  # (class, units placed, first bin, units per bin)
Placing = tuple[list[Step], int]  # steps and the number of bins

_RUNS_PER_BLOCK = 64  # of first-fit's list of bins: short blocks are searched, long lists skipped


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


def units_per_bin(room: int, held: int, length: int, size: int, max_sequences: int) -> int:
    """Equal units of `length` tokens and `size` sequences that still fit a bin."""
    by_count = (max_sequences - held) // size
    return min(room // length, by_count) if length else by_count


def best_fit_decreasing(classes: Classes, capacity: int, max_sequences: int) -> Placing:
    """Longest first, each into the fullest bin that still has room.

    Open bins are kept as runs of consecutive bin numbers by their room, and one step places one run
    of equal units on one run of bins.
    """
    rooms: list[int] = []  # ascending, the keys of `open_bins`
    open_bins: dict[int, list[tuple[int, int, int]]] = {}  # room -> (first bin, bins, sequences)
    steps: list[Step] = []
    num_bins = 0

    def add(room: int, first: int, count: int, held: int) -> None:
        if count and held < max_sequences:
            if room not in open_bins:
                open_bins[room] = []
                insort(rooms, room)
            open_bins[room].append((first, count, held))

    def take_tightest(length: int, size: int) -> tuple[int, int, int, int] | None:
        for at in range(bisect_left(rooms, length), len(rooms)):
            room = rooms[at]
            runs = open_bins[room]
            for i in range(len(runs) - 1, -1, -1):
                if runs[i][2] + size <= max_sequences:
                    first, count, held = runs.pop(i)
                    if not runs:
                        del rooms[at], open_bins[room]
                    return room, first, count, held
        return None

    for index, (length, size, count) in enumerate(classes):
        left = count
        while left:
            found = take_tightest(length, size)
            if found is None:
                per_bin = units_per_bin(capacity, 0, length, size, max_sequences)
                found = (capacity, num_bins, -(-left // per_bin), 0)
                num_bins += found[2]
            room, first, bins, held = found
            per_bin = units_per_bin(room, held, length, size, max_sequences)
            full = min(bins, left // per_bin)
            if full:
                steps.append((index, full * per_bin, first, per_bin))
                left -= full * per_bin
                add(room - per_bin * length, first, full, held + per_bin * size)
            if full < bins and left:
                steps.append((index, left, first + full, left))
                add(room - left * length, first + full, 1, held + left * size)
                full, left = full + 1, 0
            add(room, first + full, bins - full, held)
    return steps, num_bins


def first_fit_decreasing(
    classes: Classes, capacity: int, max_sequences: int, first_bin: int = 0
) -> Placing:
    """Longest first, each into the first bin that still has room; bins count from `first_bin`.

    Runs of equal bins (room, first bin, bins, sequences) stand in the order of the bins, in blocks
    that know their largest room.
    """
    blocks: list[list[tuple[int, int, int, int]]] = [[]]
    largest: list[int] = [-1]
    steps: list[Step] = []
    num_bins = first_bin
    shortest = classes[-1][0] if classes else 0

    for index, (length, size, count) in enumerate(classes):
        left = count
        for b in range(len(blocks)):
            if not left:
                break
            if largest[b] < length:
                continue
            runs: list[tuple[int, int, int, int]] = []
            for room, first, bins, held in blocks[b]:
                per_bin = 0
                if left and room >= length:
                    per_bin = units_per_bin(room, held, length, size, max_sequences)
                if not per_bin:
                    runs.append((room, first, bins, held))
                    continue
                placed, pieces = _put_run(room, first, bins, held, length, size, left, per_bin)
                steps += [(index, *step) for step in placed]
                left -= sum(units for units, _, _ in placed)
                runs += [p for p in pieces if p[0] >= shortest and p[3] < max_sequences]
            blocks[b] = runs
            largest[b] = max((room for room, _, _, _ in runs), default=-1)
        if left:
            per_bin = units_per_bin(capacity, 0, length, size, max_sequences)
            bins = -(-left // per_bin)
            placed, pieces = _put_run(capacity, num_bins, bins, 0, length, size, left, per_bin)
            steps += [(index, *step) for step in placed]
            num_bins += bins
            if len(blocks[-1]) > _RUNS_PER_BLOCK:
                blocks.append([])
                largest.append(-1)
            blocks[-1] += [p for p in pieces if p[0] >= shortest and p[3] < max_sequences]
            largest[-1] = max((room for room, _, _, _ in blocks[-1]), default=-1)
        if len(blocks) > 2 and index % 64 == 0:
            blocks, largest = _rebalanced(blocks)
    return steps, num_bins


def _put_run(
    room: int, first: int, bins: int, held: int, length: int, size: int, left: int, per_bin: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
    """`left` equal units into a run of equal bins: steps (units, first bin, per bin), new runs."""
    full = min(bins, left // per_bin)
    placed, pieces = [], []
    if full:
        placed.append((full * per_bin, first, per_bin))
        pieces.append((room - per_bin * length, first, full, held + per_bin * size))
        left -= full * per_bin
    if full < bins and left:
        placed.append((left, first + full, left))
        pieces.append((room - left * length, first + full, 1, held + left * size))
        full += 1
    if full < bins:
        pieces.append((room, first + full, bins - full, held))
    return placed, pieces


def _rebalanced(
    blocks: list[list[tuple[int, int, int, int]]],
) -> tuple[list[list[tuple[int, int, int, int]]], list[int]]:
    """The same runs in blocks of equal size, since runs are divided and drop out as they fill."""
    runs = [run for block in blocks for run in block]
    starts = range(0, max(len(runs), 1), _RUNS_PER_BLOCK)
    blocks = [runs[start : start + _RUNS_PER_BLOCK] for start in starts]
    return blocks, [max((room for room, _, _, _ in block), default=-1) for block in blocks]


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
    """Bin of every unit: in order, each into the first bin that still has room; O(U log U).

    A tree over the bins knows the largest room under every node (leaf b at width + b), so that the
    first bin with room is found from its root. A bin without a seat has room -1.
    """
    width = 1
    rooms = [-1, capacity]  # a tree of one leaf; bins that are not open yet have all their room
    held: list[int] = []
    bin_of_unit = []
    for length, size in zip(tokens.tolist(), sizes.tolist(), strict=True):
        passed: list[tuple[int, int]] = []  # bins with room and too few seats, hidden meanwhile
        while True:
            if rooms[1] < length:
                rooms = _wider(rooms, width, capacity)
                width *= 2
            node = 1
            while node < width:
                node *= 2
                if rooms[node] < length:
                    node += 1
            chosen = node - width
            if chosen == len(held):
                held.append(0)
            if held[chosen] + size <= max_sequences:
                break
            passed.append((node - width, rooms[node]))
            _set_room(rooms, node, -1)
        held[chosen] += size
        bin_of_unit.append(chosen)
        _set_room(rooms, node, rooms[node] - length if held[chosen] < max_sequences else -1)
        for bin_index, room in passed:
            _set_room(rooms, width + bin_index, room)
    return np.array(bin_of_unit, np.int64)


def _set_room(rooms: list[int], node: int, room: int) -> None:
    rooms[node] = room
    while node > 1:
        node //= 2
        left, right = rooms[2 * node], rooms[2 * node + 1]
        largest = left if left > right else right
        if rooms[node] == largest:
            return
        rooms[node] = largest


def _wider(rooms: list[int], width: int, capacity: int) -> list[int]:
    """The same tree with twice the leaves, the new ones empty bins."""
    leaves = rooms[width:] + [capacity] * width
    tree = [-1] * (2 * width) + leaves
    for node in range(2 * width - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return tree


def longest_to_emptiest(
    tokens: IntArray, sizes: IntArray, num_bins: int, capacity: int, max_sequences: int
) -> IntArray | None:
    """Bin of every unit: longest first, each to the bin of fewest tokens (LPT, Graham 1969).

    None when a unit finds no room there. Among bins of equal tokens the one of fewest sequences.
    """
    bin_of_unit = np.empty(len(tokens), np.int64)
    bins = [(0, 0, k) for k in range(num_bins)]
    heapify(bins)
    order = stable_argsort(tokens.max(initial=0) - tokens)
    columns = (order.tolist(), tokens[order].tolist(), sizes[order].tolist())
    for unit, length, size in zip(*columns, strict=True):
        full = []
        while bins and bins[0][1] + size > max_sequences:
            full.append(heappop(bins))
        if not bins or bins[0][0] + length > capacity:
            return None
        held_tokens, held, chosen = bins[0]
        bin_of_unit[unit] = chosen
        heapreplace(bins, (held_tokens + length, held + size, chosen))
        for entry in full:
            if entry[1] < max_sequences:
                heappush(bins, entry)
    return bin_of_unit


def multifit(classes: Classes, num_bins: int, capacity: int, max_sequences: int) -> Placing | None:
    """Best-fit-decreasing at the smallest capacity found by bisection that needs `num_bins`.

    None when even `capacity` needs more (Coffman, Garey and Johnson 1978).
    """
    total = sum(length * count for length, _, count in classes)
    low = max(classes[0][0], -(-total // num_bins), 1) if classes else 1
    high = capacity
    best = best_fit_decreasing(classes, capacity, max_sequences)
    if best[1] > num_bins:
        return None
    while low < high:
        middle = (low + high) // 2
        placing = best_fit_decreasing(classes, middle, max_sequences)
        if placing[1] <= num_bins:
            best, high = placing, middle
        else:
            low = middle + 1
    return best
