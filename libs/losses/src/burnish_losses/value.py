"""The critic's part of PPO.

Shape legend: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from burnish_losses._columns import select
from burnish_losses._settings import check_coefficient, check_not_negative
from burnish_losses.aggregate import Aggregate, token_mean
from burnish_losses.diagnostics import token_mean_metric
from burnish_losses.reduce import LossOutput, Metric


def value_loss(
    values: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip: float | None = 0.2,
    coefficient: float = 1.0,
    aggregate: Aggregate = token_mean,
) -> LossOutput:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2.

    The clipped regression of PPO's reference implementation (Dhariwal et al. 2017, OpenAI
    Baselines, ppo2): a value may not come nearer to its return by more than `clip` in one batch.
    For a model that is both policy and critic, add the terms and metrics to those of `ppo_loss`.

    Args:
        values: [T], of the critic, index t about the state in which token t is chosen: the value
            head's output at position t-1, which has seen the tokens before t. Of a causal model
            that is `head(hidden).squeeze(-1).roll(1)` over the pack; what the first token of a
            sequence then holds is another's, and is untrained. `gae` takes them so as well.
        batch: token_mask [T] bool; returns [T]; with a clip, old_values [T], of the critic before
            the update; cu_seqlens [N+1] if the aggregate needs it.
        clip: >= 0, in units of the return, or None for none.
        coefficient: >= 0, weight of the term.

    Returns:
        One term in the unit of `aggregate`; metrics `value/*`, from which `explained_variance` is
        computed.

    Raises:
        ValueError: a missing column, one of another shape, a mask that is not bool, a setting out
            of range.
    """
    check_coefficient(coefficient=coefficient)
    required = ("returns",) if clip is None else ("returns", "old_values")
    mask, values, columns = select(values, batch, *required)
    errors = values - columns["returns"]
    loss = errors.square()
    metrics: dict[str, Metric] = {}
    if clip is not None:
        check_not_negative(clip=clip)
        old_values = columns["old_values"]
        moved = old_values + (values - old_values).clamp(-clip, clip)
        clipped_loss = (moved - columns["returns"]).square()
        stopped = ((clipped_loss > loss) & (moved != values)).to(loss.dtype)
        metrics |= token_mean_metric("value/clip_fraction", stopped, mask)
        loss = torch.maximum(loss, clipped_loss)
    term = aggregate(loss / 2, batch)
    metrics["loss/value"] = Metric(term.weight * term.sum.detach(), term.unit, "mean")
    # The moments lose digits when subtracted: kept in float64.
    for name, moment in (("error", -errors), ("return", columns["returns"])):
        moment = moment.detach().double()
        metrics |= token_mean_metric(f"value/mean_{name}", moment, mask)
        metrics |= token_mean_metric(f"value/mean_square_{name}", moment.square(), mask)
    return LossOutput((replace(term, weight=coefficient * term.weight),), metrics)


def explained_variance(metrics: Mapping[str, float]) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, below 0 for worse.

    It is no mean of parts of a batch, so it is computed from the finished metrics of `value_loss`.

    Args:
        metrics: of `reduce.finalize`, with the `value/*` of `value_loss`.

    Returns:
        NaN if the returns do not vary.
    """
    variances = {
        name: metrics[f"value/mean_square_{name}"] - metrics[f"value/mean_{name}"] ** 2
        for name in ("error", "return")
    }
    # The variance of equal returns is no more than the rounding of their squares, not always 0.
    if not variances["return"] > 1e-12 * metrics["value/mean_square_return"]:
        return torch.nan
    return 1 - variances["error"] / variances["return"]
