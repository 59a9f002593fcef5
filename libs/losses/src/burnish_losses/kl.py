"""Per-token estimators of KL(policy || reference) on tokens drawn from the policy.

From J. Schulman, "Approximating KL Divergence" (2020), with p the policy, r the reference and
x = log r - log p of the drawn token. All have the same purpose as numbers; as losses they differ,
since a gradient of an estimate is not an estimate of the gradient. What is minimised, in
expectation over tokens drawn from p itself, and over tokens drawn from an older policy q:

- k1: nothing, its gradient is 0 on average; from q, KL(q || p) is *maximised*;
- k2: KL(p || r); from q, no divergence;
- k3: KL(r || p); from q, no divergence;
- `kl_k2_off_policy`, `kl_k3_off_policy`: KL(p || r), from p and from q alike.

KL(p || r) is the one that a penalty on the reward would stand for.

All are functions `(logprobs, reference_logprobs, old_logprobs) -> values`, shapes alike, where
old_logprobs are of q; the first three do not read them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish_losses._columns import widened

LOG_RATIO_LIMIT = 20.0

Kl = Callable[[Tensor, Tensor, Tensor], Tensor]


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor, _old: Tensor | None = None) -> Tensor:
    """-x: unbiased, may be negative."""
    return logprobs - reference_logprobs


def kl_k2(logprobs: Tensor, reference_logprobs: Tensor, _old: Tensor | None = None) -> Tensor:
    """x^2 / 2: biased, never negative."""
    return (logprobs - reference_logprobs).square() / 2


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor, _old: Tensor | None = None) -> Tensor:
    """exp(x) - x - 1: unbiased, never negative.

    Finite also where the policy has all but lost a token (-30 against -1): see `bounded_exp`. It is
    infinite where one of them rules the token out, and NaN where both do.
    """
    log_ratio = reference_logprobs - logprobs
    # expm1 would be exact near 0; what is lost is below 1e-7 of a log-prob, as the inputs are.
    estimate = bounded_exp(log_ratio) - log_ratio - 1
    return torch.where(log_ratio == torch.inf, torch.inf, estimate)


def kl_k2_off_policy(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """sg[p / q] * k2, sg being stop-gradient: k2's gradient, as if the tokens were drawn from p."""
    ratio = bounded_exp(logprobs - old_logprobs).detach()
    return ratio * kl_k2(logprobs, reference_logprobs)


def kl_k3_off_policy(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """p / q * k3, the gradient going through the ratio as well: value and gradient unbiased.

    DeepSeek-V3.2 (2025), "Unbiased KL Estimate".
    """
    return bounded_exp(logprobs - old_logprobs) * kl_k3(logprobs, reference_logprobs)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(x) up to x = 20, beyond it the tangent there: exp(20) * (1 + x - 20).

    Value and gradient stay finite and keep their sign; a clamp would drop the gradient just where
    policy and reference are furthest apart. At -inf both are 0. In float32 or wider: exp(20) is
    beyond float16.
    """
    log_ratio = widened(log_ratio)
    below = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    return below.exp() * (1 + torch.relu(log_ratio - LOG_RATIO_LIMIT))
