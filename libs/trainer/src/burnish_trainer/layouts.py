"""From a ragged micro-batch to one model call, and the columns that a loss reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from burnish_distributed import RaggedBatch
from burnish_packing.torch import PackedBatch, empty_batch, pack_sequences, pad_sequences
from torch import Tensor

from burnish_trainer.images import POSITIONS

MicroBatches = Sequence[Sequence[int]]
LAYOUTS = ("packed", "padded", "fixed")
PREFIX_COLUMNS = ("prefix_ids", "prefix_lengths")


def check_plan(batch: RaggedBatch, micro_batches: MicroBatches, layout: str) -> None:
    """ValueError unless each sequence is planned once, in a layout that is known."""
    planned = sorted(i for indices in micro_batches for i in indices)
    if not micro_batches or planned != list(range(batch.num_sequences)):
        raise ValueError(
            f"micro-batches must name each of the {batch.num_sequences} sequences exactly once, "
            f"got {len(planned)} entries for {len(set(planned))}; make them from this batch"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def lay_out(batch: RaggedBatch, layout: str, rope_positions: Tensor | None = None) -> PackedBatch:
    """One micro-batch as one model call; prefixes that columns name are stored once.

    Args:
        batch: with ``token_ids`` and, unless nothing is scored, ``token_mask``.
        layout: ``packed`` into one row, or ``padded`` or ``fixed``: a row for each sequence.
        rope_positions: int64 [T, 3] of a vision-language model.
    """
    if batch.num_sequences == 0:
        return empty_batch()
    token_ids = torch.tensor(batch.token_columns["token_ids"], dtype=torch.int64)
    mask = batch.token_columns.get("token_mask", np.zeros(len(token_ids), dtype=bool))
    columns = {}
    if rope_positions is not None:
        columns[POSITIONS] = rope_positions
    if "teacher_topk_ids" in batch.token_columns:
        columns["teacher_topk_ids"] = torch.tensor(batch.token_columns["teacher_topk_ids"])
    token_mask = torch.tensor(mask, dtype=torch.bool)
    if layout != "packed":
        return pad_sequences(token_ids, batch.lengths, token_mask=token_mask, columns=columns)
    ids, lengths = (batch.sequence_columns.get(name) for name in PREFIX_COLUMNS)
    return pack_sequences(
        token_ids,
        batch.lengths,
        token_mask=token_mask,
        columns=columns,
        prefix_ids=ids,
        prefix_lengths=lengths,
    )


def loss_columns(batch: RaggedBatch, device: torch.device) -> dict[str, Tensor]:
    """Token columns [T, ...], sequence columns [N, ...] and ``cu_seqlens`` int32 [N+1] as tensors.

    What only the layout reads, images and prefixes, stays out.
    """
    columns = {name: torch.tensor(column) for name, column in batch.token_columns.items()}
    for name, column in batch.sequence_columns.items():
        if column.dtype != object and name not in PREFIX_COLUMNS:
            columns[name] = torch.tensor(column)
    columns["cu_seqlens"] = torch.tensor(batch.offsets, dtype=torch.int32)
    return {name: column.to(device) for name, column in columns.items()}
