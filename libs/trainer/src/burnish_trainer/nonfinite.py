"""Which micro-batch, sequences and columns made a gradient NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from burnish_distributed import RaggedBatch
from burnish_distributed.collectives import all_gather_object, rank

from burnish_trainer.parallelize import full_tensor
from burnish_trainer.passes import Work, micro_batch_loss
from burnish_trainer.scoring import ScoringModel


@dataclass(frozen=True)
class Culprit:
    """A micro-batch whose loss or gradient is not finite."""

    rank: int
    micro_batch: int
    sequences: tuple[int, ...]  # their numbers in the global batch where known, else the rank's
    loss: float
    gradient_norm: float
    columns: tuple[str, ...]  # those that hold NaN or infinity where a token is trained

    def __str__(self) -> str:
        held = f", columns with NaN or infinity: {', '.join(self.columns)}" if self.columns else ""
        return (
            f"micro-batch {self.micro_batch} of rank {self.rank} (sequences "
            f"{', '.join(map(str, self.sequences[:8]))}{', …' if len(self.sequences) > 8 else ''}; "
            f"loss {self.loss:g}, gradient norm {self.gradient_norm:g}{held})"
        )


def find_culprits(model: ScoringModel, work: Work) -> list[Culprit]:
    """Those of all ranks: every micro-batch runs once more, forward and backward, alone.

    Gradients are left at zero.
    """
    culprits = []
    ids = work.batch.sequence_columns.get("sequence_ids", np.arange(work.batch.num_sequences))
    for k, indices in enumerate(work.micro_batches):
        model.zero_grad()
        loss, _ = micro_batch_loss(model, work, indices)
        loss.backward()
        value = float(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(full_tensor(torch.nn.utils.get_total_norm(grads)))
        if not is_finite(norm, value):
            numbers = tuple(int(ids[i]) for i in indices)
            columns = non_finite_columns(work.batch.select(indices))
            culprits.append(Culprit(rank(), k, numbers, value, norm, columns))
    model.zero_grad()
    found = [culprit for part in all_gather_object(culprits) for culprit in part]
    # Gradients are summed over ranks, so that all of them see one rank's NaN.
    own = [c for c in found if not is_finite(c.loss) or c.columns]
    return own or found


def non_finite_columns(batch: RaggedBatch) -> tuple[str, ...]:
    """Columns of numbers that are NaN or infinite at a trained token, or in a sequence."""
    mask = batch.token_columns.get("token_mask")
    found = []
    for name, column in batch.token_columns.items():
        values = column if mask is None else column[mask.astype(bool)]
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            found.append(name)
    for name, column in batch.sequence_columns.items():
        if np.issubdtype(column.dtype, np.floating) and not np.isfinite(column).all():
            found.append(name)
    return tuple(found)


def describe(culprits: Sequence[Culprit], step: int) -> str:
    """The message of `NonFiniteGradientError`."""
    told = "; ".join(map(str, culprits[:4])) or (
        "no micro-batch alone: the sum of all is too large for its dtype"
    )
    more = f"; and {len(culprits) - 4} more" if len(culprits) > 4 else ""
    return (
        f"loss and gradients must be finite, got others in step {step} from {told}{more}. The "
        "weights are as before the step; look at these sequences' rewards, advantages and log-probs"
    )


def is_finite(*numbers: float) -> bool:
    return all(map(math.isfinite, numbers))
