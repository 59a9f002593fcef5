"""Equal work: units over the bins of every slot, rows over slots, and bins over ranks.

A slot is what all ranks run at one time, one bin each. They wait for each other at every slot, so
a step costs the sum over its slots of the costliest bin, and bins need be equal only inside a slot.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from burnish_packing._checks import IntArray

FloatArray = NDArray[np.float64]
EXTRA_SLOT_SAVING = 0.01  # share of the step that a slot of packs more than needed must save
EXTRA_ROWS_SAVING = 0.1  # share of a full micro-batch that a slot of padded rows must save
_CLOSE = 1e-3  # bins of a slot that differ by less, relative to their mean, are equal enough
_SWAP_CANDIDATES = (64, 1024)  # units of the costliest bin, and of its slot, that a swap looks at


def spread(bins: list[IntArray], num_bins: int, costs: IntArray) -> list[IntArray]:
    """Divide the costliest bins of several members until there are `num_bins`; then add empty ones.

    A bin is cut where its halves are closest in cost; members keep their order.
    """
    if len(bins) >= num_bins:
        return bins
    members = np.concatenate([np.zeros(0, np.int64), *bins])
    before = [0, *np.cumsum(costs[members]).tolist()]  # of the members up to each
    ends = np.cumsum([len(part) for part in bins]).tolist()
    parts = list(zip([0, *ends], ends, strict=False))  # (start, end) of each bin in `members`
    divisible = [(before[s] - before[e], i) for i, (s, e) in enumerate(parts) if e > s + 1]
    heapify(divisible)
    while len(parts) < num_bins and divisible:
        _, widest = heappop(divisible)
        start, end = parts[widest]
        cut = _closest_cut(before, start, end)
        parts[widest] = (start, cut)
        parts.append((cut, end))
        for i in (widest, len(parts) - 1):
            start, end = parts[i]
            if end > start + 1:
                heappush(divisible, (before[start] - before[end], i))
    bins = [members[start:end] for start, end in parts]
    return bins + [np.zeros(0, np.int64)] * (num_bins - len(bins))


def _closest_cut(before: list[int], start: int, end: int) -> int:
    """The first cut, start < cut < end, whose halves are closest; `before` never decreases."""
    both = before[start] + before[end]
    above = min(bisect_left(before, (both + 1) // 2, start + 1, end), end - 1)
    lesser = before[max(above - 1, start + 1)]  # its first cut is that of all cuts of equal halves
    below = bisect_left(before, lesser, start + 1, end)
    return below if abs(both - 2 * before[below]) <= abs(both - 2 * before[above]) else above


def balance_slots(
    packed: Sequence[IntArray],
    tokens: IntArray,
    costs: FloatArray,
    capacity: int,
    num_ranks: int,
) -> list[list[IntArray]]:
    """Units [U] over slots of `num_ranks` bins: the costliest bins of the slots sum to little.

    Starting from as many slots as `packed` needs, units are dealt to bins in two ways: as packed,
    and by `_fill`; both are then refined by swaps. One slot more is taken only if it saves
    EXTRA_SLOT_SAVING of the step.

    Args:
        packed: units of each bin of a packing, a multiple of num_ranks bins, none above `capacity`.
        tokens, costs: [U] of the units.

    Returns:
        For each slot, costliest first, the units of its bins, costliest first.
    """
    fewest = len(packed) // num_ranks
    best, least = [list(packed)], np.inf
    for num_slots in (fewest, fewest + 1):
        targets = slot_targets(costs, num_ranks, num_slots)
        allowed = least if num_slots == fewest else (1 - EXTRA_SLOT_SAVING) * least
        if targets.sum() > allowed:  # no plan of so many slots could be better
            break
        filled = _fill(tokens, costs, capacity, np.repeat(targets, num_ranks))
        for bins in (filled, packed if num_slots == fewest else None):
            if bins is None or least <= (1 + _CLOSE) * targets.sum():
                continue
            slots, step = _refined(bins, tokens, costs, capacity, num_ranks)
            if step <= allowed and step < least:
                best, least = slots, step
    return [slot for slot in best if any(len(units) for units in slot)]


def slot_targets(costs: FloatArray, num_ranks: int, num_slots: int) -> FloatArray:
    """What the bins of every slot should cost, float64 [S], decreasing.

    They sum to the least that any step costs, the larger of total / num_ranks and the costliest
    unit. If the sorted units lead one bin each, slot s has a bin that costs at least unit
    s * num_ranks; slots where this leaves a choice share what is left equally ("water filling").
    """
    total = costs.sum() / num_ranks
    leaders = np.zeros(num_slots)
    first = -np.sort(-costs)[::num_ranks][:num_slots]
    leaders[: len(first)] = first
    # If slots from k on are level, each has its share of what the leaders before k leave.
    before = np.cumsum(leaders) - leaders
    levels = (total - before) / np.arange(num_slots, 0, -1)
    level = levels[np.argmax(levels >= leaders)] if (levels >= leaders).any() else 0.0
    targets = np.maximum(leaders, level)
    # Without work for so many leaders, the last ones share bins with others.
    left = np.maximum(total - (np.cumsum(targets) - targets), 0.0)
    targets[1:] = np.minimum(targets, left)[1:]
    return targets


def _fill(
    tokens: IntArray, costs: FloatArray, capacity: int, targets: FloatArray
) -> list[IntArray] | None:
    """Units over bins of `capacity` tokens whose costs should come close to `targets` [K].

    The costliest unit comes first, and each goes to the bin that lacks most and has room (after
    R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).

    Returns:
        The units of each bin, or None when a unit finds no room.
    """
    units_of: list[list[int]] = [[] for _ in targets]
    room = [capacity] * len(targets)
    # Units without cost spread too: among equals the bin of fewest units is next.
    lacking = [(-target, 0, i) for i, target in enumerate(targets.tolist())]
    heapify(lacking)
    order = np.lexsort((-tokens, -costs))
    smallest = np.minimum.accumulate(tokens[order][::-1])[::-1].tolist()
    unit_tokens, unit_costs = tokens.tolist(), costs.tolist()
    for unit, rest in zip(order.tolist(), smallest, strict=True):
        passed = []
        while lacking and room[lacking[0][2]] < unit_tokens[unit]:
            entry = heappop(lacking)
            if room[entry[2]] >= rest:  # else nothing that follows fits either
                passed.append(entry)
        if not lacking:
            return None
        lack, count, i = lacking[0]
        units_of[i].append(unit)
        room[i] -= unit_tokens[unit]
        heappop(lacking)
        for entry in (*passed, (lack + unit_costs[unit], count + 1, i)):
            heappush(lacking, entry)
    return [np.array(units, np.int64) for units in units_of]


def _refined(
    bins: Sequence[IntArray], tokens: IntArray, costs: FloatArray, capacity: int, num_ranks: int
) -> tuple[list[list[IntArray]], float]:
    """Bins by falling cost in slots, each slot made equal by swaps, and the cost of the step."""
    slots = _in_slots(bins, costs, num_ranks)
    slots = [_equalise(slot, tokens, costs, capacity) for slot in slots]
    slots = _in_slots([units for slot in slots for units in slot], costs, num_ranks)
    return slots, float(sum(costs[slot[0]].sum() for slot in slots))


def _in_slots(bins: Sequence[IntArray], costs: FloatArray, num_ranks: int) -> list[list[IntArray]]:
    """Each slot takes the costliest bins that are left: of all ways the one that costs least."""
    keys = [(-float(costs[units].sum()), len(units) == 0, i) for i, units in enumerate(bins)]
    order = [i for _, _, i in sorted(keys)]
    return [
        [bins[i] for i in order[start : start + num_ranks]]
        for start in range(0, len(order), num_ranks)
    ]


def _equalise(
    slot: list[IntArray], tokens: IntArray, costs: FloatArray, capacity: int
) -> list[IntArray]:
    """The bins of one slot after the swaps that lower the costliest one most.

    Each time the costliest bin gives a unit to another bin, for one of its units or for nothing,
    such that the squares of the two bins' costs fall most and both hold `capacity` tokens at most.
    """
    num_bins = len(slot)
    units = np.concatenate(slot)
    # Behind the units, one that is nothing in every bin: a swap with it moves a unit there.
    nothing = np.zeros(num_bins, np.int64)
    unit_tokens = np.concatenate([tokens[units], nothing])
    unit_costs = np.concatenate([costs[units], nothing])
    places = np.arange(num_bins)
    bin_of = np.concatenate([np.repeat(places, [len(members) for members in slot]), places])
    for _ in range(8 * num_bins):
        cost = np.bincount(bin_of, unit_costs)
        held = np.bincount(bin_of, unit_tokens)
        costliest = int(cost.argmax())
        if cost[costliest] * num_bins <= (1 + _CLOSE) * cost.sum():
            break
        own = _thinned(np.flatnonzero(bin_of[: len(units)] == costliest), _SWAP_CANDIDATES[0])
        given = _thinned(np.arange(len(units)), _SWAP_CANDIDATES[1])
        given = np.concatenate([given, len(units) + places])
        to = bin_of[given]
        less = unit_costs[own][:, None] - unit_costs[given]
        fewer = unit_tokens[own][:, None] - unit_tokens[given]
        gain = less * (cost[costliest] - cost[to] - less)
        gain[(fewer > capacity - held[to]) | (fewer < held[costliest] - capacity)] = 0.0
        best = int(gain.argmax())
        if gain.flat[best] <= 1e-9 * cost[costliest] ** 2:
            break
        unit, other = own[best // len(given)], given[best % len(given)]
        bin_of[unit] = bin_of[other]
        if other < len(units):
            bin_of[other] = costliest
    return [units[bin_of[: len(units)] == i] for i in range(num_bins)]


def _thinned(values: IntArray, limit: int) -> IntArray:
    """At most `limit` of the values, evenly chosen."""
    return values[:: -(-len(values) // limit)] if len(values) > limit else values


def cut_layers(
    widths: IntArray, rows: IntArray, row_costs: FloatArray, max_tokens: int
) -> list[tuple[int, int]]:
    """Layers [G] of padded rows, widest first, cut into slots: [start, end) of each.

    A slot runs all its rows at the width of its first layer and holds `max_tokens` positions at
    most. The cuts make the rows of all slots cheapest, where every slot must save EXTRA_ROWS_SAVING
    of the costliest micro-batch that fits (a shortest path over the cuts).

    Args:
        widths: int64 [G], decreasing; rows: int64 [G]; row_costs: [G], of one row of that width.
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
    least = np.full(len(ends), np.inf)
    least[0] = 0.0
    cut_before = np.zeros(len(ends), np.int64)
    # A row without tokens counts as one position here, or a slot would hold any number of them.
    fitting = max_tokens // np.maximum(widths, 1)
    each = EXTRA_ROWS_SAVING * float((fitting * row_costs).max())
    last = np.searchsorted(ends, ends[:-1] + fitting, side="right")
    for start, (stop, row_cost) in enumerate(zip(last.tolist(), row_costs.tolist(), strict=True)):
        reached = slice(start + 1, stop)
        cost = least[start] + each + (ends[reached] - ends[start]) * row_cost
        better = cost < least[reached]
        least[reached][better] = cost[better]
        cut_before[reached][better] = start
    cuts = [len(widths)]
    while cuts[-1]:
        cuts.append(int(cut_before[cuts[-1]]))
    return list(zip(cuts[:0:-1], cuts[-2::-1], strict=True))
