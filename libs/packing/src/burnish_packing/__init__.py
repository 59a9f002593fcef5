"""Sequence packing and balanced micro-batches: lengths in, plan out. Numpy only.

The tensors of a model call and attention over packs are in `burnish_packing.torch`.
"""

from burnish_packing.layout import cu_seqlens, position_ids, sequence_ids
from burnish_packing.metrics import fill_ratio, padding_ratio, rank_imbalance
from burnish_packing.microbatches import MicroBatchPlan, plan_micro_batches, token_cost
from burnish_packing.packers import Packing, lower_bound, pack

__version__ = "0.1.0"

__all__ = [
    "MicroBatchPlan",
    "Packing",
    "__version__",
    "cu_seqlens",
    "fill_ratio",
    "lower_bound",
    "pack",
    "padding_ratio",
    "plan_micro_batches",
    "position_ids",
    "rank_imbalance",
    "sequence_ids",
    "token_cost",
]
