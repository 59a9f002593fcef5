import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from burnish_losses import (
    count,
    effective_sample_size,
    finalize,
    icepop_importance,
    masked_importance,
    policy_gradient_loss,
    reinforce_surrogate,
    sequence_geometric_mean,
    sequence_masked_importance,
    sequence_product,
    total,
    truncated_importance,
)
from torch import Tensor

# Two sequences of 2 and 3 trained tokens: products 4 * 1/4 = 1 and 2^4 * 2 * 1/4 = 8, geometric
# means 1 and 2.
WEIGHTS = [4.0, 0.25, 16.0, 2.0, 0.25]


def two_sequences(weights: list[float] = WEIGHTS) -> tuple[Tensor, dict[str, Tensor]]:
    log_ratio = torch.tensor(weights).double().log()
    batch = {
        "token_mask": torch.ones(5).bool(),
        "cu_seqlens": torch.tensor([0, 2, 5], dtype=torch.int32),
    }
    return log_ratio, batch


@pytest.mark.parametrize(
    ("importance", "expected"),
    [
        (truncated_importance, [2, 0.25, 2, 2, 0.25]),
        (partial(truncated_importance, low=0.5, high=3.0), [3, 0.5, 3, 2, 0.5]),
        (partial(truncated_importance, level=sequence_product), [1, 1, 2, 2, 2]),
        (
            partial(truncated_importance, level=sequence_geometric_mean, high=1.5),
            [1, 1, 1.5, 1.5, 1.5],
        ),
        (masked_importance, [0, 0.25, 0, 2, 0.25]),
        (partial(masked_importance, level=sequence_product), [1, 1, 0, 0, 0]),
        (partial(masked_importance, level=sequence_geometric_mean, high=2.1), [1, 1, 2, 2, 2]),
        (icepop_importance, [4, 0, 0, 2, 0]),
        (partial(sequence_masked_importance, high=1.9), [4, 0.25, 0, 0, 0]),
        (partial(sequence_masked_importance, low=1.5, high=2.5), [0, 0, 16, 2, 0.25]),
    ],
)
def test_by_hand(importance: Callable[..., Tensor], expected: list[float]) -> None:
    weights = importance(*two_sequences())
    torch.testing.assert_close(weights, torch.tensor(expected).double())


ALL = [truncated_importance, masked_importance, icepop_importance, sequence_masked_importance]


@pytest.mark.parametrize("importance", ALL)
def test_equal_policies_weigh_one_and_weights_carry_no_gradient(
    importance: Callable[..., Tensor],
) -> None:
    log_ratio, batch = two_sequences([1.0] * 5)
    weights = importance(log_ratio.requires_grad_(), batch)
    assert weights.tolist() == [1.0] * 5
    assert not weights.requires_grad


@pytest.mark.parametrize("importance", ALL)
def test_a_token_that_the_engine_rules_out_is_bounded_or_dropped(
    importance: Callable[..., Tensor],
) -> None:
    log_ratio, batch = two_sequences([1.0, 1.0, math.inf, 1.0, 1.0])
    expected = 2.0 if importance is truncated_importance else 0.0
    assert importance(log_ratio, batch)[2] == expected


@pytest.mark.parametrize("importance", ALL[1:])
def test_a_ratio_that_is_no_number_is_dropped(importance: Callable[..., Tensor]) -> None:
    log_ratio, batch = two_sequences([1.0, 1.0, math.nan, 1.0, 1.0])
    assert importance(log_ratio, batch)[2] == 0.0


@pytest.mark.parametrize("importance", ALL)
@pytest.mark.parametrize("window", [(-0.1, 2.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_a_wrong_window_is_named(
    importance: Callable[..., Tensor], window: tuple[float, float]
) -> None:
    low, high = window
    with pytest.raises(ValueError, match=f"0 <= low <= high, got low {low} and high {high}"):
        importance(*two_sequences(), low=low, high=high)


def test_dropped_tokens_stay_in_the_count_and_old_is_the_trainers() -> None:
    log_ratio, batch = two_sequences()
    logprobs = torch.full((5,), -1.0).double().requires_grad_()
    batch |= {
        "advantages": torch.ones(5),
        "old_logprobs": torch.full((5,), -2.0).double(),
        "sampled_logprobs": torch.full((5,), -2.0).double() - log_ratio,
    }
    output = policy_gradient_loss(
        logprobs, batch, surrogate=reinforce_surrogate, importance=icepop_importance
    )
    loss = total(output.terms, count(batch))
    loss.backward()
    # Weights 4, 0, 0, 2, 0 over 5 tokens; -A log pi = 1.
    assert loss.item() == pytest.approx(6 / 5)
    torch.testing.assert_close(logprobs.grad, -torch.tensor([4, 0, 0, 2, 0]).double() / 5)
    metrics = finalize(output.metrics, count(batch))
    assert metrics["importance/mean"] == pytest.approx(6 / 5)
    assert metrics["importance/mean_square"] == pytest.approx(20 / 5)
    assert metrics["importance/zero_fraction"] == pytest.approx(3 / 5)
    # The square of 4 + 2, over 5 times 16 + 4.
    assert effective_sample_size(metrics) == pytest.approx(0.36)


def test_without_old_logprobs_the_weights_are_of_the_current_ones() -> None:
    log_ratio, batch = two_sequences()
    logprobs = torch.full((5,), -1.0).double().requires_grad_()
    batch |= {"advantages": torch.ones(5), "sampled_logprobs": (logprobs - log_ratio).detach()}
    output = policy_gradient_loss(logprobs, batch, importance=truncated_importance)
    loss = total(output.terms, count(batch))
    loss.backward()
    expected = -torch.tensor([2, 0.25, 2, 2, 0.25]).double() / 5  # nothing through the weights
    torch.testing.assert_close(logprobs.grad, expected)
