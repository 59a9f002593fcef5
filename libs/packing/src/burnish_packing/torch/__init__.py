"""Tensors for one model call: sequences packed or padded, and attention that keeps them apart.

Needs torch (`pip install "burnish-packing[torch]"`); the rest of the library does not. The modules
`hugging_face` and `megatron` serve models of transformers and Megatron Core.
"""

from burnish_packing.layout import Span
from burnish_packing.torch.attention import Backend, attention_forward, packed_attention
from burnish_packing.torch.attention_mask import block_diagonal_mask, flex_block_mask
from burnish_packing.torch.batch import PackedBatch
from burnish_packing.torch.collate import empty_batch, lay_out, pack_sequences, pad_sequences
from burnish_packing.torch.loader import PlannedDataset, TokenBudgetBatchSampler
from burnish_packing.torch.rows import HuggingFaceCollator, PackingCollator
from burnish_packing.torch.varlen import VarlenArguments, varlen_arguments

__all__ = [
    "Backend",
    "HuggingFaceCollator",
    "PackedBatch",
    "PackingCollator",
    "PlannedDataset",
    "Span",
    "TokenBudgetBatchSampler",
    "VarlenArguments",
    "attention_forward",
    "block_diagonal_mask",
    "empty_batch",
    "flex_block_mask",
    "lay_out",
    "pack_sequences",
    "packed_attention",
    "pad_sequences",
    "varlen_arguments",
]
