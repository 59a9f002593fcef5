"""What to watch: engine against trainer, how far an update went, what the weights leave.

Each function returns metrics with their rule of reduction; a number that is no mean of tokens is
made from finished means (`effective_sample_size`), never averaged itself.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish_losses._columns import check_mask, check_tokens, column, trained_mask, widened
from burnish_losses.kl import kl_k3
from burnish_losses.reduce import Metric, masked_max, masked_sum, sums_and_lengths


def logprob_mismatch(
    logprobs: Tensor, sampled_logprobs: Tensor, batch: Mapping[str, Tensor]
) -> dict[str, Metric]:
    """Differences d = logprobs - sampled_logprobs [T] at the trained tokens.

    Same weights in engine and trainer leave only rounding: about 1e-5 in float32. More means
    stale weights, another temperature, another chat template or another attention mask.

    Args:
        batch: with token_mask [T] and cu_seqlens [N+1].

    Returns:
        mismatch/mean_abs: mean `|d|`, nats; mismatch/max_abs: largest `|d|`;
        mismatch/mean_ratio: mean `exp(|d|)`, the factor between the probabilities (1 is equal);
        mismatch/mean_sequence_ratio, mismatch/max_sequence_ratio: mean and largest, over
        sequences, of each one's mean `exp(|d|)` over its tokens. One broken sequence among many
        shows in the largest. These are NeMo RL's multiplicative probability errors.
        mismatch/kl: mean `exp(d) - d - 1`, the estimate k3 of KL(engine || trainer).

    Raises:
        ValueError: a missing column, shapes that do not match, a mask that is not bool.
    """
    check_tokens(logprobs=logprobs, sampled_logprobs=sampled_logprobs)
    mask, cu_seqlens = trained_mask(batch, like=logprobs), column(batch, "cu_seqlens")
    signed = torch.where(mask, widened(logprobs) - widened(sampled_logprobs), 0.0).detach()
    difference = signed.abs()
    factors = torch.where(mask, difference.exp(), 0.0)
    sums, lengths = sums_and_lengths(factors, mask, cu_seqlens)
    per_sequence = sums / lengths.clamp(min=1)
    kl = kl_k3(torch.zeros_like(signed), signed)
    return {
        "mismatch/mean_abs": Metric(difference.sum(), "tokens", "mean"),
        "mismatch/max_abs": Metric(masked_max(difference, mask), None, "max"),
        "mismatch/mean_ratio": Metric(factors.sum(), "tokens", "mean"),
        "mismatch/mean_sequence_ratio": Metric(per_sequence.sum(), "sequences", "mean"),
        "mismatch/max_sequence_ratio": Metric(masked_max(per_sequence, lengths > 0), None, "max"),
        "mismatch/kl": Metric(masked_sum(kl, mask), "tokens", "mean"),
    }


def clip_fractions(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> dict[str, Metric]:
    """Shares of the trained tokens whose gradient `clipped_surrogate` removed; all [T].

    Returns:
        policy/clip_fraction_high: where A > 0 and the ratio is above 1 + clip_high;
        policy/clip_fraction_low: where A < 0 and it is below 1 - clip_low;
        policy/clip_fraction: the two together. With a dual_clip, policy/clip_fraction_dual: where
        A < 0 and it is above dual_clip.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool.
    """
    check_tokens(ratio=ratio, advantages=advantages, mask=mask)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    fractions = {"": high | low, "_high": high, "_low": low}
    if dual_clip is not None:
        fractions["_dual"] = (advantages < 0) & (ratio > dual_clip)
    metrics: dict[str, Metric] = {}
    for name, clipped in fractions.items():
        metrics |= token_mean_metric(f"policy/clip_fraction{name}", clipped.to(ratio.dtype), mask)
    return metrics


def weight_clip_fractions(
    ratio: Tensor, _advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, Metric]:
    """Shares of the trained tokens whose weight `cispo_surrogate` clipped, whatever their sign.

    Shapes, errors: as in `clip_fractions`.
    """
    check_tokens(ratio=ratio, advantages=_advantages, mask=mask)
    high, low = ratio > 1 + clip_high, ratio < 1 - clip_low
    return {
        **token_mean_metric("policy/clip_fraction_high", high.to(ratio.dtype), mask),
        **token_mean_metric("policy/clip_fraction_low", low.to(ratio.dtype), mask),
    }


def weight_moments(name: str, weights: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Of weights [T] at the trained tokens: NAME/mean, NAME/mean_square, NAME/zero_fraction.

    The first two are what `effective_sample_size` takes. Errors: as in `clip_fractions`.
    """
    check_mask(mask, "mask")
    check_tokens(weights=weights, mask=mask)
    weights = widened(torch.where(mask, weights.detach(), 0.0))
    return {
        **token_mean_metric(f"{name}/mean", weights, mask),
        **token_mean_metric(f"{name}/mean_square", weights.square(), mask),
        **token_mean_metric(f"{name}/zero_fraction", (weights == 0).to(weights.dtype), mask),
    }


def effective_sample_size(metrics: Mapping[str, float], name: str = "importance") -> float:
    """(sum w)^2 / (n sum w^2) in [0, 1]: the share of equally weighted tokens worth as much.

    Kong 1992, over n. It is no mean of parts of a batch, so it is computed from the finished
    metrics of `weight_moments`: the squared mean over the mean square.

    Args:
        metrics: of `reduce.finalize`, with NAME/mean and NAME/mean_square.

    Returns:
        0 if all weights are 0, NaN if there is none.
    """
    mean, mean_square = metrics[f"{name}/mean"], metrics[f"{name}/mean_square"]
    return 0.0 if mean_square == 0 else mean**2 / mean_square


def token_mean_metric(name: str, values: Tensor, mask: Tensor) -> dict[str, Metric]:
    """The mean of values [T] over the trained tokens, as one metric of that name."""
    return {name: Metric(masked_sum(values.detach(), mask), "tokens", "mean")}
