"""The slots of one global batch in each mode: what every rank runs at one time.

Slots are lists [S][R] of index arrays into the global batch, and costs are lists [S][R].
"""

import numpy as np
from numpy.typing import NDArray

from burnish_packing._checks import IntArray
from burnish_packing._pieces import group_units
from burnish_packing._plan_arguments import Mode, Order
from burnish_packing.balance import balance_slots, cut_layers
from burnish_packing.costs import Cost
from burnish_packing.packers import pack, split_by_label

Slots = list[list[IntArray]]
Costs = list[list[float]]


def plan_slots(
    mode: Mode,
    padded: IntArray,
    limit: int | None,
    num_ranks: int,
    cost: Cost,
    units: IntArray | None,
    groups: IntArray,
    shared: IntArray,
    micro_batch_size: int | None,
    offset: int,
) -> tuple[Slots, Costs]:
    """The slots of one global batch and their costs.

    Args:
        padded: int64 [N], positions that each sequence takes: of the pack or of its row.
        limit: positions of a micro-batch, not counting the fill at the end of a pack.
        offset: index of the first of these sequences, for the errors.
    """
    if mode == "fixed":
        assert micro_batch_size is not None
        return fixed_slots(padded, limit, num_ranks, cost, units, micro_batch_size, offset)
    assert limit is not None
    if mode == "padded":
        return padded_slots(padded, limit, num_ranks, cost, units)
    return packed_slots(padded, limit, num_ranks, cost, units, groups, shared)


def slot_order(slots: Slots, costs: Costs, order: Order) -> list[int]:
    """Slots by the costliest micro-batch, falling, or by their first sequence."""
    if order == "largest_first":
        return sorted(range(len(slots)), key=lambda slot: -max(costs[slot]))
    return sorted(range(len(slots)), key=lambda slot: min(b[0] for b in slots[slot] if len(b)))


def packed_slots(
    padded: IntArray,
    capacity: int,
    num_ranks: int,
    cost: Cost,
    units: IntArray | None,
    groups: IntArray,
    shared: IntArray,
) -> tuple[Slots, Costs]:
    """Packs, as few as best-fit-decreasing needs or one slot more, balanced slot by slot.

    Args:
        padded: int64 [N], positions of each sequence.
        groups, shared: int64 [N], prefix of each sequence (-1: none) and its tokens (0: none).
    """
    costs = checked_costs(cost, padded)
    shared_costs = np.zeros(len(padded))
    if shared.any():
        shared_costs = np.where(shared > 0, checked_costs(cost, shared), 0.0)
        units = _prefix_pieces(padded, groups, shared, capacity)
    unit_of, unit_tokens, _ = group_units(padded - shared, units)
    members = split_by_label(unit_of)
    first = np.array([unit[0] for unit in members], np.int64)
    unit_tokens = unit_tokens + shared[first]
    unit_costs = np.bincount(unit_of, weights=costs - shared_costs) + shared_costs[first]

    packed = pack(unit_tokens, capacity, bins_multiple_of=num_ranks).bins
    balanced = balance_slots(packed, unit_tokens, unit_costs, capacity, num_ranks)
    slots, slot_costs = [], []
    work = np.zeros(num_ranks)
    for bins in balanced:
        sequences = [_sequences_of(bin_units, members) for bin_units in bins]
        values = [_sum_sharing(costs, shared_costs, groups, indices) for indices in sequences]
        # The rank that has had the least work so far takes the costliest pack of the slot.
        ranks = np.argsort(work, kind="stable")
        order = np.empty(num_ranks, np.int64)
        order[ranks] = np.argsort(-np.array(values), kind="stable")
        slots.append([sequences[i] for i in order])
        slot_costs.append([values[i] for i in order])
        work += slot_costs[-1]
    return slots, slot_costs


def _prefix_pieces(
    lengths: IntArray, groups: IntArray, shared: IntArray, capacity: int
) -> IntArray:
    """Unit ids [N] that keep a group whole if it fits `capacity`, else in as few pieces as fit."""
    own = lengths - shared
    alone = -1 - np.arange(len(groups))
    _, group_of = np.unique(np.where(shared > 0, groups, alone), return_inverse=True)
    piece_of = np.empty_like(group_of)
    for members in split_by_label(group_of):
        prefix = shared[members[0]]
        if prefix + own[members].sum() <= capacity:
            piece_of[members] = members[0]
        else:
            for piece in pack(own[members], capacity - prefix).bins:
                piece_of[members[piece]] = members[piece[0]]
    return piece_of


def padded_slots(
    padded: IntArray, max_tokens: int, num_ranks: int, cost: Cost, units: IntArray | None
) -> tuple[Slots, Costs]:
    """Rows of similar lengths, longest first, in slots of one shape for all ranks.

    Sorted units form layers of one unit for every rank, so that the ranks' rows agree; inside a
    layer the rank that has had the least work so far takes the longest unit.
    """
    unit_of, _, sizes = group_units(padded, units)
    members = split_by_label(unit_of)
    longest = np.array([padded[unit].max() for unit in members])
    row_costs = checked_costs(cost, padded)
    unit_work = np.bincount(unit_of, weights=row_costs)

    order = np.lexsort((-sizes, -longest))
    layers = _layers(order, longest, sizes, max_tokens, num_ranks)
    widths = longest[[layer[0] for layer in layers]]
    rows = np.array([sizes[layer].max() for layer in layers])
    width_costs = checked_costs(cost, widths)
    slots, slot_costs = [], []
    work, count = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    for start, end in cut_layers(widths, rows, width_costs, max_tokens):
        units_of: list[list[int]] = [[] for _ in range(num_ranks)]
        for layer in layers[start:end]:
            ranks = np.lexsort((count, work))[: len(layer)]
            for rank, unit in zip(ranks.tolist(), layer.tolist(), strict=True):
                units_of[rank].append(unit)
            work[ranks] += unit_work[layer]
            count[ranks] += 1
        slots.append([_sequences_of(np.array(u, np.int64), members) for u in units_of])
        num_rows = max(len(indices) for indices in slots[-1])
        slot_costs.append([float(num_rows * width_costs[start])] * num_ranks)
    return slots, slot_costs


