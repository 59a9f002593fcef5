"""A causal language model as a function from a laid-out batch to log-probs of its labels."""

from __future__ import annotations

from typing import Any

import torch
from burnish_losses.logprobs import logprobs_from_hidden
from burnish_packing.torch import PackedBatch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ScoringModel(nn.Module):
    """Wraps a transformers causal language model; logits [T, V] never exist.

    The head is applied inside ``forward``, where FSDP has gathered its weight, and only at the
    positions that score a trained token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """Log-probs float32 [M] of ``batch.labels`` [M]."""
        decoder: nn.Module = self.model.base_model
        output = decoder(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            spans=batch.spans,
        )
        hidden = output.last_hidden_state.flatten(0, 1)[batch.score_positions]
        head: Any = self.model.get_output_embeddings()
        return logprobs_from_hidden(
            hidden, head.weight, batch.labels, temperature=temperature, bias=head.bias
        )

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, parameter or its shard); tied tensors once."""
        return [
            (name.removeprefix("model."), parameter) for name, parameter in self.named_parameters()
        ]

    def device(self) -> torch.device:
        return next(self.parameters()).device
