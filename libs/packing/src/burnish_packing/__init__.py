"""Sequence packing and balanced micro-batches: lengths in, plan out. Numpy only.

The tensors of a model call and attention over packs are in `burnish_packing.torch`.
"""

from burnish_packing.bounds import lower_bound, lp_bound
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

__version__ = "0.1.0"

__all__ = [
    "MicroBatch",
    "MicroBatchPlan",
    "PackLayout",
    "Packing",
    "Span",
    "__version__",
    "cu_seqlens",
    "fill_ratio",
    "flops_cost",
    "flops_cost_from_config",
    "lower_bound",
    "lp_bound",
    "pack",
    "pack_layout",
    "padding_ratio",
    "padding_to_longest",
    "plan_micro_batches",
    "position_ids",
    "rank_imbalance",
    "sequence_ids",
    "token_cost",
]
