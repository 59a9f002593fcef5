import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from burnish_losses import (
    cispo_surrogate,
    clipped_surrogate,
    reinforce_surrogate,
    sapo_surrogate,
)
from torch import Tensor

RATIOS = torch.tensor([1.5, 0.5, 1.5, 0.5, 6.0, 6.0]).double()
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0, -2.0, 1.0, -2.0]).double()


def gradient_of(surrogate: Callable[..., Tensor]) -> Tensor:
    """By the log-prob of each token, of which the ratio is the exponential."""
    logprobs = RATIOS.log().requires_grad_()
    return torch.autograd.grad(surrogate(logprobs.exp(), ADVANTAGES, logprobs).sum(), logprobs)[0]


def test_clipped_by_hand() -> None:
    clipped = partial(clipped_surrogate, clip_low=0.2, clip_high=0.4)
    # min(r A, clip(r) A): 1.4 (clipped), 0.5, -3, -1.6 (clipped), 1.4 (clipped), -12.
    expected = torch.tensor([-1.4, -0.5, 3.0, 1.6, -1.4, 12.0]).double()
    torch.testing.assert_close(clipped(RATIOS, ADVANTAGES), expected)
    expected = torch.tensor([0.0, -0.5, 3.0, 0.0, 0.0, 12.0]).double()
    torch.testing.assert_close(gradient_of(clipped), expected)


def test_dual_clip_bounds_only_bad_tokens() -> None:
    dual = partial(clipped_surrogate, clip_low=0.2, clip_high=0.4, dual_clip=3.0)
    # The last: max(min(6 * -2, 1.4 * -2), 3 * -2) = -6.
    expected = torch.tensor([-1.4, -0.5, 3.0, 1.6, -1.4, 6.0]).double()
    torch.testing.assert_close(dual(RATIOS, ADVANTAGES), expected)
    expected = torch.tensor([0.0, -0.5, 3.0, 0.0, 0.0, 0.0]).double()
    torch.testing.assert_close(gradient_of(dual), expected)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]).double()
    cispo = partial(cispo_surrogate, clip_high=0.4)
    # -min(r, 1.4) A log pi.
    expected = torch.tensor([1.4, 1.0, -8.4, -1.0, 2.8, -8.4]).double()
    torch.testing.assert_close(cispo(RATIOS, ADVANTAGES, logprobs), expected)
    expected = torch.tensor([-1.4, -0.5, 2.8, 1.0, -1.4, 2.8]).double()  # -min(r, 1.4) A
    torch.testing.assert_close(gradient_of(cispo), expected)
    lower = partial(cispo_surrogate, clip_low=0.2, clip_high=0.4)
    expected = torch.tensor([-1.4, -0.8, 2.8, 1.6, -1.4, 2.8]).double()
    torch.testing.assert_close(gradient_of(lower), expected)


def test_sapo_by_hand() -> None:
    sapo = partial(sapo_surrogate, temperature_positive=1.0, temperature_negative=2.0)
    # r = 1.5: -4 sigmoid(0.5) * 1 and -4 / 2 sigmoid(2 * 0.5) * -2.
    losses = sapo(RATIOS, ADVANTAGES)[[0, 2]]
    expected = [-4 / (1 + math.exp(-0.5)), 4 / (1 + math.exp(-1.0))]
    torch.testing.assert_close(losses, torch.tensor(expected).double())


def test_sapo_weighs_a_token_by_4_p_1_minus_p_times_its_ratio() -> None:
    temperatures = torch.where(ADVANTAGES > 0, 1.0, 1.05)
    p = torch.sigmoid(temperatures * (RATIOS - 1))
    torch.testing.assert_close(gradient_of(sapo_surrogate), -4 * p * (1 - p) * RATIOS * ADVANTAGES)
    # On policy it is the policy gradient.
    ratio = torch.ones(2).double().requires_grad_()
    advantages = torch.tensor([1.0, -2.0]).double()
    sapo_surrogate(ratio, advantages).sum().backward()
    torch.testing.assert_close(ratio.grad, -advantages)


def test_reinforce_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]).double()
    expected = torch.tensor([1.0, 2.0, -6.0, -2.0, 2.0, -6.0]).double()
    torch.testing.assert_close(reinforce_surrogate(RATIOS, ADVANTAGES, logprobs), expected)
    torch.testing.assert_close(gradient_of(reinforce_surrogate), -ADVANTAGES)


@pytest.mark.parametrize(
    "surrogate",
    [
        clipped_surrogate,
        partial(clipped_surrogate, dual_clip=3.0),
        sapo_surrogate,
        reinforce_surrogate,
    ],
)
def test_gradcheck(surrogate: Callable[..., Tensor]) -> None:
    logprobs = RATIOS.log().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: surrogate(x.exp(), ADVANTAGES, x), logprobs)


@pytest.mark.parametrize(
    ("surrogate", "settings", "message"),
    [
        (clipped_surrogate, {"clip_low": -0.1}, "clip_low must be 0 or more, got -0.1"),
        (clipped_surrogate, {"clip_high": math.nan}, "clip_high must be 0 or more, got nan"),
        (clipped_surrogate, {"dual_clip": 1.1}, r"at least 1 \+ clip_high = 1.2, got 1.1"),
        (clipped_surrogate, {"dual_clip": math.nan}, "dual_clip must be .* got nan"),
        (cispo_surrogate, {"clip_high": -1.0}, "clip_high must be 0 or more, got -1"),
        (sapo_surrogate, {"temperature_negative": 0.0}, "temperature_negative must be positive"),
    ],
)
def test_settings_out_of_range_are_named(
    surrogate: Callable[..., Tensor], settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        surrogate(RATIOS, ADVANTAGES, RATIOS.log(), **settings)
