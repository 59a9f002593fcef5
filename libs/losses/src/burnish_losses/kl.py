"""Per-token estimators of KL(policy || reference) on tokens drawn from the policy.

From J. Schulman, "Approximating KL Divergence" (2020), with p the policy, r the reference and
x = log r - log p of the drawn token. All three have the same purpose as numbers; as losses they
differ, since their gradients have different expectations over tokens drawn from the policy:

- k1: zero, so it is of no use as a loss term;
- k2: the gradient of KL(p || r);
- k3: the gradient of KL(r || p); weighted by the ratio p / stop_gradient(p), that of KL(p || r).
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """-x, shapes alike: unbiased, may be negative."""
    return logprobs - reference_logprobs


def kl_k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """x^2 / 2, shapes alike: biased, never negative."""
    return (logprobs - reference_logprobs).square() / 2


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(x) - x - 1, shapes alike: unbiased, never negative.

    Finite also where the policy has all but lost a token (-30 against -1): see `bounded_exp`.
    """
    log_ratio = reference_logprobs - logprobs
    # expm1 would be exact near 0; what is lost is below 1e-7 of a log-prob, as the inputs are.
    return bounded_exp(log_ratio) - log_ratio - 1


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(x) up to x = 20, beyond it the tangent there: exp(20) * (1 + x - 20).

    Value and gradient stay finite and keep their sign; a clamp would drop the gradient just where
    policy and reference are furthest apart.
    """
    below = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    return below.exp() * (1 + (log_ratio - below))
