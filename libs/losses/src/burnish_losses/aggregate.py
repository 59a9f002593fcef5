"""How the values of tokens become one term: which mean, that is to say, what weighs alike.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from burnish_losses._columns import column
from burnish_losses.reduce import Term, masked_sum, sequence_sums

# How values of tokens become a term: (values [T], batch) -> Term. Only trained tokens count.
Aggregate = Callable[[Tensor, Mapping[str, Tensor]], Term]


def token_mean(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """The mean over all trained tokens of the global batch, as in DAPO (Yu et al. 2025, eq. 8)."""
    return Term(masked_sum(values, column(batch, "token_mask", like=values)), "tokens")


def sequence_mean(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """The mean over sequences of each one's token mean, as in GRPO (Shao et al. 2024, eq. 3)."""
    mask = column(batch, "token_mask", like=values)
    cu_seqlens = column(batch, "cu_seqlens")
    sums = sequence_sums(torch.where(mask, values, 0.0), cu_seqlens)
    lengths = sequence_sums(mask.to(values.dtype), cu_seqlens)
    return Term((sums / lengths.clamp(min=1)).sum(), "sequences")


def sequence_sum(values: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """The mean over sequences of each one's sum over tokens."""
    return Term(masked_sum(values, column(batch, "token_mask", like=values)), "sequences")


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
