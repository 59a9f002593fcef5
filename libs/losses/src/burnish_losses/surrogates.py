"""Surrogates: what is minimised per token, given its ratio, advantage and log-prob.

A surrogate is a function `(ratio [T], advantages [T], logprobs [T]) -> [T]`; its settings are bound
with `functools.partial`. Sign: a loss, so that a positive advantage makes its token likelier.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish_losses._settings import check_not_negative, check_positive

Surrogate = Callable[[Tensor, Tensor, Tensor], Tensor]


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    _logprobs: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0, at most -dual_clip A.

    PPO (Schulman et al. 2017, eq. 7); separate bounds are DAPO's clip-higher (Yu et al. 2025,
    eq. 8). The dual clip (Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning") stops the gradient of a bad token that has become far likelier, which
    min leaves without bound.

    Raises:
        ValueError: a negative bound, or a dual_clip below 1 + clip_high.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return loss
    if not dual_clip >= 1 + clip_high:
        raise ValueError(
            f"dual_clip must be at least 1 + clip_high = {1 + clip_high}, got {dual_clip}; below "
            "it, it would be the only bound."
        )
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Tensor:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi, sg being stop-gradient.

    CISPO (MiniMax 2025, "MiniMax-M1"): the weight is clipped, so that no token loses
    its gradient. `clip_low=1` is no lower bound, as there. Other libraries call 1 + clip_high, the
    largest weight, epsilon_high.
    """
    check_not_negative(clip_low=clip_low, clip_high=clip_high)
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def sapo_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    _logprobs: Tensor | None = None,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A; tau is temperature_positive where A > 0.

    SAPO (Gao et al. 2025, "Soft Adaptive Policy Optimization"): the weight of a token's gradient
    is 4 p (1 - p) r with p the sigmoid, 1 * r at r = 1, and falls off smoothly on both sides.
    """
    check_positive(
        temperature_positive=temperature_positive, temperature_negative=temperature_negative
    )
    positive = 4 / temperature_positive * torch.sigmoid(temperature_positive * (ratio - 1))
    negative = 4 / temperature_negative * torch.sigmoid(temperature_negative * (ratio - 1))
    return -torch.where(advantages > 0, positive, negative) * advantages


def reinforce_surrogate(_ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """-A log pi (Williams 1992): the policy gradient itself, for tokens of the current policy."""
    return -advantages * logprobs
