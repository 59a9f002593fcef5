"""A plan that was read: first its form, then whether it keeps what `MicroBatchPlan` promises."""

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from burnish_packing._checks import (
    as_integers,
    as_lengths,
    as_prefixes,
    check_fits,
    check_partition,
    check_positive,
    shown,
    split_lists,
)
from burnish_packing._pieces import check_choice
from burnish_packing._plan_arguments import Mode, blocks, checked_grouping

if TYPE_CHECKING:
    from burnish_packing.microbatches import MicroBatchPlan

REMEDY = "plan again"


def read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan as it holds them, tuples for lists; ValueError for another form."""
    read = dict(fields)
    read["lengths"] = tuple(as_lengths(fields["lengths"]).tolist())
    read["dropped"] = tuple(as_integers(fields["dropped"], "dropped").tolist())
    for name in ("prefix_ids", "prefix_lengths"):
        if fields.get(name) is not None:
            read[name] = tuple(as_integers(fields[name], name).tolist())
    ranks, costs = fields["ranks"], fields["costs"]
    for value, name in ((ranks, "ranks"), (costs, "costs")):
        if not isinstance(value, list) or not all(isinstance(slots, list) for slots in value):
            raise ValueError(f"{name} must be a list of lists, got {shown(value)}; {REMEDY}")
    num_slots = [len(slots) for slots in ranks]
    if not ranks or len({*num_slots, *map(len, costs)}) != 1 or len(costs) != len(ranks):
        raise ValueError(
            f"every rank must have the same number of micro-batches, and costs for them, got "
            f"{shown(num_slots)}; {REMEDY}"
        )
    flat, counts = split_lists([slot for slots in ranks for slot in slots], "ranks", REMEDY)
    ends = [0, *itertools.accumulate(counts)]
    indices = flat.tolist()
    slots = [tuple(indices[start:end]) for start, end in itertools.pairwise(ends)]
    read["ranks"] = tuple(
        tuple(slots[rank * num_slots[0] : (rank + 1) * num_slots[0]]) for rank in range(len(ranks))
    )
    read["costs"] = tuple(tuple(map(_cost, slots)) for slots in costs)
    flat, counts = split_lists(fields["global_batches"], "global_batches", REMEDY)
    if set(counts) - {2}:
        raise ValueError(
            f"global_batches must be pairs of slots, got {shown(fields['global_batches'])}; "
            f"{REMEDY}"
        )
    read["global_batches"] = tuple((start, end) for start, end in flat.reshape(-1, 2).tolist())
    return read


def _cost(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"costs must be finite and >= 0, got {shown(value)}; {REMEDY}")
    return value


def check_plan(plan: "MicroBatchPlan") -> None:
    """ValueError when a plan that was read is broken."""
    check_choice(plan.mode, get_args(Mode), "mode")
    check_positive(plan.pad_multiple, "pad_multiple")
    check_positive(plan.sequence_multiple, "sequence_multiple")
    max_tokens: Any = plan.max_tokens
    if max_tokens is not None or plan.mode != "fixed":
        check_positive(max_tokens, "max_tokens")
    size = plan.global_batch_size
    checked_grouping(plan.mode, None, plan.prefix_ids, plan.sequence_multiple, size, False)
    as_prefixes(as_lengths(plan.lengths), plan.prefix_ids, plan.prefix_lengths)
    indices = [i for rank in plan.ranks for slot in rank for i in slot]
    everything = np.array([*indices, *plan.dropped], np.int64)
    check_partition(everything, len(plan.lengths), "ranks and dropped", REMEDY)
    _check_global_batches(plan, len(indices))
    if max_tokens is not None:
        places = itertools.product(range(plan.num_ranks), range(plan.num_micro_batches))
        sizes = [math.prod(plan._shape(rank, slot)) for rank, slot in places]
        check_fits(sizes, max_tokens, "max_tokens", REMEDY)


def _check_global_batches(plan: "MicroBatchPlan", num_kept: int) -> None:
    """ValueError unless the global batches tile the slots and hold the right sequences."""
    parts = blocks(num_kept, plan.global_batch_size)
    ends = [end for _, end in plan.global_batches]
    held = [
        sorted(i for rank in plan.ranks for slot in rank[start:end] for i in slot)
        for start, end in plan.global_batches
    ]
    if (
        list(plan.global_batches) != list(zip([0, *ends], ends, strict=False))
        or (ends[-1] if ends else 0) != plan.num_micro_batches
        or held != [list(range(start, end)) for start, end in parts]
        or plan.dropped != tuple(range(num_kept, len(plan.lengths)))
    ):
        raise ValueError(
            f"global batches must be consecutive slots that hold {plan.global_batch_size} "
            f"consecutive sequences each, the last ones dropped, got slots "
            f"{shown(list(plan.global_batches))}; {REMEDY}"
        )
