"""A transformers model as a function from a laid-out batch to what a loss reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from burnish_losses.logprobs import logprobs_from_hidden
from burnish_losses.topk import topk_logprobs_from_hidden
from burnish_packing.torch import PackedBatch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish_trainer.heads import head_arguments, language_head
from burnish_trainer.images import Images, dummy_image_sum, is_vision_model

OUTPUTS = {"language": "logprobs", "value": "values", "reward": "scores"}  # by head


@dataclass(frozen=True)
class Request:
    """What is asked of a model call."""

    temperature: float = 1.0
    with_entropy: bool = False
    top_k: int | None = None  # instead of log-probs, the most likely tokens of each position


class ScoringModel(nn.Module):
    """Wraps a transformers model with one of the heads of `burnish_trainer.heads`.

    The head is applied inside ``forward``, where FSDP has gathered its weight, and only at the
    positions that score a trained token: logits [T, V] never exist.
    """

    def __init__(self, model: PreTrainedModel, head: str = "language") -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(
        self, batch: PackedBatch, request: Request, images: Images | None = None
    ) -> dict[str, Tensor]:
        """Outputs aligned to the batch's flat tokens [T] or its sequences [N], float32.

        Returns:
            By head: ``logprobs`` [T] of the tokens themselves or ``values`` [T] of the states they
            were chosen in, 0 where nothing is scored; ``scores`` [N] of whole sequences. Of a
            language head, if asked, ``entropies`` [T], and with the column ``teacher_topk_ids``
            the log-probs of these ids as ``student_topk_logprobs`` [T, K]. With ``top_k``, only
            ``topk_ids`` and ``topk_logprobs`` [T, K].
        """
        hidden = self._hidden(batch, images)
        if self.head == "reward":
            return {"scores": self._numbers(hidden[_last_positions(batch)])}
        scored = hidden[batch.score_positions]
        if self.head == "value":
            outputs = {"values": self._numbers(scored)}
        elif request.top_k:
            outputs = self._most_likely(scored, request)
        else:
            outputs = self._scores(scored, batch, request)
        return {name: batch.scatter(values) for name, values in outputs.items()}

    def _hidden(self, batch: PackedBatch, images: Images | None) -> Tensor:
        """The decoder's outputs at all positions, [B * L, D]."""
        decoder: nn.Module = self.model.base_model
        kwargs: dict[str, Any] = {"input_ids": batch.token_ids, "position_ids": batch.position_ids}
        if images is not None:
            kwargs |= images.model_kwargs(batch)
        elif is_vision_model(self.model):
            # Other ranks may have images: the collectives of their vision tower wait for ours, in
            # the same order, before the decoder's and in the backward pass after them. Without
            # other ranks as well, so that the tower's gradient is 0 on any number of them and an
            # optimizer decays its weights on one as on many.
            embeddings = self.model.get_input_embeddings()(kwargs.pop("input_ids"))
            kwargs["inputs_embeds"] = embeddings + 0 * dummy_image_sum(self.model)
        output = decoder(use_cache=False, spans=batch.spans, **kwargs)
        hidden: Tensor = output.last_hidden_state.flatten(0, 1)
        return hidden

    def _scores(self, hidden: Tensor, batch: PackedBatch, request: Request) -> dict[str, Tensor]:
        labels = batch.labels
        teacher_ids = batch.columns.get("teacher_topk_ids")
        if teacher_ids is not None:
            chosen = batch.unpack(teacher_ids)[batch.target_positions]
            labels = torch.cat([labels[:, None], chosen], dim=1)
        tensors, settings = head_arguments(language_head(self.model), hidden)
        settings["temperature"] = request.temperature
        outputs = {}
        if request.with_entropy:
            logprobs, outputs["entropies"] = logprobs_from_hidden(
                *tensors, labels, with_entropy=True, **settings
            )
        else:
            logprobs = logprobs_from_hidden(*tensors, labels, **settings)
        if teacher_ids is not None:
            logprobs, outputs["student_topk_logprobs"] = logprobs[:, 0], logprobs[:, 1:]
        return {"logprobs": logprobs, **outputs}

    def _most_likely(self, hidden: Tensor, request: Request) -> dict[str, Tensor]:
        assert request.top_k is not None
        tensors, settings = head_arguments(language_head(self.model), hidden)
        logprobs, ids = topk_logprobs_from_hidden(
            *tensors, request.top_k, temperature=request.temperature, **settings
        )
        return {"topk_ids": ids, "topk_logprobs": logprobs}

    def _numbers(self, hidden: Tensor) -> Tensor:
        """[M] of a value or reward head, without the rounding of a narrow dtype."""
        head: Any = self.model.score
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias).squeeze(-1)

    def device(self) -> torch.device:
        return next(self.parameters()).device


def _last_positions(batch: PackedBatch) -> Tensor:
    """Position of each sequence's last token in the flattened [B * L], int64 [N]."""
    ends = torch.tensor(batch.lengths, dtype=torch.int64, device=batch.slots.device).cumsum(0)
    return batch.slots[ends - 1]
