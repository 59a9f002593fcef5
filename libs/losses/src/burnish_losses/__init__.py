"""Post-training losses as pure functions of tensors, exact under any batching."""

from burnish_losses.advantages import group_relative_advantages, groups_with_spread
from burnish_losses.aggregate import (
    Aggregate,
    constant_length,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from burnish_losses.diagnostics import logprob_mismatch
from burnish_losses.kl import kl_k1, kl_k2, kl_k3
from burnish_losses.logprobs import logprobs_from_hidden, logprobs_from_logits
from burnish_losses.policy_gradient import clipped_surrogate, grpo_loss, ratio
from burnish_losses.reduce import (
    Counts,
    LossOutput,
    Metric,
    Term,
    combine_metrics,
    count,
    finalize,
    masked_max,
    masked_sum,
    sequence_sums,
    total,
)

__version__ = "0.2.0"

__all__ = [
    "Aggregate",
    "Counts",
    "LossOutput",
    "Metric",
    "Term",
    "clipped_surrogate",
    "combine_metrics",
    "constant_length",
    "count",
    "finalize",
    "group_relative_advantages",
    "groups_with_spread",
    "grpo_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "logprob_mismatch",
    "logprobs_from_hidden",
    "logprobs_from_logits",
    "masked_max",
    "masked_sum",
    "ratio",
    "sequence_mean",
    "sequence_sum",
    "sequence_sums",
    "token_mean",
    "total",
]
