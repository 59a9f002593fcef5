"""Advantages beyond GRPO's: RLOO, ReMax, REINFORCE++, GDPO; and what all of them hold to."""

import math
from collections.abc import Callable

import pytest
import torch
from burnish_losses import (
    gdpo_advantages,
    group_relative_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rloo_advantages,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

NAN = math.nan


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(values: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(values, floats(*expected))


def by_hand(rewards: Tensor, group_ids: Tensor, baseline: Callable[[Tensor, int], float]) -> Tensor:
    """Reward minus baseline(rewards of the group, own place in it), one rollout at a time."""
    result = torch.zeros(len(rewards), dtype=torch.float64)
    for i, group in enumerate(group_ids.tolist()):
        members = (group_ids == group).nonzero().squeeze(-1).tolist()
        result[i] = rewards[i] - baseline(rewards[members], members.index(i))
    return result


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # Of group 7: others' means 1, 2.5, 2.5. Of group 3: 0 and 8.
    advantages = rloo_advantages(floats(4, 8, 1, 0, 1), ids(7, 3, 7, 3, 7))
    assert_equal(advantages, [3.0, 8.0, -1.5, -8.0, -1.5])


def test_rloo_of_a_masked_rollout() -> None:
    mask = torch.tensor([True, False, True, True])
    advantages = rloo_advantages(floats(1, 1, 0, 0), ids(0, 0, 0, 0), mask=mask)
    # Others of the first: 0, 0; of the last two: 1, 0.
    assert_equal(advantages, [1.0, 0.0, -0.5, -0.5])


def test_rloo_alone_has_no_baseline() -> None:
    assert rloo_advantages(floats(5, NAN), ids(1, 1)).tolist() == [0.0, 0.0]


def test_remax_subtracts_the_greedy_reward() -> None:
    rewards, greedy = floats(1, 0, 0.5, NAN, 1), floats(0.25, 0.25, 1, 1, NAN)
    mask = torch.tensor([True, True, True, True, True])
    assert_equal(remax_advantages(rewards, greedy, mask=mask), [0.75, -0.25, -0.5, 0, 0])
    mask[1] = False
    assert_equal(remax_advantages(rewards, greedy, mask=mask), [0.75, 0, -0.5, 0, 0])
    with pytest.raises(ValueError, match="greedy reward for each rollout"):
        remax_advantages(rewards, greedy[:1])


def test_reinforce_plus_plus_normalises_over_the_batch() -> None:
    # Mean 2; sample variance (4 + 1 + 1 + 4 + 0) / 4 = 2.5.
    advantages = reinforce_plus_plus_advantages(floats(0, 1, 3, 4, 2))
    assert_equal(advantages, [x / math.sqrt(2.5) for x in (-2, -1, 1, 2, 0)])


def test_reinforce_plus_plus_with_baseline() -> None:
    # Differences to the groups' means 1/2 and 6: +-1/2 and +-4; variance 2 (1/4 + 16) / 3 = 65/6.
    advantages = reinforce_plus_plus_advantages(floats(1, 2, 0, 10), ids(5, 9, 5, 9))
    assert_equal(advantages, [x / math.sqrt(65 / 6) for x in (0.5, -4, -0.5, 4)])


def test_reinforce_plus_plus_leaves_masked_and_broken_rewards_out() -> None:
    rewards = floats(0, 1, 3, 4, 2, 77, NAN)
    mask = torch.tensor([True] * 5 + [False, True])
    advantages = reinforce_plus_plus_advantages(rewards, mask=mask)
    assert_equal(advantages, [x / math.sqrt(2.5) for x in (-2, -1, 1, 2, 0)] + [0, 0])
    group_ids = ids(5, 5, 5, 5, 5, 5, 5)
    with_group = reinforce_plus_plus_advantages(rewards, group_ids, mask=mask)
    torch.testing.assert_close(with_group, advantages)


def test_reinforce_plus_plus_of_groups_that_teach_nothing() -> None:
    # A group of equals and a group of one are 0 and count: variance 2 (1/4) / 4 = 1/8.
    advantages = reinforce_plus_plus_advantages(floats(1, 0, 0.3, 0.3, 9), ids(0, 0, 1, 1, 2))
    assert advantages[2:].tolist() == [0.0, 0.0, 0.0]
    assert_equal(advantages[:2], [0.5 * math.sqrt(8), -0.5 * math.sqrt(8)])
    assert reinforce_plus_plus_advantages(floats(*[0.1] * 10)).tolist() == [0.0] * 10
    assert reinforce_plus_plus_advantages(floats(3)).tolist() == [0.0]
    assert reinforce_plus_plus_advantages(floats()).tolist() == []


def test_gdpo_keeps_apart_what_a_sum_of_rewards_confuses() -> None:
    # Two groups of two rollouts, two rewards. The second earns both, the first one of them.
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    group_ids = ids(0, 0, 1, 1)
    summed = group_relative_advantages(rewards.sum(1), group_ids)
    assert_equal(summed, [x / math.sqrt(2) for x in (-1, 1, -1, 1)])
    # Each reward that differs gives +- 1/sqrt(2): sums +-1/sqrt(2) and +-2/sqrt(2), of variance
    # 2 (1/2 + 2) / 3 = 5/3.
    advantages = gdpo_advantages(rewards, group_ids)
    expected = [x / math.sqrt(2) / math.sqrt(5 / 3) for x in (-1, 1, -2, 2)]
    assert_equal(advantages, expected)


def test_gdpo_weights_the_normalised_rewards() -> None:
    # Rewards of another scale; sums (1 - 1/2) / sqrt(2) and opposite, of variance 2 (1/8) = 1/4.
    rewards = torch.tensor([[0.0, 100.0], [0.01, 0.0]])
    advantages = gdpo_advantages(rewards, ids(0, 0), weights=[1.0, 0.5])
    assert_equal(advantages, [-1 / math.sqrt(2), 1 / math.sqrt(2)])
    turned = gdpo_advantages(rewards, ids(0, 0), weights=[1.0, 2.0])
    assert_equal(turned, [1 / math.sqrt(2), -1 / math.sqrt(2)])


def test_gdpo_of_one_reward_is_that_of_the_batch() -> None:
    rewards = floats(1, 2, 0, 10)
    advantages = gdpo_advantages(rewards[:, None], ids(5, 9, 5, 9))
    # +-1/sqrt(2) in both groups, over sqrt(4/2/3).
    assert_equal(advantages, [x * math.sqrt(3) / 2 for x in (1, -1, -1, 1)])


def test_gdpo_masks_rollouts_and_single_rewards() -> None:
    rewards = torch.tensor([[1.0, 5.0], [0.0, NAN], [0.0, 7.0], [9.0, 7.0]])
    group_ids = ids(0, 0, 0, 0)
    # The NaN masks the second, the mask the last: two are left, +-(1 - 1) / sqrt(2).
    mask = torch.tensor([True, True, True, False])
    assert gdpo_advantages(rewards, group_ids, mask=mask).tolist() == [0.0] * 4
    # Not asked of the second, the second reward does not break it: first reward 2/3, -1/3, -1/3
    # over sqrt(1/3); second -1, 0, 1 over sqrt(2).
    each = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    a, b = 1 / math.sqrt(3), 1 / math.sqrt(2)
    sums = floats(2 * a - b, -a, -a + b)
    expected = sums / (sums.square().sum() / 2).sqrt()
    assert_equal(gdpo_advantages(rewards, group_ids, mask=each), [*expected.tolist(), 0.0])


def test_gdpo_of_equal_rewards_is_zero() -> None:
    rewards = torch.tensor([[0.3, 0.1]] * 8)
    assert gdpo_advantages(rewards, torch.zeros(8).long()).tolist() == [0.0] * 8
    assert gdpo_advantages(rewards[:0], torch.zeros(0).long()).tolist() == []
    noise = torch.tensor([[0.1 + 0.2], [0.3], [0.3]], dtype=torch.float64)
    assert gdpo_advantages(noise, ids(0, 0, 0)).abs().max() < 1e-3


def test_gdpo_refuses_what_does_not_match() -> None:
    rewards, group_ids = torch.zeros(4, 2), ids(0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"rewards must be \[N, R\]"):
        gdpo_advantages(rewards[:, 0], group_ids)
    for weights in ([1.0], [1.0, NAN]):
        with pytest.raises(ValueError, match="weights must be 2 finite numbers"):
            gdpo_advantages(rewards, group_ids, weights=weights)
    with pytest.raises(ValueError, match=r"mask must be \[N\] or \[N, R\]"):
        gdpo_advantages(rewards, group_ids, mask=torch.ones(2).bool())


Estimator = Callable[[Tensor, Tensor], Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "group relative": group_relative_advantages,
    "leave one out": lambda r, g: group_relative_advantages(r, g, leave_one_out=True),
    "no deviation": lambda r, g: group_relative_advantages(r, g, normalize=False),
    "rloo": rloo_advantages,
    "reinforce++": lambda r, g: reinforce_plus_plus_advantages(r),
    "reinforce++ baseline": reinforce_plus_plus_advantages,
    "gdpo": lambda r, g: gdpo_advantages(torch.stack([r, r.flip(0)], 1), g, weights=[1, 0]),
}
BY_GROUP = [name for name in ESTIMATORS if name != "reinforce++"]
NORMALIZED = [name for name in ESTIMATORS if name not in ("no deviation", "rloo")]
# Of one group: a deviation over the batch moves with that of each group.
BY_GROUP_SCALE = ["group relative", "leave one out", "gdpo"]
rollouts = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda x: x / 4), st.integers(0, 3)), min_size=1, max_size=16
)


