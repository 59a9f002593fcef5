"""KTO: preference from single completions, each marked desirable or not.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish_losses._columns import check_mask, check_tensors, column, select, widened
from burnish_losses._settings import check_coefficient, check_positive
from burnish_losses.reduce import LossOutput, Metric, Term, sums_and_lengths


def kto_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    kl_baseline: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOutput:
    """w_d (1 - sigmoid(beta (r - z))) if desirable, else w_u (1 - sigmoid(beta (z - r))).

    KTO (Ethayarajh et al. 2024): r is the completion's log-ratio to the reference, summed over its
    trained tokens, and z the baseline that gains and losses are felt against. With z = 0 it is
    APO-zero without pairs.

    Args:
        logprobs: [T], of the policy.
        batch: token_mask [T] bool, reference_logprobs [T], cu_seqlens [N+1], desirable [N] bool.
        kl_baseline: scalar >= 0, the same for the whole global batch: `kto_baseline`. It carries
            no gradient.
        beta: > 0.
        desirable_weight, undesirable_weight: >= 0, to balance unequal numbers of the two.

    Returns:
        A term in sequences (those with a trained token). Metrics: loss/preference and
        rewards/accuracy (how often r - z has the wanted sign, ties half), means over sequences;
        rewards/desirable_sum and rewards/undesirable_sum of beta r, and num_desirable and
        num_undesirable to divide them by.

    Raises:
        ValueError: a missing column, one of another shape or dtype, a setting out of range.
    """
    check_positive(beta=beta)
    check_coefficient(desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    log_ratios, is_trained = _log_ratios(logprobs, batch)
    desirable = column(batch, "desirable", like=log_ratios)
    check_mask(desirable, "desirable")
    baseline = _checked_baseline(kl_baseline, log_ratios)

    gains = torch.where(desirable, log_ratios - baseline, baseline - log_ratios)
    values = (-beta * gains).sigmoid()
    weighted = torch.where(desirable, desirable_weight * values, undesirable_weight * values)
    losses = torch.where(is_trained, weighted, 0.0).sum()

    rewards, gains = beta * log_ratios.detach(), gains.detach()
    correct = (gains > 0).to(gains.dtype) + (gains == 0).to(gains.dtype) / 2
    good, bad = is_trained & desirable, is_trained & ~desirable
    metrics = {
        "loss/preference": Metric(losses.detach(), "sequences", "mean"),
        "rewards/accuracy": Metric(correct[is_trained].sum(), "sequences", "mean"),
        "rewards/desirable_sum": Metric(rewards[good].sum(), None, "sum"),
        "rewards/undesirable_sum": Metric(rewards[bad].sum(), None, "sum"),
        "num_desirable": Metric(good.sum(), None, "sum"),
        "num_undesirable": Metric(bad.sum(), None, "sum"),
    }
    return LossOutput((Term(losses, "sequences"),), metrics)


def kto_log_ratio_sum(logprobs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The part of one micro-batch in `kto_baseline`: the sum of the log-ratios of its sequences.

    Args:
        logprobs: [T], of the policy, on mismatched completions: each prompt of the batch followed
            by the completion of another (see `kto_baseline`). No gradient is needed, nor kept.
        batch: columns of those mismatched sequences: token_mask, reference_logprobs, cu_seqlens.

    Returns:
        scalar, detached. Sums of micro-batches and ranks add up.

    Raises:
        ValueError: a missing column, one of another shape, a mask that is not bool.
    """
    with torch.no_grad():
        log_ratios, _ = _log_ratios(logprobs, batch)
    return log_ratios.sum()


def kto_baseline(log_ratio_sum: Tensor, num_mismatched_sequences: int) -> Tensor:
    """max(0, mean log-ratio of mismatched completions): KTO's estimate of KL(policy || reference).

    Taken once over the global batch before the first `kto_loss`. A baseline of each micro-batch,
    and the clamp before the sum, would make the loss depend on how the batch was cut. Mismatched
    is a prompt with the completion of another one, here the one before, scored by both policy and
    reference like any other sequence::

        others = completions[-1:] + completions[:-1]
        mismatched = pack(prompts, others)  # columns, in micro-batches, of prompt + completion
        own = sum(kto_log_ratio_sum(logprobs_of(part), part) for part in mismatched)
        mismatched_counts = add_counts([count(part) for part in mismatched])
        # all-reduce both over data-parallel ranks, then
        baseline = kto_baseline(own, mismatched_counts["sequences"])

    Args:
        log_ratio_sum: scalar, of `kto_log_ratio_sum`, over all micro-batches and ranks.
        num_mismatched_sequences: `count(part)["sequences"]` of the mismatched batches, over the
            same; those of the batch that is trained on are other sequences, and may be more.

    Returns:
        scalar >= 0, float32 or wider, detached; 0 without sequences.

    Raises:
        ValueError: a sum that is no tensor, or counts by unit in the place of a number.
    """
    check_tensors("of one number", log_ratio_sum=log_ratio_sum)
    if isinstance(num_mismatched_sequences, Mapping):
        raise ValueError(
            "num_mismatched_sequences must be a number, got counts by unit; pass the "
            '["sequences"] of the mismatched batches.'
        )
    mean = widened(log_ratio_sum.detach()) / max(int(num_mismatched_sequences), 1)
    return mean.clamp(min=0)


def _log_ratios(logprobs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-ratios [N] summed over trained tokens, and which sequences have any [N] bool."""
    mask, logprobs, columns = select(logprobs, batch, "reference_logprobs")
    log_ratios, lengths = sums_and_lengths(
        logprobs - columns["reference_logprobs"], mask, column(batch, "cu_seqlens")
    )
    return log_ratios, lengths > 0


def _checked_baseline(kl_baseline: Tensor | float, like: Tensor) -> Tensor:
    baseline = torch.as_tensor(kl_baseline, dtype=like.dtype, device=like.device).detach()
    if baseline.dim() or not 0 <= float(baseline) < torch.inf:
        raise ValueError(
            f"kl_baseline must be one number from 0 on for the whole global batch, got "
            f"{baseline.tolist()}; compute it with kto_baseline."
        )
    return baseline
