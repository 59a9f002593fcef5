"""What happens to rewards between the environment and the advantages, in float64.

The order matters: first `advantages.groups_with_spread` on the task's own rewards, then shaping,
then advantages.

Shape legend: T packed tokens, N rollouts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish_losses._columns import check_cu_seqlens, check_mask, check_tensors, check_tokens
from burnish_losses._groups import centred, deviations, group_ranges, group_rewards, group_scales
from burnish_losses._settings import check_coefficient, check_positive


def rescale_rewards(
    rewards: Tensor, *, source: tuple[float, float], target: tuple[float, float]
) -> Tensor:
    """Clipped to the range `source`, which is mapped to the range `target` by a straight line.

    `source=target` only clips.

    Args:
        rewards: any shape. One that is not finite stays as it is: clipped, it would look sound.
        source, target: (low, high), finite, the first with low < high. A `target` with low > high
            turns costs into rewards.

    Returns:
        float64, of the shape of rewards.

    Raises:
        ValueError: ranges that are not such.
    """
    (low, high), (start, end) = source, target
    if not (low < high and all(math.isfinite(bound) for bound in (*source, *target))):
        raise ValueError(
            f"source must be a range (low < high) and all bounds finite, got {source} and {target}."
        )
    check_tensors("of any shape", rewards=rewards)
    values = rewards.double()
    fractions = (values.clamp(low, high) - low) / (high - low)
    return torch.where(values.isfinite(), start + fractions * (end - start), values)


def soft_overlong_penalty(
    lengths: Tensor, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """0 up to `max_tokens - buffer_tokens`, then a straight line down to -factor at `max_tokens`.

    The soft overlong punishment of DAPO (Yu et al. 2025, eq. 13), to be added to the rewards after
    `groups_with_spread` has judged them.

    Args:
        lengths: [N], tokens of each completion.
        max_tokens: the longest completion, at least `buffer_tokens`.
        buffer_tokens: >= 1, the stretch over which the penalty grows.
        factor: >= 0, the largest penalty.

    Returns:
        [N], float64, in [-factor, 0].

    Raises:
        ValueError: settings out of range.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens must be from 1 to max_tokens = {max_tokens}, got {buffer_tokens}."
        )
    check_coefficient(factor=factor)
    check_tensors("[N]", lengths=lengths)
    excess = lengths.double() - (max_tokens - buffer_tokens)
    return -factor * (excess / buffer_tokens).clamp(0, 1)


def keep_sequences(token_mask: Tensor, keep: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The token mask, False throughout the sequences that are not kept.

    For the overlong filter (`keep` is where the completion was not cut off at the limit: ask for
    the reason it stopped, since one may end by itself at the limit) and for dynamic sampling
    (`keep` is `groups_with_spread`). Give the same `keep` as `mask` to the advantages: then what
    is filtered counts neither in a sum, nor in what the sum is divided by, nor in a baseline.

    Args:
        token_mask: [T] bool.
        keep: [N] bool.
        cu_seqlens: [N+1], int32 or int64, from 0 to T.

    Returns:
        [T] bool.

    Raises:
        ValueError: masks that are not bool, or lengths that do not agree.
    """
    check_mask(token_mask)
    check_mask(keep, "keep")
    check_tensors("[N+1]", cu_seqlens=cu_seqlens)
    check_tokens(token_mask=token_mask)
    if keep.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"cu_seqlens must have one entry more than keep, got {len(cu_seqlens)} and "
            f"{len(keep)}; keep is [N], one a sequence."
        )
    check_cu_seqlens(cu_seqlens, len(token_mask))
    lengths = cu_seqlens.long().diff()
    return token_mask & keep.repeat_interleave(lengths, output_size=len(token_mask))


def reward_metrics(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor | None = None,
    *,
    relative_floor: float = 1e-6,
) -> dict[str, float]:
    """What to log of the rewards of a global batch. Arguments as for the advantages.

    Returns:
        reward/mean, reward/std: over the rollouts that count; the deviation is the sample's.
        reward/group_std: the mean over groups of two or more of their deviations.
        reward/groups_without_spread: the fraction of groups that `groups_with_spread` drops.
        reward/num_not_finite: rewards that were masked for it.
        NaN where there is nothing to take the mean of.

    Raises:
        ValueError: as for the advantages.
    """
    check_positive(relative_floor=relative_floor)
    grouped = group_rewards(rewards, group_ids, mask)
    broken = ~rewards.isfinite() if mask is None else mask & ~rewards.isfinite()
    counted = grouped.values[grouped.valid]
    several = grouped.sizes > 1
    alike = group_ranges(grouped) <= relative_floor * group_scales(grouped)
    return {
        "reward/mean": float(counted.mean()),
        "reward/std": float(counted.std()) if len(counted) > 1 else math.nan,
        "reward/group_std": float(deviations(centred(grouped))[several].mean()),
        "reward/groups_without_spread": float(alike.double().mean()),
        "reward/num_not_finite": float(broken.sum()),
    }
