import math

import pytest
import torch
from burnish_losses import group_relative_advantages, groups_with_spread
from hypothesis import given
from hypothesis import strategies as st

ONE_GROUP = torch.zeros(4, dtype=torch.int64)
NAN = math.nan


def assert_equal(values: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64))


def test_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    # Mean 1/2; sample variance 4 * (1/4) / 3 = 1/3.
    assert_equal(
        group_relative_advantages(rewards, ONE_GROUP),
        [0.5 * math.sqrt(3), -0.5 * math.sqrt(3), -0.5 * math.sqrt(3), 0.5 * math.sqrt(3)],
    )
    assert_equal(
        group_relative_advantages(rewards, ONE_GROUP, normalize=False), [0.5, -0.5, -0.5, 0.5]
    )


def test_masked_rollout_does_not_shape_the_baseline() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    mask = torch.tensor([True, False, True, True])
    advantages = group_relative_advantages(rewards, ONE_GROUP, mask=mask, normalize=False)
    assert_equal(advantages, [2 / 3, 0, -1 / 3, -1 / 3])
    # Sample variance (4/9 + 1/9 + 1/9) / 2 = 1/3.
    normalized = group_relative_advantages(rewards, ONE_GROUP, mask=mask)
    assert_equal(normalized, [2 / math.sqrt(3), 0, -1 / math.sqrt(3), -1 / math.sqrt(3)])


@pytest.mark.parametrize("broken", [NAN, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_masked(broken: float) -> None:
    rewards = torch.tensor([1.0, broken, 0.0, 0.0])
    advantages = group_relative_advantages(rewards, ONE_GROUP, normalize=False)
    assert_equal(advantages, [2 / 3, 0, -1 / 3, -1 / 3])


def test_one_outlier_among_equals_stays_small() -> None:
    rewards = torch.tensor([0.35] * 7 + [0.95])
    advantages = group_relative_advantages(rewards, torch.zeros(8, dtype=torch.int64))
    # One of n = 8 apart: -1 / sqrt(8) for the equals and 7 / sqrt(8) for the outlier.
    assert_equal(advantages, [-1 / math.sqrt(8)] * 7 + [7 / math.sqrt(8)])


def test_leave_one_out_of_one_outlier_among_equals_stays_small() -> None:
    rewards = torch.tensor([0.35] * 7 + [0.95])
    advantages = group_relative_advantages(
        rewards, torch.zeros(8, dtype=torch.int64), leave_one_out=True
    )
    # 8 / 7 of the advantages above; over the others' own deviation, 0, it would have no bound.
    assert_equal(advantages, [-math.sqrt(8) / 7] * 7 + [math.sqrt(8)])


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([4.0, 1.0, 1.0])
    group = torch.zeros(3, dtype=torch.int64)
    # The others' means are 1, 2.5 and 2.5; the deviation of all is sqrt((4 + 1 + 1) / 2).
    plain = group_relative_advantages(rewards, group, normalize=False, leave_one_out=True)
    assert_equal(plain, [3.0, -1.5, -1.5])
    normalized = group_relative_advantages(rewards, group, leave_one_out=True)
    assert_equal(normalized, [3 / math.sqrt(3), -1.5 / math.sqrt(3), -1.5 / math.sqrt(3)])


def test_rounding_noise_is_not_blown_up() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert group_relative_advantages(rewards, ONE_GROUP).abs().max() < 1e-9
    assert not groups_with_spread(rewards, ONE_GROUP).any()


@pytest.mark.parametrize("reward", [0.3, 0.1, 0.0, -7.7, 1e30])
@pytest.mark.parametrize("size", [3, 8, 10])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_are_exactly_zero_and_dropped(
    reward: float, size: int, normalize: bool, leave_one_out: bool
) -> None:
    # Ten times 0.1 is not 1 in float64: the mean alone would not be exact.
    rewards = torch.tensor([reward] * size, dtype=torch.float64)
    group = torch.zeros(size, dtype=torch.int64)
    advantages = group_relative_advantages(
        rewards, group, normalize=normalize, leave_one_out=leave_one_out
    )
    assert (advantages == 0).all()
    assert not groups_with_spread(rewards, group).any()


def test_the_same_prompt_twice_is_two_groups() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0])
    advantages = group_relative_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    assert advantages.tolist() == [0.0] * 4
    # One group by mistake would have seen a difference.
    assert group_relative_advantages(rewards, ONE_GROUP).abs().min() > 0.5


