"""Micro-batches for the ranks of a data-parallel step: which sequences run together, and where."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish_packing._checks import (
    IntArray,
    as_lengths,
    as_prefixes,
    check_fits,
    check_partition,
    check_positive,
    load_versioned,
)
from burnish_packing.balance import balance_bins, cut_rows, deal
from burnish_packing.layout import round_up
from burnish_packing.metrics import fill_ratio, padding_ratio, rank_imbalance
from burnish_packing.packers import group_units, pack, split_by_label

SCHEMA_VERSION = 1
Mode = Literal["packed", "padded", "fixed"]
Cost = Callable[[IntArray], NDArray]


def token_cost(lengths: IntArray) -> NDArray:
    """Cost of sequences of these lengths [N]: their tokens."""
    return lengths


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which sequences every rank runs, micro-batch by micro-batch.

    `ranks[r][slot]` holds the indices of one model call; `()` is an empty slot, run as a batch that
    counts nothing so that collectives stay in step. Every rank has the same number of slots, and
    every sequence is in exactly one.
    """

    mode: Mode  # packed: one row; padded, fixed: a row per sequence
    max_tokens: int | None  # positions of one model call, padding included, never exceeded
    pad_multiple: int  # of the pack (packed) or of every row (padded, fixed)
    lengths: tuple[int, ...]  # tokens of each sequence
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    costs: tuple[tuple[float, ...], ...]  # of ranks[r][slot], in the unit of the cost function
    prefix_ids: tuple[int, ...] | None = None  # shared prefixes, as given to the planner
    prefix_lengths: tuple[int, ...] | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_micro_batches(self) -> int:
        """Slots of each rank, empty ones included."""
        return len(self.ranks[0])

    def inverse(self) -> IntArray:
        """int64 [N] back to the caller's order.

        With results concatenated rank by rank and slot by slot, `results[plan.inverse()][i]` is
        that of sequence i.
        """
        order = np.array([i for rank in self.ranks for slot in rank for i in slot], np.int64)
        return np.argsort(order)

    def metrics(self) -> dict[str, float]:
        """What the plan costs.

        `num_tokens` are stored once for a shared prefix, `num_model_tokens` have the padding too,
        `fill_ratio` is tokens over the budget of the non-empty micro-batches (left out without
        max_tokens), `padding_ratio` the share of model tokens that is padding, and
        `rank_imbalance` the time of the step over that of a perfectly balanced one.
        """
        num_tokens, num_model_tokens = self._slot_tokens()
        metrics = {
            "num_ranks": self.num_ranks,
            "num_micro_batches": self.num_micro_batches,
            "num_empty_slots": self.num_ranks * self.num_micro_batches - len(num_tokens),
            "num_sequences": len(self.lengths),
            "num_tokens": sum(num_tokens),
            "num_model_tokens": sum(num_model_tokens),
            "padding_ratio": padding_ratio(num_tokens, num_model_tokens),
            "rank_imbalance": rank_imbalance(self.costs),
        }
        if self.max_tokens is not None:
            metrics["fill_ratio"] = fill_ratio(num_tokens, self.max_tokens)
        return metrics

    def _slot_tokens(self) -> tuple[list[int], list[int]]:
        """Tokens, and positions with the padding, of every micro-batch that is not empty."""
        slots = [np.array(slot) for rank in self.ranks for slot in rank if slot]
        lengths = as_lengths(self.lengths)
        groups, shared = as_prefixes(lengths, self.prefix_ids, self.prefix_lengths)
        num_tokens = [int(_sum_sharing(lengths, shared, groups, slot)) for slot in slots]
        if self.mode == "packed":
            return num_tokens, [round_up(tokens, self.pad_multiple) for tokens in num_tokens]
        longest = [round_up(int(lengths[slot].max()), self.pad_multiple) for slot in slots]
        return num_tokens, [len(s) * n for s, n in zip(slots, longest, strict=True)]

    def to_json(self) -> str:
        """One JSON object with a schema version."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "MicroBatchPlan":
        """The inverse of `to_json`; ValueError for another schema version or a broken plan."""
        names = [field.name for field in dataclass_fields(cls)]
        fields = load_versioned(text, SCHEMA_VERSION, "plan", names[:-2], optional=names[-2:])
        plan = cls(**{name: _as_tuples(value) for name, value in fields.items()})
        indices = [i for rank in plan.ranks for slot in rank for i in slot]
        check_partition(np.array(indices, np.int64), len(plan.lengths), "ranks")
        if len({len(rank) for rank in plan.ranks}) != 1:
            raise ValueError(
                f"every rank must have the same number of micro-batches, got "
                f"{[len(rank) for rank in plan.ranks]}; plan again"
            )
        if plan.max_tokens is not None:
            check_fits(plan._slot_tokens()[1], plan.max_tokens, "max_tokens")
        return plan


def plan_micro_batches(
    lengths: ArrayLike,
    *,
    max_tokens: int | None,
    num_ranks: int = 1,
    mode: Mode = "packed",
    micro_batch_size: int | None = None,
    pad_multiple: int = 1,
    cost: Cost = token_cost,
    units: ArrayLike | None = None,
    prefix_ids: ArrayLike | None = None,
    prefix_lengths: ArrayLike | None = None,
) -> MicroBatchPlan:
    """Divide the sequences of one step into micro-batches and these among ranks.

    `packed` and `padded` balance the cost over ranks, slot by slot, and give every rank work when
    there is a unit for each; `fixed` keeps the order and deals equal counts.

    Args:
        lengths: int [N], tokens of each sequence.
        max_tokens: positions of one model call, padding included; None only in mode `fixed`.
        num_ranks: data-parallel ranks.
        mode: `packed` into one row; `padded` rows of similar lengths; `fixed` numbers of rows.
        micro_batch_size: sequences of a micro-batch, in mode `fixed` only.
        pad_multiple: packs (packed) or rows (padded, fixed) are filled up to a multiple of this.
        cost: costs [N] >= 0 of lengths [N], such as time or FLOPs. A sequence behind a shared
            prefix costs what it adds, cost(length) - cost(prefix length).
        units: int [N]; sequences with equal units stay in one micro-batch.
        prefix_ids: int [N], equal for sequences that begin with the same tokens, -1 for none; in
            mode `packed` only. The prefix is counted once in a micro-batch. A group stays in one
            micro-batch if it fits, else it is cut into pieces that each have the prefix.
        prefix_lengths: int [N], tokens of the shared prefix, where prefix_ids >= 0.

    Raises:
        ValueError: a sequence or unit does not fit, or arguments are out of range or do not go
            together.
    """
    lengths = as_lengths(lengths)
    _check_numbers(max_tokens, num_ranks, mode, micro_batch_size, pad_multiple)
    _check_grouping(mode, units, prefix_ids)
    groups, shared = as_prefixes(lengths, prefix_ids, prefix_lengths)
    padded = round_up(lengths, pad_multiple)
    _check_lengths(lengths, padded, max_tokens, pad_multiple)

    if mode == "packed":
        assert max_tokens is not None
        capacity = max_tokens // pad_multiple * pad_multiple
        bins, costs = _packed_bins(lengths, capacity, num_ranks, cost, units, groups, shared)
        places = deal(costs, num_ranks)
    elif mode == "padded":
        assert max_tokens is not None
        bins, costs = _padded_bins(padded, max_tokens, num_ranks, cost, units)
        places = deal(costs, num_ranks)
    else:
        assert micro_batch_size is not None
        bins, costs = _fixed_bins(padded, max_tokens, num_ranks, cost, units, micro_batch_size)
        places = np.arange(len(bins)).reshape(num_ranks, -1)
    return MicroBatchPlan(
        mode=mode,
        max_tokens=None if max_tokens is None else int(max_tokens),
        pad_multiple=int(pad_multiple),
        lengths=tuple(lengths.tolist()),
        ranks=tuple(tuple(tuple(bins[i].tolist()) for i in slots) for slots in places),
        costs=tuple(tuple(costs[i] for i in slots) for slots in places),
        prefix_ids=None if prefix_ids is None else tuple(groups.tolist()),
        prefix_lengths=None if prefix_ids is None else tuple(shared.tolist()),
    )


def _packed_bins(
    lengths: IntArray,
    capacity: int,
    num_ranks: int,
    cost: Cost,
    units: ArrayLike | None,
    groups: IntArray,
    shared: IntArray,
) -> tuple[list[IntArray], list[float]]:
    """As few packs as best-fit-decreasing needs, balanced if that finds room: indices, costs."""
    costs = _checked_costs(cost, lengths)
    shared_costs = np.where(shared > 0, _checked_costs(cost, shared), 0.0)
    if shared.any():
        units = _prefix_pieces(lengths, groups, shared, capacity)
    unit_of, unit_tokens, _ = group_units(lengths - shared, units)
    members = split_by_label(unit_of)
    first = np.array([unit[0] for unit in members], np.int64)
    unit_tokens = unit_tokens + shared[first]
    unit_costs = np.bincount(unit_of, weights=costs - shared_costs) + shared_costs[first]
    _check_units(unit_tokens, members, capacity, "max_tokens")

    packed = list(pack(unit_tokens, capacity, bins_multiple_of=num_ranks).bins)
    balanced = balance_bins(unit_tokens, unit_costs, capacity, len(packed))
    bins = _sequences_of(packed if balanced is None else balanced, members)
    return bins, [_sum_sharing(costs, shared_costs, groups, batch) for batch in bins]


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


def _padded_bins(
    padded: IntArray, max_tokens: int, num_ranks: int, cost: Cost, units: ArrayLike | None
) -> tuple[list[IntArray], list[float]]:
    """Rows of similar lengths: as few batches as fit, then as equal in cost as that many can be."""
    unit_of, _, sizes = group_units(padded, units)
    if not len(sizes):
        return [], []
    members = split_by_label(unit_of)
    longest = np.array([padded[unit].max() for unit in members])
    _check_units(longest * sizes, members, max_tokens, "max_tokens")

    order = np.argsort(-longest, kind="stable")
    row_costs = _checked_costs(cost, longest[order])
    batches = cut_rows(longest[order], sizes[order], row_costs, max_tokens, num_ranks)
    bins = _sequences_of([order[batch] for batch in batches], members)
    return bins, _row_costs(bins, padded, cost)


def _fixed_bins(
    padded: IntArray,
    max_tokens: int | None,
    num_ranks: int,
    cost: Cost,
    units: ArrayLike | None,
    micro_batch_size: int,
) -> tuple[list[IntArray], list[float]]:
    """Batches in the caller's order, rank by rank: the first ranks have the remaining units."""
    unit_of, _, sizes = group_units(padded, units)
    members = split_by_label(unit_of)
    _check_units(sizes, members, micro_batch_size, "micro_batch_size")
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
    bins = [np.array(batch, np.int64) for batches in batches_of_rank for batch in batches]
    for batch in bins:
        size = len(batch) * padded[batch].max(initial=0)
        if max_tokens is not None and size > max_tokens:
            raise ValueError(
                f"a micro-batch must fit max_tokens = {max_tokens}, got {size} padded tokens for "
                f"sequences {batch.tolist()}; lower micro_batch_size or use mode padded"
            )
    return bins, _row_costs(bins, padded, cost)


