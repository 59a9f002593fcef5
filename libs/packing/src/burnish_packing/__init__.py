"""Sequence packing and balanced micro-batches: lengths in, plan out. Numpy only.

The tensors of a model call and attention over packs are in `burnish_packing.torch`.
"""

from burnish_packing.bounds import lower_bound, lp_bound
from burnish_packing.context_parallel import (
    context_parallel_multiple,
    merge_positions,
    shard_lengths,
    zigzag_positions,
)
from burnish_packing.costs import flops_cost, flops_cost_from_config, token_cost
from burnish_packing.layout import (
    PackLayout,
    Span,
    cu_seqlens,
    pack_layout,
    position_ids,
    sequence_ids,
)
from burnish_packing.metrics import fill_ratio, padding_ratio, padding_to_longest, rank_imbalance
from burnish_packing.microbatches import MicroBatch, MicroBatchPlan, plan_micro_batches
from burnish_packing.packers import Packing, pack
from burnish_packing.streaming import StreamPacker, pack_stream

__version__ = "0.2.1"

__all__ = [
    "MicroBatch",
    "MicroBatchPlan",
    "PackLayout",
    "Packing",
    "Span",
    "StreamPacker",
    "__version__",
    "context_parallel_multiple",
    "cu_seqlens",
    "fill_ratio",
    "flops_cost",
    "flops_cost_from_config",
    "lower_bound",
    "lp_bound",
    "merge_positions",
    "pack",
    "pack_layout",
    "pack_stream",
    "padding_ratio",
    "padding_to_longest",
    "plan_micro_batches",
    "position_ids",
    "rank_imbalance",
    "sequence_ids",
    "shard_lengths",
    "token_cost",
    "zigzag_positions",
]
