"""Weights for tokens that one policy drew and another is trained on: the engine and the trainer.

The engine that samples and the trainer that scores hold the same weights and still differ: by
kernels, by precision, by experts routed otherwise, by an update in between. The exact correction
multiplies the loss by w = pi_trainer(token) / pi_engine(token); since w has no bound, each function
here bounds it in one way. A function takes `(log_ratio [T], batch)`, with log_ratio the old
log-prob less the sampled one, 0 at untrained tokens, and returns weights [T] without gradient.

A token whose weight is 0 stays in the count that the loss is divided by. The counts are taken
over the global batch before any loss is computed, and a dropped token is one whose value is 0, not
one that was never there: dividing by the kept ones would make their weights larger the more are
dropped, which undoes the correction.

A log-ratio of +inf, of a token that the engine says it cannot have drawn, is bounded like any
other. One that is not a number is kept out by the functions that drop; in `truncated_importance`
it makes the loss NaN.

Shape legend: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish_losses._settings import check_window
from burnish_losses.ratios import Batch, Level, sequence_geometric_mean, token_level

Importance = Callable[[Tensor, Batch], Tensor]


def truncated_importance(
    log_ratio: Tensor,
    batch: Batch,
    *,
    level: Level = token_level,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """clip(w, low, high): truncated importance sampling, TIS.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", which
    has `low=0`, no lower bound. `level` says of what w is the ratio: `token_level`,
    `sequence_product` (the whole sequence's), `sequence_geometric_mean`.
    """
    check_window(low, high)
    return level(log_ratio.detach(), batch).exp().clamp(low, high)


def masked_importance(
    log_ratio: Tensor,
    batch: Batch,
    *,
    level: Level = token_level,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """w where low <= w <= high, else 0: masked importance sampling, MIS.

    Liu et al. 2025, "When Speed Kills Stability", whose sequence-level form is
    `level=sequence_product`. `level` as in `truncated_importance`.
    """
    check_window(low, high)
    weights = level(log_ratio.detach(), batch).exp()
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def icepop_importance(
    log_ratio: Tensor, batch: Batch, *, low: float = 0.5, high: float = 5.0
) -> Tensor:
    """Each token's w where low <= w <= high, else 0.

    IcePop (Ling Team 2025, "Small Leak Can Sink a Great Ship"): `masked_importance` with a bound
    below as well, since a token that the trainer finds far less likely is as wrong.
    """
    return masked_importance(log_ratio, batch, low=low, high=high)


def sequence_masked_importance(
    log_ratio: Tensor, batch: Batch, *, low: float = 0.5, high: float = 2.0
) -> Tensor:
    """Each token's w in sequences whose geometric mean of w is in [low, high], else 0.

    Whole sequences are dropped, and the threshold does not depend on their length. Within a kept
    one w is not bounded.
    """
    check_window(low, high)
    log_ratio = log_ratio.detach()
    mean = sequence_geometric_mean(log_ratio, batch).exp()
    return torch.where((mean >= low) & (mean <= high), log_ratio.exp(), 0.0)