def _sequences_of(bins: list[IntArray], members: list[IntArray]) -> list[IntArray]:
    """Bins of units as bins of sequences, ascending."""
    return [
        np.sort(np.concatenate([members[unit] for unit in units])) if len(units) else units
        for units in bins
    ]


def _sum_sharing(
    values: NDArray, prefix_values: NDArray, groups: IntArray, indices: IntArray
) -> float:
    """Sum of values over `indices`, with the part of a prefix counted once for each group."""
    _, first = np.unique(groups[indices], return_index=True)
    own = values[indices] - prefix_values[indices]
    return float(own.sum() + prefix_values[indices][first].sum())


def _row_costs(bins: list[IntArray], padded: IntArray, cost: Cost) -> list[float]:
    """Cost of each batch of rows as long as its longest."""
    longest = np.array([padded[batch].max(initial=0) for batch in bins], np.int64)
    rows = np.array([len(batch) for batch in bins], np.int64)
    return (rows * _checked_costs(cost, longest)).tolist()


def _checked_costs(cost: Cost, lengths: IntArray) -> NDArray[np.float64]:
    costs = np.asarray(cost(lengths), np.float64)
    if costs.shape != lengths.shape or not (np.isfinite(costs) & (costs >= 0)).all():
        raise ValueError(
            f"cost must map lengths [N] to finite costs [N] >= 0, got {costs} for {lengths}; "
            f"correct the cost function"
        )
    return costs


