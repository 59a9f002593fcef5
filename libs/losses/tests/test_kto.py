import math

import pytest
import torch
from burnish_losses import (
    LossOutput,
    count,
    finalize,
    kto_baseline,
    kto_log_ratio_sum,
    kto_loss,
    total,
)

Columns = dict[str, torch.Tensor]


def three_sequences() -> tuple[torch.Tensor, Columns]:
    """Log-ratios 2 (2 tokens, desirable), -1 (desirable), 3 (not); a fourth without any token."""
    logprobs = [-9.0, -1.0, -1.0, -9.0, -3.0, -9.0, 1.0, -9.0]
    mask = [False, True, True, False, True, False, True, False]
    batch = {
        "token_mask": torch.tensor(mask),
        "reference_logprobs": torch.full((8,), -2.0, dtype=torch.float64),
        "cu_seqlens": torch.tensor([0, 3, 5, 7, 8], dtype=torch.int32),
        "desirable": torch.tensor([True, True, False, True]),
    }
    return torch.tensor(logprobs, dtype=torch.float64, requires_grad=True), batch


def loss_of(output: LossOutput, batch: Columns) -> torch.Tensor:
    return total(output.terms, count(batch))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_by_hand() -> None:
    logprobs, batch = three_sequences()
    output = kto_loss(
        logprobs, batch, kl_baseline=0.5, beta=0.2, desirable_weight=2.0, undesirable_weight=3.0
    )
    loss = loss_of(output, batch)
    loss.backward()
    # Gains 1.5, -1.5 and, undesirable, 0.5 - 3 = -2.5; the fourth sequence counts nowhere.
    losses = [2 * sigmoid(-0.3), 2 * sigmoid(0.3), 3 * sigmoid(0.5)]
    assert loss.item() == pytest.approx(sum(losses) / 3)
    slope, other = sigmoid(0.3) * sigmoid(-0.3), sigmoid(0.5) * sigmoid(-0.5)
    first, third = -2 * 0.2 * slope / 3, 3 * 0.2 * other / 3
    expected = torch.tensor([0, first, first, 0, first, 0, third, 0], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


def test_metrics_by_hand() -> None:
    logprobs, batch = three_sequences()
    output = kto_loss(logprobs, batch, kl_baseline=2.0, beta=0.2)  # gains 0, -3, -1
    assert finalize(output.metrics, count(batch)) == pytest.approx(
        {
            "loss/preference": (0.5 + sigmoid(0.6) + sigmoid(0.2)) / 3,
            "rewards/accuracy": 0.5 / 3,  # a tie is half right
            "rewards/desirable_sum": 0.2 * (2 - 1),
            "rewards/undesirable_sum": 0.2 * 3,
            "num_desirable": 2,
            "num_undesirable": 1,
        }
    )


def test_the_baseline_by_hand_is_clamped_once_over_all() -> None:
    logprobs, batch = three_sequences()
    first = kto_log_ratio_sum(logprobs, batch)
    assert first.item() == pytest.approx(2 - 1 + 3)
    assert not first.requires_grad
    other = torch.tensor(-3.0)  # another micro-batch of one sequence, below 0 by itself
    assert kto_baseline(first + other, 4).item() == pytest.approx(1 / 4)
    assert kto_baseline(first + 2 * other, 5).item() == 0.0
    assert kto_baseline(torch.tensor(0.0), 0).item() == 0.0


def test_the_baseline_carries_no_gradient() -> None:
    logprobs, batch = three_sequences()
    gradients = []
    for baseline in (0.5, logprobs.sum() * 0 + 0.5):
        logprobs.grad = None
        loss_of(kto_loss(logprobs, batch, kl_baseline=baseline), batch).backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_at_untrained_tokens_does_not_matter(poison: float) -> None:
    logprobs, batch = three_sequences()
    untrained = ~batch["token_mask"]
    poisoned = torch.where(untrained, poison, logprobs.detach()).requires_grad_()
    column = torch.where(untrained, poison, batch["reference_logprobs"])
    clean = kto_loss(logprobs, batch, kl_baseline=0.5)
    dirty = kto_loss(poisoned, batch | {"reference_logprobs": column}, kl_baseline=0.5)
    loss_of(clean, batch).backward()
    loss_of(dirty, batch).backward()
    torch.testing.assert_close(poisoned.grad, logprobs.grad, rtol=0, atol=0)
    assert finalize(dirty.metrics, count(batch)) == finalize(clean.metrics, count(batch))


@pytest.mark.parametrize("ends", [[0], [0, 8], [0, 3, 8]])
def test_nothing_trained_is_a_connected_zero(ends: list[int]) -> None:
    num_tokens, num_sequences = ends[-1], len(ends) - 1
    batch = {
        "token_mask": torch.zeros(num_tokens).bool(),
        "reference_logprobs": torch.full((num_tokens,), math.nan),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
        "desirable": torch.ones(num_sequences).bool(),
    }
    logprobs = torch.full((num_tokens,), math.nan, requires_grad=True)
    loss = loss_of(kto_loss(logprobs, batch, kl_baseline=0.5), batch)
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(logprobs.grad, torch.zeros(num_tokens))
    assert kto_log_ratio_sum(logprobs, batch).item() == 0.0


def test_far_log_ratios_stay_finite() -> None:
    logprobs, batch = three_sequences()
    far = (1e5 * logprobs.detach()).float().requires_grad_()
    loss = loss_of(kto_loss(far, batch, kl_baseline=0.5, beta=1.0), batch)
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(far.grad.isfinite().all())


def test_gradcheck() -> None:
    logprobs, batch = three_sequences()
    assert torch.autograd.gradcheck(
        lambda values: loss_of(kto_loss(values, batch, kl_baseline=0.5), batch), logprobs
    )


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"desirable": torch.ones(4)}, {}, "desirable must be bool, got torch.float32"),
        ({"desirable": torch.ones(8).bool()}, {}, r"desirable must have the shape \(4,\)"),
        ({}, {"beta": 0.0}, "beta must be positive and finite, got 0.0"),
        ({}, {"desirable_weight": -1.0}, "desirable_weight must be 0 or more and finite, got -1.0"),
        (
            {},
            {"undesirable_weight": math.nan},
            "undesirable_weight must be 0 or more and finite, got nan",
        ),
        ({}, {"kl_baseline": -0.1}, "kl_baseline must be one number from 0 on"),
        ({}, {"kl_baseline": math.nan}, "kl_baseline must be one number from 0 on"),
        ({}, {"kl_baseline": torch.zeros(4)}, "kl_baseline must be one number from 0 on"),
    ],
)
def test_wrong_inputs_are_named(change: Columns, settings: dict[str, float], message: str) -> None:
    logprobs, batch = three_sequences()
    with pytest.raises(ValueError, match=message):
        kto_loss(logprobs, batch | change, **({"kl_baseline": 0.5} | settings))
