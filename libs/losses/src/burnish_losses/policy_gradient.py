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
from typing import Literal

import torch
from torch import Tensor

from burnish_losses.diagnostics import logprob_mismatch
from burnish_losses.kl import bounded_exp, kl_k3
from burnish_losses.reduce import (
    LossOutput,
    Metric,
    Term,
    Unit,
    check_mask,
    masked_max,
    masked_sum,
    sequence_sums,
)

Aggregation = Literal["tokens", "sequences"]


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
    aggregation: Aggregation = "tokens",
) -> LossOutput:
    """GRPO's clipped surrogate with an optional KL penalty towards a reference.

    Shao et al. 2024, "DeepSeekMath", eq. 3. `aggregation="sequences"` is that paper's mean over
    sequences of each one's token mean, where a sequence without a trained token counts in neither
    (see `reduce.count`); `"tokens"` is DAPO's mean over all tokens (eq. 8). The penalty is
    ratio * k3, whose gradient is that of KL(policy || reference), off-policy too (DeepSeek-V3.2,
    "Unbiased KL Estimate"); the first paper's plain k3 has that of KL(reference || policy).

    Args:
        logprobs: [T], of the policy.
        batch: the columns of the module's docstring.
        clip_low, clip_high: >= 0, the ratio is clipped to [1 - clip_low, 1 + clip_high].
        kl_coefficient: >= 0, weight of the penalty.

    Returns:
        Terms in the unit of `aggregation`, and metrics.

    Raises:
        ValueError: a missing column, one of another shape, a mask that is not bool, a setting out
            of range.
    """
    _check_settings(clip_low, clip_high, kl_coefficient, aggregation)
    mask = _column(batch, "token_mask", logprobs)
    check_mask(mask)
    columns = _selected_columns(batch, mask, logprobs, needs_reference=kl_coefficient > 0)
    logprobs = torch.where(mask, logprobs, 0.0)
    old_logprobs = columns.get("old_logprobs", logprobs.detach())
    advantages = columns["advantages"]

    token_ratio = ratio(logprobs, old_logprobs)
    token_loss = clipped_surrogate(token_ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    policy = _aggregate(token_loss, mask, batch, aggregation)
    terms = [Term(policy, aggregation)]
    metrics = {"loss/policy": Metric(policy.detach(), aggregation, "mean")}
    metrics |= _ratio_metrics(token_ratio.detach(), advantages, mask, clip_low, clip_high)
    metrics |= _token_mean("policy/approximate_kl", kl_k3(old_logprobs, logprobs), mask)
    if "reference_logprobs" in columns:
        kl = kl_k3(logprobs, columns["reference_logprobs"])
        metrics |= _token_mean("policy/kl_reference", kl, mask)
        if kl_coefficient > 0:
            penalty = _aggregate(token_ratio * kl, mask, batch, aggregation)
            terms.append(Term(penalty, aggregation, weight=kl_coefficient))
    if "sampled_logprobs" in columns:
        metrics |= logprob_mismatch(logprobs, columns["sampled_logprobs"], mask)
    return LossOutput(tuple(terms), metrics)


def _selected_columns(
    batch: Mapping[str, Tensor], mask: Tensor, logprobs: Tensor, *, needs_reference: bool
) -> dict[str, Tensor]:
    """The columns that are there, 0 where untrained: a NaN there must reach no derivative."""
    required = ["advantages", "reference_logprobs"] if needs_reference else ["advantages"]
    optional = ["old_logprobs", "reference_logprobs", "sampled_logprobs"]
    names = required + [name for name in optional if name in batch and name not in required]
    return {
        name: torch.where(mask, _column(batch, name, logprobs), 0.0).to(logprobs.dtype)
        for name in names
    }


def _aggregate(token_loss: Tensor, mask: Tensor, batch: Mapping[str, Tensor], unit: Unit) -> Tensor:
    """Sum over tokens, or over sequences of their token means: a scalar."""
    if unit == "tokens":
        return masked_sum(token_loss, mask)
    if "cu_seqlens" not in batch:
        raise ValueError(
            f"aggregation 'sequences' needs the column cu_seqlens, got {sorted(batch)}; add it."
        )
    cu_seqlens = batch["cu_seqlens"]
    sums = sequence_sums(torch.where(mask, token_loss, 0.0), cu_seqlens)
    lengths = sequence_sums(mask.to(token_loss.dtype), cu_seqlens)
    return (sums / lengths.clamp(min=1)).sum()


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


def _column(batch: Mapping[str, Tensor], name: str, logprobs: Tensor) -> Tensor:
    if name not in batch:
        raise ValueError(f"The batch must have the column {name}, got {sorted(batch)}; add it.")
    column = batch[name]
    if column.shape != logprobs.shape:
        raise ValueError(
            f"Column {name} must be aligned with logprobs {tuple(logprobs.shape)}, got "
            f"{tuple(column.shape)}; index t is about token t in every column."
        )
    return column


def _check_settings(
    clip_low: float, clip_high: float, kl_coefficient: float, aggregation: str
) -> None:
    if not all(value >= 0 for value in (clip_low, clip_high, kl_coefficient)):  # NaN is not
        raise ValueError(
            f"clip_low, clip_high and kl_coefficient must be 0 or more, got {clip_low}, "
            f"{clip_high} and {kl_coefficient}."
        )
    if aggregation not in ("tokens", "sequences"):
        raise ValueError(f"aggregation must be 'tokens' or 'sequences', got {aggregation!r}.")
