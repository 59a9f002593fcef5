"""Encoded rows as what a policy is given: a ragged batch, and the plan of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from burnish_distributed import RaggedBatch
from burnish_packing import MicroBatchPlan, plan_micro_batches

from burnish_apps.supervised.config import Training

TOKEN_COLUMNS = {"token_ids": np.int64, "token_mask": np.bool_, "token_weights": np.float32}


def make_batch(
    sequences: Sequence[Mapping[str, Any]],
    sequence_columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]] | None = None,
) -> RaggedBatch:
    """Encoded sequences as a batch.

    Args:
        sequences: with the columns of `burnish_data.Encoded`, and for images those of
            `burnish_data.encode_images`.
        sequence_columns: one value a sequence. ``pair_ids`` keeps sequences with equal ids in one
            micro-batch; ``prefix_ids`` and ``prefix_lengths`` store a shared prompt once.
    """
    names = [name for name in TOKEN_COLUMNS if name in sequences[0]]
    columns = {**(sequence_columns or {}), **image_columns(sequences)}
    return RaggedBatch.from_rows(
        [
            {name: np.asarray(row[name], dtype=TOKEN_COLUMNS[name]) for name in names}
            for row in sequences
        ],
        columns,
    )


def image_columns(sequences: Sequence[Mapping[str, Any]]) -> dict[str, npt.NDArray[Any]]:
    """``pixel_values`` and ``image_grid_thw``, an array a sequence; none without any image."""
    if not any("image_grid_thw" in row for row in sequences):
        return {}
    pixels, grids = (np.empty(len(sequences), dtype=object) for _ in range(2))
    for i, row in enumerate(sequences):
        pixels[i] = np.asarray(row.get("pixel_values", np.zeros((0, 0))), dtype=np.float32)
        grids[i] = np.asarray(row.get("image_grid_thw", np.zeros((0, 3))), dtype=np.int64)
    return {"pixel_values": pixels, "image_grid_thw": grids}


def plan(batch: RaggedBatch, training: Training, num_ranks: int) -> MicroBatchPlan:
    """Micro-batches of a step for every rank; what belongs together stays so."""
    columns = batch.sequence_columns
    together: dict[str, Any] = {"units": columns.get("pair_ids")}
    if training.packing == "packed" and "prefix_ids" in columns:
        together = {name: columns[name] for name in ("prefix_ids", "prefix_lengths")}
    return plan_micro_batches(
        batch.lengths,
        max_tokens=training.max_tokens,
        num_ranks=num_ranks,
        mode=training.packing,
        micro_batch_size=training.micro_batch_size,
        **together,
    )
