"""Tensors for one model call: sequences packed or padded, and attention that keeps them apart.

Needs torch (`pip install "burnish-packing[torch]"`); the rest of the library does not.
"""

from burnish_packing.layout import Span
from burnish_packing.torch.attention_mask import attention_forward, packed_attention
from burnish_packing.torch.batch import PackedBatch
from burnish_packing.torch.collate import empty_batch, pack_sequences, pad_sequences

__all__ = [
    "PackedBatch",
    "Span",
    "attention_forward",
    "empty_batch",
    "pack_sequences",
    "packed_attention",
    "pad_sequences",
]
