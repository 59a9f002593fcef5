import math

import pytest
import torch
from burnish_losses import (
    count,
    group_relative_advantages,
    groups_with_spread,
    keep_sequences,
    rescale_rewards,
    reward_metrics,
    soft_overlong_penalty,
)

NAN = math.nan
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_rescaling_clips_and_maps() -> None:
    rewards = torch.tensor([-9.0, 0.0, 2.5, 10.0, 11.0])
    # [0, 10] to [-1, 1]: 2.5 is a quarter of the way.
    scaled = rescale_rewards(rewards, source=(0, 10), target=(-1, 1))
    assert scaled.tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]
    assert rescale_rewards(rewards, source=(0, 5), target=(0, 5)).tolist() == [0, 0, 2.5, 5, 5]
    costs = rescale_rewards(rewards, source=(0, 10), target=(1, 0))
    assert costs.tolist() == [1.0, 1.0, 0.75, 0.0, 0.0]
    assert scaled.dtype == torch.float64


def test_rescaling_does_not_mend_what_is_broken() -> None:
    scaled = rescale_rewards(torch.tensor([NAN, math.inf, -math.inf]), source=(0, 1), target=(0, 2))
    assert scaled[0].isnan()
    assert scaled[1:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("source", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (NAN, 1.0)])
def test_rescaling_needs_ranges(source: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="source must be a range"):
        rescale_rewards(torch.zeros(2), source=source, target=(0.0, 1.0))


def test_overlong_penalty_by_hand() -> None:
    # Limit 100, buffer 20: free up to 80, then 1/20 a token, 1 at the limit and beyond.
    lengths = torch.tensor([0, 80, 81, 95, 100, 130])
    penalty = soft_overlong_penalty(lengths, max_tokens=100, buffer_tokens=20)
    torch.testing.assert_close(
        penalty, torch.tensor([0, 0, -0.05, -0.75, -1, -1], dtype=torch.float64)
    )
    half = soft_overlong_penalty(lengths, max_tokens=100, buffer_tokens=20, factor=0.5)
    torch.testing.assert_close(half, penalty / 2)


@pytest.mark.parametrize(("buffer", "factor"), [(0, 1.0), (101, 1.0), (5, -1.0), (5, NAN)])
def test_overlong_settings_must_be_in_range(buffer: int, factor: float) -> None:
    with pytest.raises(ValueError, match=r"buffer_tokens must be from 1|factor must be 0 or more"):
        soft_overlong_penalty(ONE_GROUP, max_tokens=100, buffer_tokens=buffer, factor=factor)


def test_dynamic_sampling_judges_the_unshaped_reward() -> None:
    # All wrong, of different lengths: the penalty makes a difference where the task sees none.
    raw, lengths = torch.zeros(4), torch.tensor([90, 100, 40, 85])
    shaped = raw + soft_overlong_penalty(lengths, max_tokens=100, buffer_tokens=20)
    assert not groups_with_spread(raw, ONE_GROUP).any()
    assert groups_with_spread(shaped, ONE_GROUP).all()


def test_what_is_filtered_counts_nowhere() -> None:
    # Rollouts of 3, 2, 1 and 2 tokens, each with one of prompt but the third; the second cut off.
    token_mask = torch.tensor([False, True, True, False, True, True, False, True])
    cu_seqlens = torch.tensor([0, 3, 5, 6, 8], dtype=torch.int32)
    keep = torch.tensor([True, False, True, True])
    kept = keep_sequences(token_mask, keep, cu_seqlens)
    assert kept.tolist() == [False, True, True, False, False, True, False, True]
    counts = count({"token_mask": kept, "cu_seqlens": cu_seqlens})
    assert counts == {"tokens": 4, "sequences": 3}
    advantages = group_relative_advantages(
        torch.tensor([1.0, 1.0, 0.0, 0.0]), ONE_GROUP, mask=keep, normalize=False
    )
    torch.testing.assert_close(
        advantages, torch.tensor([2 / 3, 0, -1 / 3, -1 / 3], dtype=torch.float64)
    )


def test_filter_refuses_what_does_not_match() -> None:
    token_mask, cu_seqlens = torch.ones(3).bool(), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match="keep must be bool"):
        keep_sequences(token_mask, torch.ones(2), cu_seqlens)
    with pytest.raises(ValueError, match="one entry more than keep, got 3 and 1"):
        keep_sequences(token_mask, torch.ones(1).bool(), cu_seqlens)
    with pytest.raises(ValueError, match="end at the number of tokens, 3"):
        keep_sequences(token_mask, torch.ones(2).bool(), torch.tensor([0, 2, 4]))
    empty = keep_sequences(token_mask[:0], torch.ones(0).bool(), torch.tensor([0]))
    assert empty.tolist() == []


def test_a_broken_reward_is_masked_and_counted() -> None:
    rewards = torch.tensor([1.0, NAN, 0.0, 0.0])
    advantages = group_relative_advantages(rewards, ONE_GROUP, normalize=False)
    assert advantages.isfinite().all()
    metrics = reward_metrics(rewards, ONE_GROUP)
    assert metrics["reward/num_not_finite"] == 1
    assert metrics["reward/mean"] == pytest.approx(1 / 3)
    masked = reward_metrics(rewards, ONE_GROUP, torch.tensor([True, False, True, True]))
    assert masked["reward/num_not_finite"] == 0


def test_metrics_refuse_a_floor_that_is_none() -> None:
    with pytest.raises(ValueError, match="relative_floor must be positive"):
        reward_metrics(torch.zeros(4), ONE_GROUP, relative_floor=-1.0)


def test_metrics_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 3.0, 3.0, 3.0])
    metrics = reward_metrics(rewards, torch.tensor([0, 0, 1, 1, 2]))
    # Mean 2, variance (1 + 4 + 1 + 1 + 1) / 4; groups of two: sqrt(1/2) and 0.
    assert metrics == pytest.approx(
        {
            "reward/mean": 2.0,
            "reward/std": math.sqrt(2),
            "reward/group_std": math.sqrt(0.5) / 2,
            "reward/groups_without_spread": 2 / 3,
            "reward/num_not_finite": 0.0,
        }
    )
    nothing = reward_metrics(torch.zeros(0), ONE_GROUP[:0])
    assert nothing["reward/num_not_finite"] == 0
    assert all(math.isnan(v) for name, v in nothing.items() if name != "reward/num_not_finite")