def _layers(
    order: IntArray, longest: IntArray, sizes: IntArray, max_tokens: int, num_ranks: int
) -> list[IntArray]:
    """Consecutive units of `order`, at most one for each rank, that fit `max_tokens` in one shape.

    Units of unlike numbers of rows may fit alone and not in the shape that holds both.
    """
    layers: list[list[int]] = []
    rows = width = 0
    for unit in order.tolist():
        rows = max(rows, int(sizes[unit]))
        if not layers or len(layers[-1]) == num_ranks or rows * width > max_tokens:
            layers.append([])
            rows, width = int(sizes[unit]), int(longest[unit])
        layers[-1].append(unit)
    return [np.array(layer, np.int64) for layer in layers]


def fixed_slots(
    padded: IntArray,
    max_tokens: int | None,
    num_ranks: int,
    cost: Cost,
    units: IntArray | None,
    micro_batch_size: int,
    offset: int,
) -> tuple[Slots, Costs]:
    """Batches in the caller's order, rank by rank: the first ranks have the remaining units."""
    unit_of, _, sizes = group_units(padded, units)
    members = split_by_label(unit_of)
    batches_of_rank = []
    for share in np.array_split(np.arange(len(members)), num_ranks):
        batches: list[list[int]] = []
        num_rows = micro_batch_size
        for unit in share.tolist():
            num_rows += int(sizes[unit])
            if num_rows > micro_batch_size:
                batches.append([])
                num_rows = int(sizes[unit])
            batches[-1] += members[unit].tolist()
        batches_of_rank.append(batches)
    num_slots = max(len(batches) for batches in batches_of_rank)
    for batches in batches_of_rank:
        batches += [[]] * (num_slots - len(batches))
    slots = [[np.array(b[s], np.int64) for b in batches_of_rank] for s in range(num_slots)]
    bins = [indices for slot in slots for indices in slot]
    longest = np.array([padded[indices].max(initial=0) for indices in bins], np.int64)
    rows = np.array([len(indices) for indices in bins], np.int64)
    if max_tokens is not None and (rows * longest > max_tokens).any():
        i = int(np.flatnonzero(rows * longest > max_tokens)[0])
        raise ValueError(
            f"a micro-batch must fit max_tokens = {max_tokens}, got {rows[i] * longest[i]} padded "
            f"tokens for sequences {(bins[i] + offset).tolist()}; lower micro_batch_size or use "
            f"mode padded"
        )
    costs = rows * checked_costs(cost, longest)
    return slots, costs.reshape(num_slots, num_ranks).tolist()


def _sequences_of(units: IntArray, members: list[IntArray]) -> IntArray:
    """A bin of units as a bin of sequences, ascending."""
    return np.sort(np.concatenate([members[u] for u in units])) if len(units) else units


def _sum_sharing(
    values: NDArray, prefix_values: NDArray, groups: IntArray, indices: IntArray
) -> float:
    """Sum of values over `indices`, with the part of a prefix counted once for each group."""
    prefixes = prefix_values[indices]
    if not prefixes.any():
        return float(values[indices].sum())
    _, first = np.unique(groups[indices], return_index=True)
    return float((values[indices] - prefixes).sum() + prefixes[first].sum())


def checked_costs(cost: Cost, lengths: IntArray) -> NDArray[np.float64]:
    """float64 [N]: the costs of lengths [N]; ValueError unless all are from 0 to 1e100."""
    costs = np.asarray(cost(lengths), np.float64)
    # Their sums and squares must be finite, too.
    if costs.shape != lengths.shape or not ((costs >= 0) & (costs <= 1e100)).all():
        raise ValueError(
            f"cost must map lengths [N] to costs [N] from 0 to 1e100, got {costs} for {lengths}; "
            f"correct the cost function"
        )
    return costs


def check_units(
    mode: Mode, padded: IntArray, units: IntArray, limit: int | None, micro_batch_size: int | None
) -> None:
    """ValueError naming the sequences of the first unit that no micro-batch can hold."""
    unit_of, needed, sizes = group_units(padded, units)
    name = "max_tokens"
    if micro_batch_size is not None:
        needed, limit, name = sizes, micro_batch_size, "micro_batch_size"
    elif mode == "padded":
        longest = np.zeros_like(needed)
        np.maximum.at(longest, unit_of, padded)
        needed = longest * sizes
    assert limit is not None
    wrong = np.flatnonzero(needed > limit)
    if wrong.size:
        raise ValueError(
            f"every unit must fit {name} = {limit}, got {needed[wrong[0]]} for the unit of "
            f"sequences {np.flatnonzero(unit_of == wrong[0]).tolist()}; raise {name} or split the "
            f"unit"
        )