def columns(pairs: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    return floats(*[r for r, _ in pairs]), ids(*[g for _, g in pairs])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(pairs=rollouts, seed=st.integers(0, 1000))
def test_the_order_of_rollouts_does_not_matter(
    name: str, pairs: list[tuple[float, int]], seed: int
) -> None:
    rewards, group_ids = columns(pairs)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    estimator = ESTIMATORS[name]
    if name == "gdpo":  # a second reward of its own would change with the order
        estimator = lambda r, g: gdpo_advantages(torch.stack([r, r * r], 1), g)  # noqa: E731
    moved = estimator(rewards[order], group_ids[order])
    torch.testing.assert_close(moved, estimator(rewards, group_ids)[order])


@pytest.mark.parametrize("name", BY_GROUP)
@given(pairs=rollouts, shift=st.integers(-100, 100))
def test_a_constant_added_to_a_group_does_not_matter(
    name: str, pairs: list[tuple[float, int]], shift: int
) -> None:
    rewards, group_ids = columns(pairs)
    moved = torch.where(group_ids == group_ids[0], rewards + shift, rewards)
    expected = ESTIMATORS[name](rewards, group_ids)
    torch.testing.assert_close(ESTIMATORS[name](moved, group_ids), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NORMALIZED)
@given(pairs=rollouts, scale=st.floats(1e-3, 1e3))
def test_the_scale_of_rewards_does_not_matter_where_normalised(
    name: str, pairs: list[tuple[float, int]], scale: float
) -> None:
    rewards, group_ids = columns(pairs)
    expected = ESTIMATORS[name](rewards, group_ids)
    torch.testing.assert_close(
        ESTIMATORS[name](rewards * scale, group_ids), expected, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", BY_GROUP_SCALE)
@given(pairs=rollouts, scale=st.floats(1e-3, 1e3))
def test_the_scale_of_one_group_does_not_matter_where_it_is_normalised(
    name: str, pairs: list[tuple[float, int]], scale: float
) -> None:
    rewards, group_ids = columns(pairs)
    scaled = torch.where(group_ids == group_ids[0], rewards * scale, rewards)
    expected = ESTIMATORS[name](rewards, group_ids)
    torch.testing.assert_close(ESTIMATORS[name](scaled, group_ids), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(pairs=rollouts, data=st.data())
def test_advantages_sum_to_zero_and_masked_rollouts_change_nothing(
    name: str, pairs: list[tuple[float, int]], data: st.DataObject
) -> None:
    rewards, group_ids = columns(pairs)
    advantages = ESTIMATORS[name](rewards, group_ids)
    groups = group_ids.unique().tolist() if name in BY_GROUP else [None]
    for group in groups:
        members = torch.ones_like(group_ids).bool() if group is None else group_ids == group
        assert abs(float(advantages[members].sum())) < 1e-9
    if name != "gdpo":  # its second reward is made of the first
        place = data.draw(st.integers(0, len(pairs)))
        broken = torch.cat([rewards[:place], floats(NAN), rewards[place:]])
        more_ids = torch.cat([group_ids[:place], group_ids[:1], group_ids[place:]])
        with_broken = ESTIMATORS[name](broken, more_ids)
        assert with_broken[place] == 0
        rest = torch.cat([with_broken[:place], with_broken[place + 1 :]])
        torch.testing.assert_close(rest, advantages, rtol=1e-12, atol=1e-12)


@given(pairs=rollouts)
def test_rloo_equals_one_rollout_at_a_time(pairs: list[tuple[float, int]]) -> None:
    rewards, group_ids = columns(pairs)

    def mean_of_others(members: Tensor, own: int) -> float:
        others = torch.cat([members[:own], members[own + 1 :]])
        return float(others.mean() if len(others) else members[own])

    expected = by_hand(rewards, group_ids, mean_of_others)
    torch.testing.assert_close(rloo_advantages(rewards, group_ids), expected)


def test_no_advantage_in_the_thousands_whatever_the_estimator() -> None:
    rewards, group_ids = floats(*[0.35] * 7, 0.95), torch.zeros(8).long()
    for estimator in ESTIMATORS.values():
        advantages = estimator(rewards, group_ids)
        assert 0 < advantages[7] <= math.sqrt(8) + 1e-12
        assert (advantages[:7] < 0).all()
