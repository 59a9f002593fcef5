"""Statistics of rewards by group, in float64 and two passes.

Shape legend: N rollouts, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish_losses._columns import check_integers, check_mask, check_tensors

TINY = torch.finfo(torch.float64).tiny


class Grouped(NamedTuple):
    """Rewards with the group of each; `_replace(values=...)` for others of the same groups."""

    values: Tensor  # [N] float64, 0 where not valid
    valid: Tensor  # [N] bool: counts, and is finite
    groups: Tensor  # [N] int64 in [0, G)
    sizes: Tensor  # [G] float64: valid rollouts


def group_rewards(rewards: Tensor, group_ids: Tensor, mask: Tensor | None) -> Grouped:
    """Rewards [N] by their ids [N]; ValueError unless the shapes agree and the mask is bool."""
    check_tensors("[N]", rewards=rewards)
    check_integers("[N]", group_ids=group_ids)
    if mask is not None:
        check_mask(mask, "mask")
    shapes = [tuple(t.shape) for t in (rewards, group_ids, mask) if t is not None]
    if rewards.dim() != 1 or len(set(shapes)) > 1:
        raise ValueError(
            f"rewards, group_ids and mask must all be [N], got {shapes}; each rollout has one."
        )
    valid = valid_rewards(rewards, mask)
    names, groups = group_ids.unique(return_inverse=True)
    values = torch.where(valid, rewards.double(), 0.0)
    sizes = values.new_zeros(len(names)).index_add(0, groups, valid.double())
    return Grouped(values, valid, groups, sizes)


def valid_rewards(rewards: Tensor, mask: Tensor | None) -> Tensor:
    """Where rewards are finite and the mask, of their shape, is True."""
    if mask is None:
        return rewards.isfinite()
    check_mask(mask, "mask")
    return rewards.isfinite() & mask


def group_sums(grouped: Grouped) -> Tensor:
    """[G]: sums of the values."""
    return torch.zeros_like(grouped.sizes).index_add(0, grouped.groups, grouped.values)


def centred(grouped: Grouped) -> Grouped:
    """Less their group's mean; exactly 0 where not valid, or all of the group are equal."""
    means = group_sums(grouped) / grouped.sizes.clamp(min=1)
    # The mean of equal numbers may be off by a rounding.
    differs = grouped.valid & (group_ranges(grouped) > 0)[grouped.groups]
    return grouped._replace(
        values=torch.where(differs, grouped.values - means[grouped.groups], 0.0)
    )


def deviations(around_zero: Grouped) -> Tensor:
    """[G]: the sample's standard deviations (n - 1) of values that are centred already."""
    squares = group_sums(around_zero._replace(values=around_zero.values.square()))
    return (squares / (around_zero.sizes - 1).clamp(min=1)).sqrt()


def group_ranges(grouped: Grouped) -> Tensor:
    """[G]: largest less smallest value, -inf if there is none."""
    nothing = torch.full_like(grouped.sizes, -torch.inf)
    above = torch.where(grouped.valid, grouped.values, -torch.inf)
    below = torch.where(grouped.valid, grouped.values, torch.inf)
    highest = nothing.scatter_reduce(0, grouped.groups, above, "amax")
    return highest - (-nothing).scatter_reduce(0, grouped.groups, below, "amin")


def group_scales(grouped: Grouped) -> Tensor:
    """[G]: largest |value|, 0 if there is none."""
    nothing = torch.zeros_like(grouped.sizes)
    return nothing.scatter_reduce(0, grouped.groups, grouped.values.abs(), "amax")
