"""How well a plan uses what it pays for, from plain arrays."""

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import as_lengths, check_positive


def fill_ratio(num_tokens: ArrayLike, capacity: int) -> float:
    """Tokens held over tokens that fit, for bins [K] that hold `num_tokens`; 0.0 without bins."""
    held = np.asarray(num_tokens, np.float64)
    return float(held.sum() / (held.size * capacity)) if held.size else 0.0


def padding_ratio(num_tokens: ArrayLike, num_padded_tokens: ArrayLike) -> float:
    """Share of the positions a model runs that hold no token; 0.0 when it runs none."""
    padded = np.asarray(num_padded_tokens, np.float64).sum()
    held = np.asarray(num_tokens, np.float64).sum()
    return float(1 - held / padded) if padded else 0.0


def padding_to_longest(lengths: ArrayLike, batch_size: int) -> float:
    """`padding_ratio` without a plan: consecutive batches [batch_size], padded to their longest."""
    held = as_lengths(lengths)
    batch_size = check_positive(batch_size, "batch_size")
    starts = np.arange(0, len(held), batch_size)
    if not starts.size:
        return 0.0
    rows = np.diff(np.append(starts, len(held))).astype(np.float64)
    return padding_ratio(held, rows * np.maximum.reduceat(held, starts))


def rank_imbalance(costs: ArrayLike) -> float:
    """How many times as long as a balanced step a step takes: 1.0 is ideal, 1.0 if it is free.

    `costs` [R, S] are those of rank r's micro-batch s. Ranks wait for each other at every
    micro-batch, so slot s costs its slowest rank: sum over s of the maximum, over the mean.
    """
    costs = np.asarray(costs, dtype=np.float64)
    total = costs.sum()
    return float(costs.max(axis=0).sum() * costs.shape[0] / total) if total else 1.0
