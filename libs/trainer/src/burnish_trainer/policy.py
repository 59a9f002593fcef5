"""What everything above the trainer knows of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch
from burnish_losses.reduce import LossOutput

# loss_fn(logprobs [T], columns) -> terms as sums with their units, and metrics. Columns are the
# micro-batch's token columns as tensors [T], and ``cu_seqlens`` int32 [N+1].
LossFunction = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], LossOutput]


class NonFiniteGradientError(RuntimeError):
    """A gradient is NaN or infinite. The weights and the optimizer are as before the step."""


class Policy(Protocol):
    """One rank's view of a model that is trained. Every method is called on all ranks at once.

    ``batch`` holds this rank's sequences with the columns ``token_ids`` (int64) and
    ``token_mask`` (bool, True where a token is trained); ``micro_batches[k]`` lists the sequences
    of its k-th micro-batch, ``()`` is an explicit empty slot, and all ranks have equally many.
    """

    def logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """float32 [T] natural log-probs aligned to tokens; 0 where ``token_mask`` is False."""
        ...

    def reference_logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """The same under the weights the policy started from."""
        ...

    def train_step(
        self,
        batch: RaggedBatch,
        micro_batches: Sequence[Sequence[int]],
        loss_fn: LossFunction,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on the whole global batch; returns metrics of the whole batch."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) pairs; tied tensors once."""
        ...

    def save(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Write a whole checkpoint to ``directory``, which appears only once it is complete."""
        ...

    def load(self, directory: Path) -> dict[str, Any]:
        """Take weights and optimizer from a checkpoint; returns the ``state`` saved with it."""
        ...