def _check_numbers(
    max_tokens: int | None,
    num_ranks: int,
    mode: str,
    micro_batch_size: int | None,
    pad_multiple: int,
) -> None:
    if mode not in ("packed", "padded", "fixed"):
        raise ValueError(f"mode must be packed, padded or fixed, got {mode!r}; choose one")
    if (mode == "fixed") != (micro_batch_size is not None):
        raise ValueError(
            f"micro_batch_size must be given in mode fixed and only there, got {micro_batch_size} "
            f"in mode {mode}; in the other modes max_tokens decides"
        )
    if mode != "fixed" and max_tokens is None:
        raise ValueError(f"max_tokens must be given in mode {mode}, got None; pass the budget")
    check_positive(num_ranks, "num_ranks")
    check_positive(pad_multiple, "pad_multiple")
    if max_tokens is not None:
        check_positive(max_tokens, "max_tokens")
    if micro_batch_size is not None:
        check_positive(micro_batch_size, "micro_batch_size")


def _check_grouping(mode: str, units: ArrayLike | None, prefix_ids: ArrayLike | None) -> None:
    if prefix_ids is not None and (mode != "packed" or units is not None):
        raise ValueError(
            f"prefix_ids must come with mode packed and without units, got mode {mode}; leave out "
            f"units (a group stays together as far as it fits) or prefix_ids"
        )


def _check_lengths(
    lengths: IntArray, padded: IntArray, max_tokens: int | None, pad_multiple: int
) -> None:
    """ValueError naming the first sequence that no micro-batch can hold."""
    if max_tokens is not None and (padded > max_tokens).any():
        i = int(np.flatnonzero(padded > max_tokens)[0])
        raise ValueError(
            f"every sequence must fit max_tokens = {max_tokens}, got length {lengths[i]}, padded "
            f"{padded[i]} (pad_multiple {pad_multiple}), at index {i}; raise max_tokens or drop it"
        )


def _check_units(needed: IntArray, members: list[IntArray], limit: int, name: str) -> None:
    """ValueError naming the sequences of the first unit that no micro-batch can hold."""
    wrong = np.flatnonzero(needed > limit)
    if wrong.size:
        raise ValueError(
            f"every unit must fit {name} = {limit}, got {needed[wrong[0]]} for the unit of "
            f"sequences {members[wrong[0]].tolist()}; raise {name} or split the unit"
        )


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
