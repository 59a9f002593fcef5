"""Log-probs of labels, and their gradients, of one chunk of logits: in place, on any shard.

With t = softcap(logits) / temperature, of which the tokens outside the support set are -inf, and
p = softmax(t):

    log p(label) = t(label) - log sum exp t        d / dt = onehot(label) - p
    entropy H = -sum p log p                       d / dt = -p (log p + H)

Shape legend: m rows of a chunk, K labels each, V vocabulary or a rank's part of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish_losses.support import support_threshold
from burnish_losses.vocab_parallel import all_max, all_sum

# exp of it is 0 in every dtype, and 0 times it is 0, which 0 times -inf is not.
LOWEST = -1e4
CHUNK_BYTES = 2**29


class Scoring(NamedTuple):
    """How logits become a distribution, and which part of the vocabulary they are."""

    temperature: float
    softcap: float | None
    top_k: int | None
    top_p: float | None
    group: ProcessGroup | None
    vocab_start: int

    @property
    def has_support(self) -> bool:
        return self.top_k is not None or self.top_p is not None


class Scores(NamedTuple):
    """Of a chunk; all but the log-probs is what the gradient needs again."""

    logprobs: Tensor  # [m, K]
    log_sum: Tensor  # [m, 1], of exp t
    threshold: Tensor | None  # [m, 1], of the support set
    entropy: Tensor | None  # [m, 1]


def softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def rows_per_chunk(chunk_tokens: int | None, vocabulary_size: int, like: Tensor) -> int:
    """Those asked for, or as many as fit CHUNK_BYTES; by the largest shard, so alike on all."""
    row_bytes = vocabulary_size * (8 if like.dtype == torch.float64 else 4)
    return chunk_tokens or max(1, CHUNK_BYTES // max(1, row_bytes))


def chunk_scores(
    logits: Tensor, labels: Tensor, scoring: Scoring, with_entropy: bool
) -> tuple[Scores, Tensor]:
    """Of logits [m, V] and labels [m, K], and a number for each row, [m, 1].

    Without entropy, p times that number is left where the logits were.
    """
    scale_(logits, scoring)
    columns, own = _own_columns(labels, logits.shape[1], scoring)
    threshold = None
    if scoring.has_support:
        threshold = support_threshold(logits, scoring.top_k, scoring.top_p, scoring.group)
        _exclude_(logits, threshold, columns, own)
    largest = all_max(logits.amax(-1, keepdim=True), scoring.group)
    chosen = torch.where(own, logits.sub_(largest).gather(-1, columns), 0.0)
    if with_entropy:
        weights = logits.clamp_(min=LOWEST).exp()
        sums = [weights.sum(-1, keepdim=True), weights.mul_(logits).sum(-1, keepdim=True)]
    else:
        sums = [logits.exp_().sum(-1, keepdim=True)]
    packed = all_sum(torch.cat([chosen, *sums], -1), scoring.group)
    chosen, *sums = packed.split([labels.shape[1], *[1] * len(sums)], -1)
    log_sum = sums[0].log()
    entropy = log_sum - sums[1] / sums[0] if with_entropy else None
    return Scores(chosen - log_sum, largest + log_sum, threshold, entropy), sums[0]


def chunk_gradient_(
    logits: Tensor,
    labels: Tensor,
    scores: Scores,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    scoring: Scoring,
) -> Tensor:
    """The gradient of the logits [m, V], in their place, from those of what `Scores` holds.

    Nothing is communicated: log-sum, threshold and entropy are those of all ranks already.
    """
    scale_(logits, scoring)
    slope = None
    if scoring.softcap is not None:  # 1 - tanh^2, and 0 where a token is excluded
        slope = (logits * (scoring.temperature / scoring.softcap)).square_().neg_().add_(1)
        slope.clamp_(min=0)
    columns, own = _own_columns(labels, logits.shape[1], scoring)
    if scores.threshold is not None:
        _exclude_(logits, scores.threshold, columns, own)
    logits.sub_(scores.log_sum)
    grad_logprobs = grad_logprobs / scoring.temperature
    summed = grad_logprobs.sum(-1, keepdim=True)
    if grad_entropy is None or scores.entropy is None:
        gradient = logits.exp_().mul_(-summed)
    else:
        grad_entropy = grad_entropy / scoring.temperature
        probs = logits.clamp_(min=LOWEST).exp()
        gradient = logits.add_(scores.entropy).mul_(-grad_entropy).sub_(summed).mul_(probs)
    gradient.scatter_add_(-1, columns, torch.where(own, grad_logprobs, 0.0))
    return gradient if slope is None else gradient.mul_(slope)


def subtract_labels_(probs: Tensor, labels: Tensor, scoring: Scoring) -> Tensor:
    """p - onehot(label), in place: minus the gradient of log p(label) for t; labels [m, 1]."""
    columns, own = _own_columns(labels, probs.shape[1], scoring)
    return probs.scatter_add_(-1, columns, -own.to(probs.dtype))


def scale_(logits: Tensor, scoring: Scoring) -> Tensor:
    """Softcap, then temperature, in place; what is excluded stays excluded."""
    if scoring.softcap is not None:
        excluded = logits == -torch.inf
        logits.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        logits.masked_fill_(excluded, -torch.inf)
    return logits if scoring.temperature == 1.0 else logits.div_(scoring.temperature)


def _own_columns(labels: Tensor, num_columns: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """The labels' columns in this shard, and which of them are in it; column 0 for the others."""
    if scoring.group is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    columns = labels - scoring.vocab_start
    own = (columns >= 0) & (columns < num_columns)
    return torch.where(own, columns, 0), own


def _exclude_(logits: Tensor, threshold: Tensor, columns: Tensor, own: Tensor) -> None:
    """-inf at all that is below the threshold, except the labels."""
    outside = logits < threshold
    rows, which = own.nonzero(as_tuple=True)
    outside[rows, columns[rows, which]] = False
    logits.masked_fill_(outside, -torch.inf)
