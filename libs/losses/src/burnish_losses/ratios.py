"""Ratios of the policy's probability to the old one's: of tokens, of sequences.

A ratio is a function `(logprobs [T], old_logprobs [T], batch) -> [T]`, differentiable in logprobs.
A level is a function `(log_ratio [T], batch) -> [T]` that says over what log-ratios are put
together; what is of a sequence stands at each of its tokens.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from burnish_losses._columns import check_tokens, column, trained_mask
from burnish_losses.kl import bounded_exp
from burnish_losses.reduce import sums_and_lengths

Batch = Mapping[str, Tensor]
Ratio = Callable[[Tensor, Tensor, Batch], Tensor]
Level = Callable[[Tensor, Batch], Tensor]


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, _batch: Batch | None = None) -> Tensor:
    """pi(token) / pi_old(token) [T]; linear beyond exp(20), see `kl.bounded_exp`."""
    check_tokens(logprobs=logprobs, old_logprobs=old_logprobs)
    return bounded_exp(logprobs - old_logprobs)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> Tensor:
    """`(pi(y) / pi_old(y))^(1 / |y|)` of each sequence, at each of its tokens [T].

    GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", sec. 4.1). `|y|` is the
    number of trained tokens, so the ratio is one number per sequence and does not grow with its
    length; each trained token receives its `1 / |y|` of the gradient.
    """
    check_tokens(logprobs=logprobs, old_logprobs=old_logprobs)
    return bounded_exp(sequence_geometric_mean(logprobs - old_logprobs, batch))


def sequence_token_ratio(logprobs: Tensor, old_logprobs: Tensor, batch: Batch) -> Tensor:
    """The value of `sequence_ratio` with the gradient of each token's own log-prob [T].

    GSPO-token (Zheng et al. 2025, sec. 4.3): sg[s] * pi / sg[pi], sg being stop-gradient. With the
    same advantage at all tokens of a sequence and `sequence_mean` it has the gradient of GSPO; it
    is made for advantages that differ between tokens.
    """
    check_tokens(logprobs=logprobs, old_logprobs=old_logprobs)
    ratio = sequence_ratio(logprobs.detach(), old_logprobs, batch)
    return ratio * bounded_exp(logprobs - logprobs.detach())


def token_level(log_ratio: Tensor, _batch: Batch | None = None) -> Tensor:
    """Each token's own [T]."""
    return log_ratio


def sequence_product(log_ratio: Tensor, batch: Batch) -> Tensor:
    """Sum over the sequence's trained tokens [T], log of the ratio of the whole sequence."""
    sums, _ = _sums_and_lengths(log_ratio, batch)
    return _at_tokens(sums, batch)


def sequence_geometric_mean(log_ratio: Tensor, batch: Batch) -> Tensor:
    """Mean over the sequence's trained tokens [T]; 0 where none is trained."""
    sums, lengths = _sums_and_lengths(log_ratio, batch)
    return _at_tokens(sums / lengths.clamp(min=1), batch)


def _sums_and_lengths(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    mask = trained_mask(batch, like=values)
    return sums_and_lengths(values, mask, column(batch, "cu_seqlens"))


def _at_tokens(values: Tensor, batch: Batch) -> Tensor:
    """`to_tokens` of a batch whose cu_seqlens have been met."""
    lengths = batch["cu_seqlens"].long().diff()
    return values.repeat_interleave(lengths, output_size=len(batch["token_mask"]))
