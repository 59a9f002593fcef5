"""Advantages of rollouts by their rewards, in float64.

Groups are explicit ids, never equal prompts: the same prompt twice in a batch is two groups. Every
function takes all rollouts of the global batch at once, on the process that has the rewards: a
group must be whole, and `reinforce_plus_plus_advantages` and `gdpo_advantages` normalise over the
whole batch. A rollout with `mask` False, or a reward that is not finite, gets 0 and shapes nobody
else's advantage. Leave its tokens out of the loss as well (`rewards.keep_sequences`): an advantage
of 0 stops neither a KL penalty nor its being counted.

Shape legend: N rollouts, G groups, R rewards of a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish_losses._columns import check_integers, check_mask, check_tensors
from burnish_losses._groups import (
    TINY,
    Grouped,
    centred,
    deviations,
    group_ranges,
    group_rewards,
    group_scales,
    valid_rewards,
)
from burnish_losses._settings import check_positive


def group_relative_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    leave_one_out: bool = False,
    relative_floor: float = 1e-6,
) -> Tensor:
    """Reward minus the group's mean, over the group's standard deviation if `normalize`.

    GRPO (Shao et al. 2024, sec. 4.1.2); without the division Dr. GRPO (Liu et al. 2025). The
    deviation is the sample's (n - 1), found in two passes, and is taken as at least
    `relative_floor` of the group's largest `|reward|`, so that rounding noise is not blown up.

    With `leave_one_out` the mean is of the group's other rollouts, which multiplies the advantage
    by n / (n - 1). The deviation stays that of the whole group: the others' own is 0 whenever they
    agree, and would make the one that differs an outlier of any size.

    Args:
        rewards: [N], floating point. One that is not finite counts as masked.
        group_ids: [N], integers, in any order: one id for all rollouts of one prompt, such as
            `torch.arange(num_prompts).repeat_interleave(group_size)`. Were each rollout's its own,
            all advantages would be 0: `rewards.reward_metrics` shows that as a
            reward/groups_without_spread of 1.
        mask: [N] bool or None. A masked rollout gets 0 and does not shape its group's baseline.

    Returns:
        [N], float64. Exactly 0 where all rewards of the group are equal, or only one counts.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool, a floor not positive.
    """
    check_positive(relative_floor=relative_floor)
    grouped = group_rewards(rewards, group_ids, mask)
    advantages = centred(grouped)
    factors = torch.ones_like(grouped.sizes)
    if leave_one_out:
        factors = grouped.sizes / (grouped.sizes - 1).clamp(min=1)
    if normalize:
        floors = (relative_floor * group_scales(grouped)).clamp(min=TINY)
        factors = factors / torch.maximum(deviations(advantages), floors)
    return advantages.values * factors[grouped.groups]


def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Reward minus the mean of the group's other rollouts.

    REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, "Back to Basics"). Arguments,
    errors: as in `group_relative_advantages`.

    Returns:
        [N], float64. 0 for a rollout without others: it has no baseline.
    """
    return group_relative_advantages(
        rewards, group_ids, mask=mask, normalize=False, leave_one_out=True
    )


