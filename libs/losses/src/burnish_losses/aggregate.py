"""How the values of tokens become one term: which mean, that is to say, what weighs alike.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from burnish_losses._columns import column, trained_mask
from burnish_losses.reduce import Term, masked_sum, sums_and_lengths

# How values of tokens become a term: (values [T], batch) -> Term. Only trained tokens count.
Aggregate = Callable[[Tensor, Mapping[str, Tensor]], Term]


def token_mean(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """The mean over all trained tokens of the global batch, as in DAPO (Yu et al. 2025, eq. 8)."""
    return Term(masked_sum(values, trained_mask(batch, like=values)), "tokens")


def sequence_mean(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """The mean over sequences of each one's token mean, as in GRPO (Shao et al. 2024, eq. 3)."""
    mask = trained_mask(batch, like=values)
    sums, lengths = sums_and_lengths(values, mask, column(batch, "cu_seqlens"))
    return Term((sums / lengths.clamp(min=1)).sum(), "sequences")


def sequence_sum(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """The mean over sequences of each one's sum over tokens."""
    return Term(masked_sum(values, trained_mask(batch, like=values)), "sequences")


def constant_length(num_tokens: int) -> Aggregate:
    """Sums over tokens, over a constant: no length of any kind weighs in.

    Dr. GRPO (Liu et al. 2025, "Understanding R1-Zero-Like Training", sec. 3.2): `num_tokens` is
    the budget of a completion. ValueError unless it is positive.
    """
    if not num_tokens > 0:
        raise ValueError(f"num_tokens must be positive, got {num_tokens}; give the token budget.")

    def aggregate(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
        return replace(sequence_sum(values, batch), weight=1 / num_tokens)

    return aggregate
