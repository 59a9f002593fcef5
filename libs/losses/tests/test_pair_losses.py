"""The losses of a pair: values, derivatives by hand, extremes."""

import math
from functools import partial

import pytest
import torch
from burnish_losses import (
    PairLoss,
    apo_down_pair_loss,
    apo_zero_pair_loss,
    hinge_pair_loss,
    ipo_pair_loss,
    robust_pair_loss,
    sigmoid_pair_loss,
)

CHOSEN, REJECTED, BETA = 2.0, -4.0, 0.1  # margin 6


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


SMOOTHED = partial(sigmoid_pair_loss, label_smoothing=0.2)
ROBUST = partial(robust_pair_loss, label_smoothing=0.2)
SLOPE = sigmoid(-0.6)  # of -log sigmoid at 0.6, up to sign
UP, DOWN = sigmoid(0.2) * sigmoid(-0.2), sigmoid(-0.4) * sigmoid(0.4)  # derivatives of sigmoid

# Loss, d / d chosen, d / d rejected.
BY_HAND = [
    (sigmoid_pair_loss, 0.437488, -0.1 * SLOPE, 0.1 * SLOPE),
    # 0.8 log(1 + e^-0.6) + 0.2 log(1 + e^0.6) = 0.437488 + 0.2 * 0.6.
    (SMOOTHED, 0.557488, 0.1 * (0.2 - SLOPE), -0.1 * (0.2 - SLOPE)),
    # (0.8 * 0.437488 - 0.2 * 1.037488) / 0.6.
    (ROBUST, 0.237488, -0.1 * (SLOPE + 0.2 / 0.6), 0.1 * (SLOPE + 0.2 / 0.6)),
    (hinge_pair_loss, 0.4, -0.1, 0.1),
    (ipo_pair_loss, 1.0, 2.0, -2.0),  # (6 - 5)^2: beyond the aim, so back
    # sigmoid(-0.2) + sigmoid(-0.4).
    (apo_zero_pair_loss, 0.450166 + 0.401312, -0.1 * UP, 0.1 * DOWN),
    # sigmoid(0.2) + sigmoid(-0.6).
    (
        apo_down_pair_loss,
        0.549834 + 0.354344,
        0.1 * (UP - SLOPE * (1 - SLOPE)),
        0.1 * SLOPE * (1 - SLOPE),
    ),
]
LOSSES = [case[0] for case in BY_HAND]


@pytest.mark.parametrize(("loss", "value", "of_chosen", "of_rejected"), BY_HAND)
def test_value_and_derivatives_by_hand(
    loss: PairLoss, value: float, of_chosen: float, of_rejected: float
) -> None:
    chosen = torch.tensor([CHOSEN], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([REJECTED], dtype=torch.float64, requires_grad=True)
    result = loss(chosen, rejected, BETA)
    result.sum().backward()
    assert result.item() == pytest.approx(value, abs=1e-6)
    assert chosen.grad.item() == pytest.approx(of_chosen)
    assert rejected.grad.item() == pytest.approx(of_rejected)


def test_at_the_reference() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    expected = [math.log(2)] * 3 + [1.0, 25.0, 1.0, 1.0]  # IPO: (0 - 1 / 0.2)^2
    assert [loss(zero, zero, BETA).item() for loss in LOSSES] == pytest.approx(expected)


def test_robust_is_unbiased_under_flipped_labels() -> None:
    chosen, rejected = torch.tensor([CHOSEN]).double(), torch.tensor([REJECTED]).double()
    clean = sigmoid_pair_loss(chosen, rejected, BETA)
    expectation = 0.8 * ROBUST(chosen, rejected, BETA) + 0.2 * ROBUST(rejected, chosen, BETA)
    torch.testing.assert_close(expectation, clean)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(loss: PairLoss, dtype: torch.dtype) -> None:
    for sign in (1, -1):
        chosen = torch.tensor([sign * 1e4], dtype=dtype, requires_grad=True)
        rejected = torch.tensor([-sign * 1e4], dtype=dtype, requires_grad=True)
        result = loss(chosen, rejected, 1.0)
        result.sum().backward()
        assert result.dtype == dtype
        for tensor in (result, chosen.grad, rejected.grad):
            assert bool(tensor.isfinite().all())


def test_far_on_the_wrong_side_the_gradient_is_whole() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    sigmoid_pair_loss(chosen, torch.tensor([1e4]), 0.1).sum().backward()
    assert chosen.grad.item() == pytest.approx(-0.1)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss: PairLoss) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x[0], x[1], 0.7), values)


@pytest.mark.parametrize("loss", [sigmoid_pair_loss, robust_pair_loss])
@pytest.mark.parametrize("label_smoothing", [-0.1, 0.5, math.nan])
def test_label_smoothing_out_of_range_is_named(loss: PairLoss, label_smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 0.5\), got"):
        loss(torch.zeros(1), torch.zeros(1), 0.1, label_smoothing=label_smoothing)  # type: ignore[call-arg]
