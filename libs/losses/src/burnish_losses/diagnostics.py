"""How far the trainer's log-probs are from the engine's."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish_losses.reduce import Metric, masked_max, masked_sum


def logprob_mismatch(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Differences d = logprobs - sampled_logprobs over the tokens where mask is True, all [T].

    Same weights in engine and trainer leave only rounding: about 1e-5 in float32. More means
    stale weights, another temperature, another chat template or another attention mask.

    Returns:
        mismatch/mean_abs: mean `|d|`, nats; mismatch/max_abs: largest `|d|`;
        mismatch/mean_ratio: mean `exp(|d|)`, the factor between the probabilities (1 is equal).
    """
    difference = torch.where(mask, logprobs - sampled_logprobs, 0.0).detach().abs()
    return {
        "mismatch/mean_abs": Metric(masked_sum(difference, mask), "tokens", "mean"),
        "mismatch/max_abs": Metric(masked_max(difference, mask), None, "max"),
        "mismatch/mean_ratio": Metric(masked_sum(difference.exp(), mask), "tokens", "mean"),
    }
