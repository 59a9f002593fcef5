"""What everything above the trainer knows of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch
from burnish_losses.reduce import LossOutput

Head = Literal["language", "value", "reward"]
MicroBatches = Sequence[Sequence[int]]

# loss_fn(output, columns) -> terms as sums with their units, and metrics. The output is that of the
# policy's head: log-probs [T], values [T] or scores [N]. Columns are the micro-batch's as tensors,
# those of tokens [T, ...], those of sequences [N], and ``cu_seqlens`` int32 [N+1].
LossFunction = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], LossOutput]


class NonFiniteGradientError(RuntimeError):
    """A gradient is NaN or infinite. The weights and the optimizer are as before the step."""


class Policy(Protocol):
    """One rank's view of a model. Every method is called on all ranks at once.

    ``batch`` holds this rank's sequences with the columns ``token_ids`` (int64) and ``token_mask``
    (bool, True where a token is trained; a reward head reads none); ``micro_batches[k]`` lists the
    sequences of its k-th micro-batch, ``()`` is an explicit empty slot, and all ranks have equally
    many. ``layout`` is ``packed``, shared prefixes stored once where the batch has the sequence
    columns ``prefix_ids`` and ``prefix_lengths``; or ``padded`` or ``fixed``, rows of their own.
    ``temperature`` divides the logits, as it did when the tokens were sampled.
    """

    def logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """float32 [T] natural log-probs aligned to tokens; 0 where ``token_mask`` is False."""
        ...

    def reference_logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """The same under the weights the policy started from."""
        ...

    def topk_logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        k: int,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The ``k`` likeliest tokens in the place of each: ids and log-probs, [T, k] both.

        Log-probs are those of the full distribution, the largest first; 0 where ``token_mask`` is
        False.
        """
        ...

    def values(
        self, batch: RaggedBatch, micro_batches: MicroBatches, *, layout: str = "packed"
    ) -> npt.NDArray[np.float32]:
        """float32 [T] of a value head: of the state in which token t is chosen; 0 where masked."""
        ...

    def scores(
        self, batch: RaggedBatch, micro_batches: MicroBatches, *, layout: str = "packed"
    ) -> npt.NDArray[np.float32]:
        """float32 [N] of a reward head, of each sequence at its last token."""
        ...

    def train_step(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step on the whole global batch; returns metrics of the whole batch."""
        ...

    def evaluate(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """The loss and metrics of the whole global batch; nothing is changed."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) pairs, adapters merged; tied tensors once."""
        ...

    def offload(self) -> None:
        """Free the accelerator: weights and optimizer go to the CPU's memory."""
        ...

    def onload(self) -> None:
        """Bring back what `offload` took away; the other methods need it there."""
        ...

    def save(self, directory: str | Path, state: Mapping[str, Any]) -> None:
        """Write a whole checkpoint to ``directory``, which appears only once it is complete."""
        ...

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Take weights and optimizer from a checkpoint; returns the ``state`` saved with it."""
        ...
