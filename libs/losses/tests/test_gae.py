"""Rewards at tokens, generalised advantage estimation, whitening."""

import math

import pytest
import torch
from burnish_losses import gae, kl_k1, length_adaptive_lambda, token_rewards, whiten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

NAN = math.nan


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def bools(*values: int) -> Tensor:
    return torch.tensor(values) == 1


def one_at_a_time(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lams: Tensor
) -> tuple[Tensor, Tensor]:
    """The recursion as it is written in the paper, from each sequence's end."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for n in range(len(cu_seqlens) - 1):
        value_ahead = advantage_ahead = 0.0
        for t in reversed(range(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))):
            if not mask[t]:
                continue
            delta = float(rewards[t]) + gamma * value_ahead - float(values[t])
            advantage_ahead = delta + gamma * float(lams[n]) * advantage_ahead
            value_ahead = float(values[t])
            advantages[t], returns[t] = advantage_ahead, advantage_ahead + value_ahead
    return advantages, returns


def test_by_hand() -> None:
    # Two sequences, each with a prompt of one token. gamma 1/2, lambda 1/2, so 1/4 in the sum.
    rewards = floats(0, 0, 0, 1, 0, 2)
    values = floats(9, 1, 2, 4, 9, 1)
    mask, cu_seqlens = bools(0, 1, 1, 1, 0, 1), torch.tensor([0, 4, 6])
    # Deltas: 0 + 2/2 - 1 = 0, 0 + 4/2 - 2 = 0, 1 - 4 = -3; and 2 - 1 = 1.
    advantages, returns = gae(rewards, values, mask, cu_seqlens, gamma=0.5, lam=0.5)
    torch.testing.assert_close(advantages, floats(0, -3 / 16, -3 / 4, -3, 0, 1))
    torch.testing.assert_close(returns, floats(0, 13 / 16, 5 / 4, 1, 0, 2))


def test_tool_output_in_between_is_no_step() -> None:
    # The same as without the two untrained tokens, whatever they hold.
    rewards, values = floats(0, NAN, 5, 1), floats(1, NAN, 7, 3)
    advantages, returns = gae(
        rewards, values, bools(1, 0, 0, 1), torch.tensor([0, 4]), gamma=0.5, lam=0.5
    )
    # Last: 1 - 3 = -2. First: 0 + 3/2 - 1 + (-2)/4 = 0.
    torch.testing.assert_close(advantages, floats(0, 0, 0, -2))
    torch.testing.assert_close(returns, floats(1, 0, 0, 1))


def test_lambda_one_and_no_values_sum_the_rewards_ahead() -> None:
    rewards = floats(1, 2, 4, 8)
    cu_seqlens = torch.tensor([0, 3, 4])
    advantages, _ = gae(rewards, torch.zeros(4), bools(1, 1, 1, 1), cu_seqlens, lam=1.0)
    assert advantages.tolist() == [7.0, 6.0, 4.0, 8.0]


def test_each_sequence_may_have_its_lambda() -> None:
    rewards = floats(0, 1, 0, 1)
    advantages, _ = gae(
        rewards, torch.zeros(4), bools(1, 1, 1, 1), torch.tensor([0, 2, 4]), lam=floats(0, 0.5)
    )
    assert advantages.tolist() == [0.0, 1.0, 0.5, 1.0]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 1000),
)
def test_any_pack_gives_the_recursion_one_token_at_a_time(
    lengths: list[int], gamma: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, cu_seqlens = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).int()
    rewards, values = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(num_tokens, generator=generator) < 0.7
    lams = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    expected = one_at_a_time(rewards, values, mask, cu_seqlens, gamma, lams)
    broken_rewards, broken_values = (torch.where(mask, x, NAN) for x in (rewards, values))
    estimates = gae(broken_rewards, broken_values, mask, cu_seqlens, gamma=gamma, lam=lams)
    torch.testing.assert_close(estimates.advantages, expected[0])
    torch.testing.assert_close(estimates.returns, expected[1])


def test_a_long_sequence_loses_nothing() -> None:
    # 10,000 tokens, reward 1 at the end: lambda^(distance), 0.999^9999 = 4.5e-5 at the first.
    rewards = torch.zeros(10_000)
    rewards[-1] = 1.0
    advantages, _ = gae(
        rewards, torch.zeros(10_000), rewards >= 0, torch.tensor([0, 10_000]), lam=0.999
    )
    expected = 0.999 ** torch.arange(9_999, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-11, atol=0)


def test_a_broken_reward_stays_in_its_sequence() -> None:
    advantages, _ = gae(
        floats(NAN, 1, 1), torch.zeros(3), bools(1, 1, 1), torch.tensor([0, 2, 3]), lam=1.0
    )
    assert advantages[0].isnan()
    assert advantages[1:].tolist() == [1.0, 1.0]


def test_estimates_carry_no_gradient() -> None:
    values = torch.zeros(2, requires_grad=True)
    estimates = gae(floats(0, 1), values, bools(1, 1), torch.tensor([0, 2]))
    assert not estimates.advantages.requires_grad
    assert not estimates.returns.requires_grad


def test_gae_refuses_what_does_not_match() -> None:
    three, mask, cu_seqlens = torch.zeros(3), bools(1, 1, 1), torch.tensor([0, 3])
    for lam in (-0.1, 1.1, NAN, floats(0.5, 0.5), floats(2)):
        with pytest.raises(ValueError, match=r"lam must be in \[0, 1\]"):
            gae(three, three, mask, cu_seqlens, lam=lam)
    for gamma in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\]"):
            gae(three, three, mask, cu_seqlens, gamma=gamma)
    with pytest.raises(ValueError, match=r"values and token_mask must all be \[T\]"):
        gae(three, torch.zeros(2), mask, cu_seqlens)
    with pytest.raises(ValueError, match="token_mask must be bool"):
        gae(three, three, torch.ones(3), cu_seqlens)


def test_length_adaptive_lambda() -> None:
    # alpha 0.05: 1 - 1 / 5 at 100 tokens, 0 up to 20.
    lams = length_adaptive_lambda(torch.tensor([0, 1, 20, 100, 1000]))
    torch.testing.assert_close(lams, floats(0, 0, 0, 0.8, 0.98))
    with pytest.raises(ValueError, match="alpha must be positive"):
        length_adaptive_lambda(torch.tensor([1]), alpha=0.0)


def test_the_reward_is_at_the_last_trained_token_and_the_penalty_at_each() -> None:
    mask, cu_seqlens = bools(0, 1, 1, 0, 0, 0, 1), torch.tensor([0, 4, 6, 7], dtype=torch.int32)
    rewards = floats(1, NAN, 2)  # the second sequence trains nothing
    assert token_rewards(rewards, mask, cu_seqlens).tolist() == [0, 0, 1, 0, 0, 0, 2]
    logprobs, reference = floats(NAN, -1, -2, 0, NAN, 0, -1), floats(0, -2, -1, 0, 0, 0, -1)
    shaped = token_rewards(
        rewards, mask, cu_seqlens, kl=kl_k1(logprobs, reference), kl_coefficient=0.1
    )
    # kl 1 and -1 in the first sequence: -0.1 and 1 + 0.1.
    torch.testing.assert_close(shaped, floats(0, -0.1, 1.1, 0, 0, 0, 2))


def test_token_rewards_refuse_what_is_broken() -> None:
    mask, cu_seqlens = bools(1, 1), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="got nan at index 1, the first of 1; set token_mask"):
        token_rewards(floats(1, NAN), mask, cu_seqlens)
    with pytest.raises(ValueError, match=r"rewards must be \[N\] = \[2\]"):
        token_rewards(floats(1), mask, cu_seqlens)
    with pytest.raises(ValueError, match="kl must be given"):
        token_rewards(floats(1, 1), mask, cu_seqlens, kl_coefficient=0.1)
    with pytest.raises(ValueError, match="kl_coefficient must be 0 or more"):
        token_rewards(floats(1, 1), mask, cu_seqlens, kl=floats(0, 0), kl_coefficient=-0.1)


def test_whitening_by_hand() -> None:
    # Of 1, 2, 3: mean 2, deviation 1.
    values, mask = floats(1, NAN, 3, 2), bools(1, 0, 1, 1)
    assert whiten(values, mask).tolist() == [-1.0, 0.0, 1.0, 0.0]
    assert whiten(values, mask, shift_mean=False).tolist() == [1.0, 0.0, 3.0, 2.0]
    # Of 1 and 4: mean 5/2, deviation 3 / sqrt(2).
    torch.testing.assert_close(whiten(floats(1, 4), bools(1, 1)), floats(-1, 1) / math.sqrt(2))


def test_whitening_of_nothing_and_of_equals() -> None:
    assert whiten(floats(NAN, NAN), bools(0, 0)).tolist() == [0.0, 0.0]
    assert whiten(floats(), bools()).tolist() == []
    assert whiten(floats(3), bools(1)).tolist() == [0.0]
    assert whiten(torch.full((10,), 0.1).double(), torch.ones(10).bool()).abs().max() < 1e-8
    with pytest.raises(ValueError, match="relative_floor must be positive"):
        whiten(floats(1), bools(1), relative_floor=0.0)


def test_reinforce_plus_plus_with_a_penalty_at_each_token() -> None:
    # One sequence, reward 1, kl 1 at both tokens, coefficient 1/2: r - 1/2 (kl ahead) is 0 and 1/2.
    mask, cu_seqlens = bools(1, 1, 1), torch.tensor([0, 2, 3])
    rewards = token_rewards(
        floats(1, 0.5), mask, cu_seqlens, kl=floats(1, 1, 0), kl_coefficient=0.5
    )
    advantages = gae(rewards, torch.zeros(3), mask, cu_seqlens, lam=1.0).advantages
    assert advantages.tolist() == [0.0, 0.5, 0.5]
    # Mean 1/3, variance (1/9 + 1/36 + 1/36) / 2 = 1/12.
    torch.testing.assert_close(whiten(advantages, mask), floats(-1 / 3, 1 / 6, 1 / 6) * 12**0.5)
