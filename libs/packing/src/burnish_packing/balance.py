"""Equal work: units over bins, and bins over ranks."""

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish_packing._checks import IntArray
from burnish_packing.layout import round_up


def spread(bins: list[IntArray], num_bins: int, costs: ArrayLike) -> list[IntArray]:
    """Divide the costliest bins of several members until there are `num_bins`; then add empty ones.

    A bin is cut where its halves are closest in cost; members keep their order.
    """
    if len(bins) >= num_bins:
        return bins
    costs = np.asarray(costs)
    bins = list(bins)
    divisible = [(-costs[members].sum(), i) for i, members in enumerate(bins) if len(members) > 1]
    heapify(divisible)
    while len(bins) < num_bins and divisible:
        _, widest = heappop(divisible)
        members = bins[widest]
        before = np.cumsum(costs[members])
        cut = 1 + int(np.argmin(np.abs(2 * before[:-1] - before[-1])))
        bins[widest] = members[:cut]
        bins.append(members[cut:])
        for i in (widest, len(bins) - 1):
            if len(bins[i]) > 1:
                heappush(divisible, (-costs[bins[i]].sum(), i))
    return bins + [np.zeros(0, np.int64)] * (num_bins - len(bins))


def balance_bins(
    tokens: IntArray, costs: NDArray[np.float64], capacity: int, num_bins: int
) -> list[IntArray] | None:
    """Units [U] over `num_bins` bins of `capacity` tokens, of costs as equal as may be.

    The costliest unit comes first, and each goes to the cheapest bin that has room (R. L. Graham,
    "Bounds on multiprocessing timing anomalies", 1969).

    Returns:
        The units of each bin, empty bins last, or None when a unit finds no room.
    """
    units_of: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity] * num_bins
    # Units without cost spread too: among equally cheap bins the one of fewest units is next.
    cheapest = [(0.0, 0, i) for i in range(num_bins)]
    heapify(cheapest)
    for unit in np.lexsort((-tokens, -costs)).tolist():
        too_full = []
        while cheapest and room[cheapest[0][2]] < tokens[unit]:
            too_full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, count, i = heappop(cheapest)
        units_of[i].append(unit)
        room[i] -= int(tokens[unit])
        for entry in (*too_full, (cost + float(costs[unit]), count + 1, i)):
            heappush(cheapest, entry)
    return [np.array(units, np.int64) for units in units_of]


def cut_rows(
    longest: IntArray,
    rows: IntArray,
    row_costs: NDArray[np.float64],
    max_tokens: int,
    bins_multiple_of: int,
) -> list[IntArray]:
    """Units [U], longest first, cut into batches of padded rows: consecutive units of each batch.

    Among sorted units, filling each batch to `max_tokens` gives the fewest batches. Their number is
    rounded up, and the smallest cost that no batch of so many need exceed is found by bisection.

    Args:
        longest: int64 [U], decreasing, tokens of a unit's longest row; rows: [U], its rows.
        row_costs: [U], decreasing, cost of one row as long as `longest`; all rows of a batch cost
            as much as its longest.
    """
    limits = (longest.tolist(), rows.tolist(), row_costs.tolist(), max_tokens)
    num_bins = round_up(len(_batch_starts(*limits, np.inf)), bins_multiple_of)
    low, high = float((rows * row_costs).max()), float(rows.sum() * row_costs[0])
    for _ in range(30):
        budget = (low + high) / 2
        if len(_batch_starts(*limits, budget)) <= num_bins:
            high = budget
        else:
            low = budget
    batches = np.split(np.arange(len(rows)), _batch_starts(*limits, high)[1:])
    return spread(batches, num_bins, rows * row_costs)


def _batch_starts(
    longest: list[int], rows: list[int], row_costs: list[float], max_tokens: int, budget: float
) -> list[int]:
    """First unit of each batch when batches are filled in order up to `max_tokens` and `budget`."""
    starts = [0]
    num_rows = 0
    for i, unit_rows in enumerate(rows):
        first = starts[-1]
        num_rows += unit_rows
        if num_rows * longest[first] > max_tokens or num_rows * row_costs[first] > budget:
            starts.append(i)
            num_rows = unit_rows
    return starts


def deal(costs: ArrayLike, num_ranks: int) -> IntArray:
    """Bins [R * S] over ranks: the bin that rank r runs in slot s, int64 [R, S].

    Ranks wait for each other at every slot, so each slot takes the R costliest bins that are left,
    and the rank that has had the least work so far takes the costliest of them.
    """
    costs = np.asarray(costs, np.float64)
    slots = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    places = np.empty(slots.shape[::-1], np.int64)
    work = np.zeros(num_ranks)
    for slot, bins in enumerate(slots):
        ranks = np.argsort(work, kind="stable")
        places[ranks, slot] = bins
        work[ranks] += costs[bins]
    return places
