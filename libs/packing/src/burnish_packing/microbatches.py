"""Micro-batches for the ranks of a data-parallel step: which sequences run together, and where."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from itertools import groupby

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import IntArray, as_lengths, as_prefixes, load_versioned, shown
from burnish_packing._modes import check_units, plan_slots, slot_order
from burnish_packing._plan_arguments import (
    Mode,
    Order,
    as_units,
    blocks,
    check_lengths,
    check_names,
    checked_grouping,
    checked_numbers,
    count_kept,
    to_fit,
)
from burnish_packing._plan_json import check_plan, read_fields
from burnish_packing.costs import Cost, token_cost
from burnish_packing.layout import round_up
from burnish_packing.metrics import fill_ratio, padding_ratio, rank_imbalance

__all__ = [
    "Cost",
    "MicroBatch",
    "MicroBatchPlan",
    "Mode",
    "Order",
    "plan_micro_batches",
    "token_cost",
]

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class MicroBatch:
    """One model call: the sequences that run together and the shape they run in."""

    indices: tuple[int, ...]  # of its sequences; () is an empty slot
    lengths: tuple[int, ...]  # tokens of these sequences, a shared prefix included
    mode: Mode
    shape: tuple[int, int]  # [rows, positions] of the call, padding and fill included
    sequence_multiple: int = 1  # each sequence of a pack takes a multiple of so many positions
    global_batch: int = 0  # the optimizer step it belongs to
    prefix_ids: tuple[int, ...] | None = None  # of these sequences; -1: no shared prefix
    prefix_lengths: tuple[int, ...] | None = None  # tokens of the shared prefix, 0 without one


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which sequences every rank runs, micro-batch by micro-batch.

    `ranks[r][slot]` holds the indices of one model call; `()` is an empty slot, run as a batch that
    counts nothing so that collectives stay in step. Every rank has the same number of slots, also
    in each global batch, and every sequence that is not dropped is in exactly one.
    """

    mode: Mode  # packed: one row; padded, fixed: a row per sequence
    max_tokens: int | None  # positions of one model call, padding included, never exceeded
    pad_multiple: int  # of the pack (packed) or of every row (padded, fixed)
    sequence_multiple: int  # of every sequence in a pack
    global_batch_size: int | None  # consecutive sequences of one optimizer step; None: all
    lengths: tuple[int, ...]  # tokens of each sequence, dropped ones included
    dropped: tuple[int, ...]  # sequences in no micro-batch: the last, short global batch
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    costs: tuple[tuple[float, ...], ...]  # of ranks[r][slot], in the unit of the cost function
    global_batches: tuple[tuple[int, int], ...]  # [start, end) of the slots of each
    prefix_ids: tuple[int, ...] | None = None  # shared prefixes, as given to the planner
    prefix_lengths: tuple[int, ...] | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_micro_batches(self) -> int:
        """Slots of each rank, those of all global batches and empty ones included."""
        return len(self.ranks[0])

    def micro_batches(self, rank: int) -> Iterator[MicroBatch]:
        """What `rank` runs, slot by slot, all global batches in order, empty slots included.

        The shape of a packed micro-batch is [1, L], that of a fixed one its own rows; an empty one
        is as small as the multiples allow. In mode padded all ranks have the slot's shape, rows
        without a sequence included. ValueError when there is no such rank.
        """
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank must be one of the plan's {self.num_ranks}, got {shown(rank)}; plan for "
                f"more ranks"
            )
        return self._micro_batches(rank)

    def _micro_batches(self, rank: int) -> Iterator[MicroBatch]:
        prefixes = (self.prefix_ids, self.prefix_lengths)
        for global_batch, (start, end) in enumerate(self.global_batches):
            for slot in range(start, end):
                indices = self.ranks[rank][slot]
                ids, shared = (p and tuple(p[i] for i in indices) for p in prefixes)
                yield MicroBatch(
                    indices=indices,
                    lengths=tuple(self.lengths[i] for i in indices),
                    mode=self.mode,
                    shape=self._shape(rank, slot),
                    sequence_multiple=self.sequence_multiple,
                    global_batch=global_batch,
                    prefix_ids=ids,
                    prefix_lengths=shared,
                )

    def steps(self, rank: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of `rank` for one optimizer step after another: its global batches."""
        for _, step in groupby(self.micro_batches(rank), key=lambda m: m.global_batch):
            yield list(step)

    def inverse(self) -> IntArray:
        """int64 [N - dropped] back to the caller's order.

        With results concatenated rank by rank and slot by slot, `results[plan.inverse()][i]` is
        that of sequence i. Dropped sequences are the caller's last.
        """
        order = np.array([i for rank in self.ranks for slot in rank for i in slot], np.int64)
        return np.argsort(order)

    def metrics(self) -> dict[str, float]:
        """What the plan costs.

        `num_tokens` are stored once for a shared prefix, `num_model_tokens` are all positions that
        the model runs, except those that only keep an empty packed or fixed slot in step,
        `fill_ratio` is tokens over the budget of the non-empty micro-batches (left out without
        max_tokens), `padding_ratio` the share of model tokens that is padding, and
        `rank_imbalance` the time of the step over that of a perfectly balanced one.
        """
        slots = [(r, s) for r, rank in enumerate(self.ranks) for s in range(len(rank))]
        full = [(r, s) for r, s in slots if self.ranks[r][s]]
        num_tokens = [self._num_tokens(self.ranks[r][s]) for r, s in full]
        run = slots if self.mode == "padded" else full
        num_model_tokens = [math.prod(self._shape(r, s)) for r, s in run]
        metrics = {
            "num_ranks": self.num_ranks,
            "num_global_batches": len(self.global_batches),
            "num_micro_batches": self.num_micro_batches,
            "num_empty_slots": len(slots) - len(full),
            "num_sequences": len(self.lengths) - len(self.dropped),
            "num_dropped": len(self.dropped),
            "num_tokens": sum(num_tokens),
            "num_model_tokens": sum(num_model_tokens),
            "padding_ratio": padding_ratio(num_tokens, num_model_tokens),
            "rank_imbalance": rank_imbalance(self.costs),
        }
        if self.max_tokens is not None:
            metrics["fill_ratio"] = fill_ratio(num_tokens, self.max_tokens)
        return metrics

    def to_json(self) -> str:
        """One JSON object with a schema version."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "MicroBatchPlan":
        """The inverse of `to_json`; ValueError for another schema version or a broken plan."""
        names = [field.name for field in dataclass_fields(cls)]
        fields = load_versioned(text, SCHEMA_VERSION, "plan", names[:-2], optional=names[-2:])
        plan = cls(**read_fields(fields))
        check_plan(plan)
        return plan

    def _num_tokens(self, indices: tuple[int, ...], multiple: int = 1) -> int:
        """Tokens of a micro-batch, each sequence's rounded up; a shared prefix counts once."""
        num_tokens = sum(round_up(self.lengths[i], multiple) for i in indices)
        if self.prefix_ids is None or self.prefix_lengths is None:
            return num_tokens
        prefix_of = {self.prefix_ids[i]: self.prefix_lengths[i] for i in indices}
        return num_tokens - sum(self.prefix_lengths[i] for i in indices) + sum(prefix_of.values())

    def _shape(self, rank: int, slot: int) -> tuple[int, int]:
        """[rows, positions] of a model call; `micro_batches` says how."""
        indices = self.ranks[rank][slot]
        if self.mode == "packed":
            # An empty slot runs one token, in a row that can be divided as the others are.
            positions = self._num_tokens(indices, self.sequence_multiple) if indices else 1
            return 1, round_up(round_up(positions, self.sequence_multiple), self.pad_multiple)
        together = [slots[slot] for slots in self.ranks] if self.mode == "padded" else [indices]
        lengths = [self.lengths[i] for rows in together for i in rows]
        if not lengths:
            return 1, self.pad_multiple
        return max(map(len, together)), round_up(max(lengths), self.pad_multiple)


def plan_micro_batches(
    lengths: ArrayLike,
    *,
    max_tokens: int | None = None,
    num_ranks: int = 1,
    mode: Mode = "packed",
    micro_batch_size: int | None = None,
    pad_multiple: int = 1,
    sequence_multiple: int = 1,
    cost: Cost = token_cost,
    global_batch_size: int | None = None,
    drop_last: bool = False,
    order: Order = "as_given",
    units: ArrayLike | None = None,
    prefix_ids: ArrayLike | None = None,
    prefix_lengths: ArrayLike | None = None,
) -> MicroBatchPlan:
    """Divide sequences into the micro-batches of optimizer steps, and these among ranks.

    `packed` fills as few packs as best-fit-decreasing needs, or one slot of all ranks more where
    this saves 1 % of the step, and balances their cost slot by slot. `padded` cuts the sorted
    sequences into slots in which all ranks run one shape; a slot more must save a tenth of a full
    micro-batch. `fixed` keeps the order and deals equal counts. Every rank has work when there is
    a unit for each.

    Args:
        lengths: int [N], tokens of each sequence, all >= 1, in training order.
        max_tokens: positions of one model call, padding included; may be None in mode `fixed`.
        num_ranks: data-parallel ranks.
        mode: `packed` into one row; `padded` rows of similar lengths; `fixed` numbers of rows.
        micro_batch_size: sequences of a micro-batch, in mode `fixed` only.
        pad_multiple: packs (packed) or rows (padded, fixed) are filled up to a multiple of this.
        sequence_multiple: each sequence of a pack takes a multiple of so many positions (context
            parallelism); in mode `packed` without prefixes only.
        cost: costs [N] >= 0 of lengths [N], such as time or FLOPs (`costs.flops_cost`); lengths are
            those that run: of sequences filled up to sequence_multiple, or of padded rows. A
            sequence behind a shared prefix costs what it adds, cost(length) - cost(prefix length).
        global_batch_size: so many consecutive sequences are one optimizer step, planned alone: no
            sequence leaves its step. None: all are one step.
        drop_last: leave out the last global batch if it is short, and count its sequences.
        order: of the slots of a step: `as_given` by their first sequence, or `largest_first` by
            cost, so that trouble with memory shows in the first micro-batch.
        units: int [N]; sequences with equal units stay in one micro-batch.
        prefix_ids: int [N], equal for sequences that begin with the same tokens, -1 for none; in
            mode `packed` only. The prefix is counted once in a micro-batch. A group stays in one
            micro-batch if it fits and lies in one global batch, else it is cut into pieces that
            each have the prefix.
        prefix_lengths: int [N], tokens of the shared prefix, where prefix_ids >= 0.

    Raises:
        ValueError: a sequence or unit does not fit, a unit lies in two global batches, or arguments
            are out of range or do not go together.
    """
    lengths = as_lengths(lengths)
    check_names(mode, order, cost)
    max_tokens, num_ranks, micro_batch_size, pad_multiple, sequence_multiple = checked_numbers(
        max_tokens, num_ranks, mode, micro_batch_size, pad_multiple, sequence_multiple
    )
    global_batch_size = checked_grouping(
        mode, units, prefix_ids, sequence_multiple, global_batch_size, drop_last
    )
    groups, shared = as_prefixes(lengths, prefix_ids, prefix_lengths)
    num_kept = count_kept(len(lengths), global_batch_size, drop_last)
    check_lengths(lengths[:num_kept], max_tokens, pad_multiple, sequence_multiple)
    padded, limit = to_fit(lengths, max_tokens, mode, pad_multiple, sequence_multiple)
    if units is not None:
        units = as_units(units, len(lengths), global_batch_size)
        check_units(mode, padded[:num_kept], units[:num_kept], limit, micro_batch_size)

    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    costs: list[list[float]] = [[] for _ in range(num_ranks)]
    global_batches = []
    for start, end in blocks(num_kept, global_batch_size):
        part = slice(start, end)
        slots, slot_costs = plan_slots(
            mode,
            padded[part],
            limit,
            num_ranks,
            cost,
            None if units is None else units[part],
            groups[part],
            shared[part],
            micro_batch_size,
            start,
        )
        global_batches.append((len(ranks[0]), len(ranks[0]) + len(slots)))
        for slot in slot_order(slots, slot_costs, order):
            for rank in range(num_ranks):
                ranks[rank].append(tuple((slots[slot][rank] + start).tolist()))
                costs[rank].append(slot_costs[slot][rank])
    return MicroBatchPlan(
        mode=mode,
        max_tokens=max_tokens,
        pad_multiple=pad_multiple,
        sequence_multiple=sequence_multiple,
        global_batch_size=global_batch_size,
        lengths=tuple(lengths.tolist()),
        dropped=tuple(range(num_kept, len(lengths))),
        ranks=tuple(tuple(slots) for slots in ranks),
        costs=tuple(tuple(slots) for slots in costs),
        global_batches=tuple(global_batches),
        prefix_ids=None if prefix_ids is None else tuple(groups.tolist()),
        prefix_lengths=None if prefix_ids is None else tuple(shared.tolist()),
    )
