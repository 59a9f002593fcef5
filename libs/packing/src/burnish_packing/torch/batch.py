"""What one model call takes, and the way back from its scores to the tokens of the sequences."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Who sees whom in a pack: positions [start, end) are queries that see themselves causally.

    Before that they see every key in [prefix_start, prefix_end), the prefix they share with others.
    """

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0


@dataclass(frozen=True)
class ModelBatch:
    """The sequences of one micro-batch, laid out for one model call of [B, L] positions.

    "Flat" means the caller's order: sequences concatenated, sum(lengths) tokens, index t about
    token t. The score of flat token `target_positions[m]` is that of `labels[m]` under the output
    of the model at `score_positions[m]`, the position before it. Nothing else is scored: not the
    first token of a sequence, not masked tokens, not padding.
    """

    token_ids: Tensor  # int64 [B, L]; packed: B = 1
    position_ids: Tensor  # int64 [B, L]; restart at every sequence, continue after a shared prefix
    spans: tuple[Span, ...] | None  # packed: they tile [0, L) in order; None: right-padded rows
    score_positions: Tensor  # int64 [M], into the flattened [B * L]
    labels: Tensor  # int64 [M]
    target_positions: Tensor  # int64 [M], into the flat tokens, ascending
    lengths: tuple[int, ...]  # tokens of each sequence, padding left out

    def scatter(self, scored: Tensor) -> Tensor:
        """Put scores [M] back at their tokens: [sum(lengths)], 0 elsewhere; differentiable."""
        if scored.shape != self.labels.shape:
            raise ValueError(
                f"scored must have the shape of labels, {tuple(self.labels.shape)}, "
                f"got {tuple(scored.shape)}; score the hidden states at score_positions"
            )
        return scored.new_zeros(sum(self.lengths)).index_copy(0, self.target_positions, scored)

    def to(self, device: torch.device | str) -> "ModelBatch":
        """The same batch with its tensors on `device`."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            score_positions=self.score_positions.to(device),
            labels=self.labels.to(device),
            target_positions=self.target_positions.to(device),
        )