def remax_advantages(
    rewards: Tensor, greedy_rewards: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Reward minus that of the greedy completion of the same prompt: ReMax (Li et al. 2024).

    Args:
        rewards, greedy_rewards: [N], floating point; the second at every rollout of its prompt.
        mask: [N] bool or None.

    Returns:
        [N], float64. 0 where masked, or where either reward is not finite.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool.
    """
    check_tensors("[N]", rewards=rewards, greedy_rewards=greedy_rewards)
    if mask is not None:
        check_mask(mask, "mask")
    shapes = [tuple(t.shape) for t in (rewards, greedy_rewards, mask) if t is not None]
    if rewards.dim() != 1 or len(set(shapes)) > 1:
        raise ValueError(
            f"rewards, greedy_rewards and mask must all be [N], got {shapes}; repeat the greedy "
            "reward for each rollout of its prompt."
        )
    valid = valid_rewards(rewards, mask) & greedy_rewards.isfinite()
    return torch.where(valid, rewards.double() - greedy_rewards.double(), 0.0)


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    relative_floor: float = 1e-6,
) -> Tensor:
    """Rewards, less their group's mean if `group_ids`, normalised over the whole batch.

    REINFORCE++ (Hu et al. 2025) without `group_ids`: (r - mean) / std over all rollouts. With
    them REINFORCE++ with baseline: (r - mean of its group) / std of these differences over all
    rollouts; their mean is 0. The deviation is the sample's, and at least `relative_floor` of the
    batch's largest `|reward|`. For the first one's KL penalty at each token see `whiten`.

    Arguments: as in `group_relative_advantages`, of the global batch.

    Returns:
        [N], float64. 0 where masked; without `group_ids` where all of the batch are equal; with
        them where all of the group are, or it has one rollout. Such zeros count in the deviation.

    Raises:
        ValueError: as in `group_relative_advantages`.
    """
    check_positive(relative_floor=relative_floor)
    check_tensors("[N]", rewards=rewards)
    batch = group_rewards(rewards, torch.zeros_like(rewards, dtype=torch.int64), mask)
    groups = batch if group_ids is None else group_rewards(rewards, group_ids, mask)
    differences = batch._replace(values=centred(groups).values)
    return _over_deviation(differences, relative_floor * group_scales(batch))


def gdpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    weights: Sequence[float] | None = None,
    mask: Tensor | None = None,
    relative_floor: float = 1e-6,
) -> Tensor:
    """Several rewards, each normalised within its group, weighted, summed, normalised again.

    GDPO ("Group reward-Decoupled Normalization Policy Optimization", Liu et al. 2026): unlike
    GRPO of the summed rewards, other combinations of rewards keep other advantages, and a weight
    means the same whatever a reward's spread. The last division is by the standard deviation of
    the sums over the whole batch; their mean is 0, as each group's is.

    Args:
        rewards: [N, R], floating point.
        group_ids: [N], integers, in any order, one id for all rollouts of one prompt.
        weights: R numbers, or None for 1 each.
        mask: bool, [N], or [N, R] where single rewards do not apply: they add 0. A reward that
            applies and is not finite masks its whole rollout.
        relative_floor: of each reward's deviation as in `group_relative_advantages`, and of the
            sum's relative to the sum of `|weights|`.

    Returns:
        [N], float64. 0 where masked, or no reward of the group differs; these zeros count in the
        last deviation, except for rollouts that are masked in all rewards.

    Raises:
        ValueError: shapes that do not match, weights not finite, a mask that is not bool, a floor
            not positive.
    """
    check_positive(relative_floor=relative_floor)
    check_tensors("[N, R]", rewards=rewards)
    check_integers("[N]", group_ids=group_ids)
    if rewards.dim() != 2 or group_ids.shape != rewards.shape[:1]:
        raise ValueError(
            f"rewards must be [N, R] with group_ids [N], got {tuple(rewards.shape)} and "
            f"{tuple(group_ids.shape)}; stack the rewards in the last dimension."
        )
    applies = _per_reward(mask, rewards)
    scale = torch.tensor([1.0] * rewards.shape[1] if weights is None else list(weights)).double()
    if scale.shape != rewards.shape[1:] or not scale.isfinite().all():
        raise ValueError(
            f"weights must be {rewards.shape[1]} finite numbers, one of each reward, got {weights}."
        )
    applies = applies & (rewards.isfinite() | ~applies).all(1, keepdim=True)
    normalized = [
        group_relative_advantages(column, group_ids, mask=where, relative_floor=relative_floor)
        for column, where in zip(rewards.unbind(1), applies.unbind(1), strict=True)
    ]
    sums = torch.stack(normalized, 1) @ scale.to(rewards.device) if normalized else rewards.sum(1)
    batch = group_rewards(sums, torch.zeros_like(group_ids), applies.any(1))
    return _over_deviation(batch, relative_floor * scale.abs().sum().to(rewards.device))


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
    check_positive(relative_floor=relative_floor)
    grouped = group_rewards(rewards, group_ids, mask)
    return (group_ranges(grouped) > relative_floor * group_scales(grouped))[grouped.groups]


def _over_deviation(batch: Grouped, floor: Tensor) -> Tensor:
    """Values [N] of mean 0, all in one group, over their deviation."""
    return batch.values / torch.maximum(deviations(batch), floor.clamp(min=TINY)).sum()


def _per_reward(mask: Tensor | None, rewards: Tensor) -> Tensor:
    """The mask as [N, R]."""
    if mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    check_mask(mask, "mask")
    if mask.shape not in (rewards.shape, rewards.shape[:1]):
        raise ValueError(
            f"mask must be [N] or [N, R] as rewards {tuple(rewards.shape)}, got "
            f"{tuple(mask.shape)}."
        )
    return mask.view(len(mask), -1).expand_as(rewards)
