"""Policy-gradient losses, built from a ratio and a surrogate.

The batch is a mapping of columns aligned to tokens, index t about token t:

- token_mask [T] bool, True where the token is trained. What other columns hold elsewhere, NaN
  included, does not matter;
- advantages [T], of the sequence, at each of its tokens;
- old_logprobs [T], of the policy that the ratio is taken against. Optional: without it the current
  ones, detached, which is exact for one update per batch;
- reference_logprobs [T], of the reference, needed for a KL penalty;
- sampled_logprobs [T], of the engine, optional, for the mismatch metrics only;
- cu_seqlens [N+1], needed to aggregate over sequences.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from burnish_losses._columns import select
from burnish_losses.aggregate import Aggregate, token_mean
from burnish_losses.diagnostics import logprob_mismatch
from burnish_losses.kl import bounded_exp, kl_k3
from burnish_losses.reduce import LossOutput, Metric, masked_max, masked_sum


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi(token) / pi_old(token), shapes alike; linear beyond exp(20), see `kl.bounded_exp`."""
    return bounded_exp(logprobs - old_logprobs)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), shapes alike.

    PPO (Schulman et al. 2017, eq. 7), negated to be a loss; separate bounds are DAPO's clip-higher
    (Yu et al. 2025, eq. 8).
    """
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def grpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    aggregate: Aggregate = token_mean,
) -> LossOutput:
    """GRPO's clipped surrogate with an optional KL penalty towards a reference.

    Shao et al. 2024, "DeepSeekMath", eq. 3. That paper's mean is `aggregate=sequence_mean`, where
    a sequence without a trained token counts in neither (see `reduce.count`). The penalty is
    ratio * k3, whose gradient is that of KL(policy || reference), off-policy too (DeepSeek-V3.2,
    "Unbiased KL Estimate"); the first paper's plain k3 has that of KL(reference || policy).

    Args:
        logprobs: [T], of the policy.
        batch: the columns of the module's docstring.
        clip_low, clip_high: >= 0, the ratio is clipped to [1 - clip_low, 1 + clip_high].
        kl_coefficient: >= 0, weight of the penalty.
        aggregate: which mean, of the module `aggregate`.

    Returns:
        Terms in the unit of `aggregate`, and metrics.

    Raises:
        ValueError: a missing column, one of another shape, a mask that is not bool, a setting out
            of range.
    """
    _check_settings(clip_low, clip_high, kl_coefficient)
    required = ("advantages", "reference_logprobs") if kl_coefficient else ("advantages",)
    optional = ("old_logprobs", "reference_logprobs", "sampled_logprobs")
    mask, logprobs, columns = select(logprobs, batch, *required, optional=optional)
    old_logprobs = columns.get("old_logprobs", logprobs.detach())
    advantages = columns["advantages"]

    token_ratio = ratio(logprobs, old_logprobs)
    token_loss = clipped_surrogate(token_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    policy = aggregate(token_loss, batch)
    terms = [policy]
    metrics = {"loss/policy": Metric(policy.weight * policy.sum.detach(), policy.unit, "mean")}
    metrics |= _ratio_metrics(token_ratio.detach(), advantages, mask, clip_low, clip_high)
    metrics |= _token_mean("policy/approximate_kl", kl_k3(old_logprobs, logprobs), mask)
    if "reference_logprobs" in columns:
        kl = kl_k3(logprobs, columns["reference_logprobs"])
        metrics |= _token_mean("policy/kl_reference", kl, mask)
        if kl_coefficient > 0:
            penalty = aggregate(token_ratio * kl, batch)
            terms.append(replace(penalty, weight=kl_coefficient * penalty.weight))
    if "sampled_logprobs" in columns:
        metrics |= logprob_mismatch(logprobs, columns["sampled_logprobs"], mask)
    return LossOutput(tuple(terms), metrics)


def _ratio_metrics(
    ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> dict[str, Metric]:
    """Clip fraction counts the tokens whose gradient the clipping removed."""
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return {
        **_token_mean("policy/clip_fraction", (too_high | too_low).to(ratio.dtype), mask),
        "policy/ratio_max": Metric(masked_max(ratio, mask), None, "max"),
    }


def _token_mean(name: str, values: Tensor, mask: Tensor) -> dict[str, Metric]:
    return {name: Metric(masked_sum(values.detach(), mask), "tokens", "mean")}


def _check_settings(clip_low: float, clip_high: float, kl_coefficient: float) -> None:
    if not all(value >= 0 for value in (clip_low, clip_high, kl_coefficient)):  # NaN is not
        raise ValueError(
            f"clip_low, clip_high and kl_coefficient must be 0 or more, got {clip_low}, "
            f"{clip_high} and {kl_coefficient}."
        )