def test_group_ids_need_no_order() -> None:
    rewards = torch.tensor([1.0, 10.0, 0.0, 20.0])
    ids = torch.tensor([7, -2, 7, -2])
    assert_equal(group_relative_advantages(rewards, ids, normalize=False), [0.5, -5.0, -0.5, 5.0])


def test_alone_in_a_group_there_is_no_advantage() -> None:
    assert group_relative_advantages(torch.tensor([5.0]), torch.tensor([3])).tolist() == [0.0]
    mask = torch.tensor([True, False])
    pair = group_relative_advantages(torch.tensor([5.0, 1.0]), torch.tensor([3, 3]), mask=mask)
    assert pair.tolist() == [0.0, 0.0]


def test_no_rollouts() -> None:
    empty = group_relative_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)
    assert groups_with_spread(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12),
    st.floats(0.01, 1000),
    st.floats(-50, 50),
)
def test_normalised_advantages_sum_to_zero_and_ignore_scale_and_shift(
    values: list[float], scale: float, shift: float
) -> None:
    rewards = torch.tensor(values, dtype=torch.float64)
    group = torch.zeros(len(values), dtype=torch.int64)
    advantages = group_relative_advantages(rewards, group)
    assert abs(float(advantages.sum())) < 1e-6
    assert advantages.abs().max() <= (len(values) - 1) / math.sqrt(len(values)) + 1e-9
    if rewards.max() - rewards.min() > 0.1:
        moved = group_relative_advantages(rewards * scale + shift, group)
        torch.testing.assert_close(moved, advantages, rtol=1e-6, atol=1e-6)


def test_spread_is_told_group_by_group() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    ids = torch.tensor([4, 4, 9, 9, 4, 9])
    expected = [True, True, False, False, True, False]
    assert groups_with_spread(rewards, ids).tolist() == expected


def test_spread_ignores_masked_and_broken_rewards() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, NAN])
    mask = torch.tensor([True, False, True, True])
    assert groups_with_spread(rewards, ONE_GROUP).all()
    assert not groups_with_spread(rewards, ONE_GROUP, mask).any()
    assert not groups_with_spread(rewards, ONE_GROUP, torch.zeros(4).bool()).any()


def test_length_penalty_makes_no_spread_in_raw_rewards() -> None:
    raw = torch.zeros(4)
    shaped = raw - torch.tensor([0.0, 0.1, 0.5, 0.0])
    assert not groups_with_spread(raw, ONE_GROUP).any()
    assert groups_with_spread(shaped, ONE_GROUP).all()  # why the shaped ones are not to be judged


def test_shapes_must_match() -> None:
    with pytest.raises(ValueError, match=r"must all be \[N\], got \[\(4,\), \(3,\)\]"):
        group_relative_advantages(torch.zeros(4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must all be \[N\]"):
        groups_with_spread(torch.zeros(4), ONE_GROUP, torch.zeros(1).bool())


def test_settings_must_be_in_range() -> None:
    for floor in (0.0, -1.0, NAN, math.inf):
        with pytest.raises(ValueError, match="relative_floor must be positive"):
            group_relative_advantages(torch.zeros(4), ONE_GROUP, relative_floor=floor)
    with pytest.raises(ValueError, match="mask must be bool"):
        group_relative_advantages(torch.zeros(4), ONE_GROUP, mask=torch.ones(4))
