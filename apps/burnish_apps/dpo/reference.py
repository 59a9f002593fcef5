"""Log-probs of the reference beside a batch's own: computed in every step, or once for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import rich.progress
from burnish_distributed import RaggedBatch, rank
from burnish_trainer.policy_group import PolicyGroup

from burnish_apps.dpo.config import Training
from burnish_apps.supervised.batches import plan
from burnish_apps.supervised.data import EncodedRows
from burnish_apps.supervised.pairs import pair_batch

COLUMN = "reference_logprobs"


def on_the_fly(policy: PolicyGroup, batch: RaggedBatch, batch_plan: Any) -> RaggedBatch:
    """In the micro-batches in which the policy computes its own: at step 0 both are the same."""
    return batch.with_token_column(COLUMN, policy.reference_logprobs(batch, batch_plan))


class Cache:
    """Those of all rows, by the row's number."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._known: dict[int, npt.NDArray[np.float32]] = {}

    def fill(self, policy: PolicyGroup, parts: Sequence[EncodedRows]) -> None:
        """Compute all, with the weights that the policy has: before its first step.

        The rows are taken in their order, so that a run that is resumed computes the same numbers.
        With adapters the reference is the model without them.
        """
        is_adapted = self._training.lora is not None
        logprobs_of = policy.reference_logprobs if is_adapted else policy.logprobs
        size = self._training.batch_size
        starts = [(part, i) for part in parts for i in range(0, len(part.rows), size)]
        for part, i in rich.progress.track(
            starts, "reference log-probs", disable=rank() > 0, transient=True
        ):
            chosen = range(i, min(i + size, len(part.rows)))
            batch = pair_batch([part.rows[j] for j in chosen])
            logprobs = logprobs_of(batch, plan(batch, self._training, policy.num_ranks))
            ends = batch.offsets[2::2]  # of pairs
            pairs = np.split(logprobs, ends[:-1])
            rows = batch.sequence_columns["row"][::2].tolist()
            self._known |= dict(zip(rows, pairs, strict=True))

    def add(self, _policy: PolicyGroup, batch: RaggedBatch, _plan: Any) -> RaggedBatch:
        """The batch with the column ``reference_logprobs``."""
        rows = batch.sequence_columns["row"][::2].tolist()
        return batch.with_token_column(COLUMN, np.concatenate([self._known[row] for row in rows]))
