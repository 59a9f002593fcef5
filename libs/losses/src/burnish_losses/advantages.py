"""Advantages of rollouts relative to their group, in float64.

Groups are explicit ids, never equal prompts: the same prompt twice in a batch is two groups.

Shape legend: N rollouts, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    relative_floor: float = 1e-6,
) -> Tensor:
    """Reward minus the group's mean, over the group's standard deviation if `normalize`.

    GRPO (Shao et al. 2024, sec. 4.1.2); without the division Dr. GRPO (Liu et al. 2025). The
    deviation is the sample's (n - 1), found in two passes, and is taken as at least
    `relative_floor` of the group's largest `|reward|`, so that rounding noise is not blown up.

    Args:
        rewards: [N], floating point. One that is not finite counts as masked.
        group_ids: [N], integers, in any order.
        mask: [N] bool or None. A masked rollout gets 0 and does not shape its group's baseline.

    Returns:
        [N], float64. Exactly 0 where all rewards of the group are equal, or only one counts.

    Raises:
        ValueError: shapes that do not match.
    """
    valid = _valid(rewards, group_ids, mask)
    values, groups, num_groups = _grouped(rewards, group_ids, valid)
    spread, scale = _spread_and_scale(values, groups, num_groups, valid)
    size = _group_sums(valid.double(), groups, num_groups)
    mean = _group_sums(values, groups, num_groups) / size.clamp(min=1)
    advantages = values - mean[groups]
    if normalize:
        squares = _group_sums(torch.where(valid, advantages.square(), 0.0), groups, num_groups)
        deviation = (squares / (size - 1).clamp(min=1)).sqrt()
        # tiny keeps 0 / 0 away in groups of zeros.
        floor = (relative_floor * scale).clamp(min=torch.finfo(torch.float64).tiny)
        advantages = advantages / torch.maximum(deviation, floor)[groups]
    # The mean of equal numbers may be off by a rounding; equal rewards still give exactly 0.
    return torch.where(valid & (spread[groups] > 0), advantages, 0.0)


def groups_with_spread(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor | None = None,
    *,
    relative_floor: float = 1e-6,
) -> Tensor:
    """Whether each rollout's group has rewards that differ, so that it teaches something.

    The filter of dynamic sampling (DAPO, Yu et al. 2025, eq. 11). Give it the task's own rewards,
    before any shaping: a length penalty would make all-wrong groups look as if they differed.

    Arguments, errors: as in `group_relative_advantages`. Rewards differ if their range exceeds
    `relative_floor` of the group's largest `|reward|`.

    Returns:
        [N] bool, alike for all of a group, masked rollouts included.
    """
    valid = _valid(rewards, group_ids, mask)
    values, groups, num_groups = _grouped(rewards, group_ids, valid)
    spread, scale = _spread_and_scale(values, groups, num_groups, valid)
    return (spread > relative_floor * scale)[groups]


def _valid(rewards: Tensor, group_ids: Tensor, mask: Tensor | None) -> Tensor:
    shapes = [tuple(t.shape) for t in (rewards, group_ids, mask) if t is not None]
    if rewards.dim() != 1 or len(set(shapes)) > 1:
        raise ValueError(f"rewards, group_ids and mask must all be [N], got {shapes}.")
    finite = rewards.isfinite()
    return finite if mask is None else finite & mask


def _grouped(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, int]:
    """Rewards [N] float64 with 0 where not valid, group index [N] in [0, G), and G."""
    names, groups = group_ids.unique(return_inverse=True)
    return torch.where(valid, rewards.double(), 0.0), groups, len(names)


def _group_sums(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, groups, values)


def _spread_and_scale(
    values: Tensor, groups: Tensor, num_groups: int, valid: Tensor
) -> tuple[Tensor, Tensor]:
    """Per group [G]: range of the valid values (-inf if none), and the largest |value|."""
    nothing = values.new_full((num_groups,), -torch.inf)
    highest = nothing.scatter_reduce(0, groups, torch.where(valid, values, -torch.inf), "amax")
    lowest = (-nothing).scatter_reduce(0, groups, torch.where(valid, values, torch.inf), "amin")
    scale = values.new_zeros(num_groups).scatter_reduce(0, groups, values.abs(), "amax")
    return highest - lowest, scale
