import math

import pytest
import torch
from burnish_losses import count, finalize, nll_loss, sequence_mean, total


def two_sequences() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Three and two tokens, first ones untrained: probabilities 1/2, 1/4 | 1/8."""
    logprobs = torch.tensor([0.9, 0.5, 0.25, 0.9, 0.125], dtype=torch.float64).log()
    batch = {
        "token_mask": torch.tensor([False, True, True, False, True]),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    return logprobs.requires_grad_(), batch


def test_the_mean_over_tokens_by_hand() -> None:
    logprobs, batch = two_sequences()
    output = nll_loss(logprobs, batch)
    loss = total(output.terms, count(batch))
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 3) * math.log(2) / 3)
    expected = torch.tensor([0, -1, -1, 0, -1], dtype=torch.float64) / 3
    torch.testing.assert_close(logprobs.grad, expected)


def test_the_mean_over_sequences_by_hand_and_the_metric_stays_that_over_tokens() -> None:
    logprobs, batch = two_sequences()
    output = nll_loss(logprobs, batch, aggregate=sequence_mean)
    loss = total(output.terms, count(batch))
    loss.backward()
    assert loss.item() == pytest.approx((3 / 2 + 3) * math.log(2) / 2)
    expected = torch.tensor([0, -1 / 4, -1 / 4, 0, -1 / 2], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    # The geometric mean of the probabilities is 1/4: a perplexity of 4.
    nll = finalize(output.metrics, count(batch))["nll"]
    assert math.exp(nll) == pytest.approx(4.0)


def test_a_tokens_weight_is_how_often_its_loss_counts() -> None:
    logprobs, batch = two_sequences()
    weights = torch.tensor([math.nan, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64)
    output = nll_loss(logprobs, {**batch, "token_weights": weights})
    loss = total(output.terms, count(batch))
    loss.backward()
    assert loss.item() == pytest.approx((0.5 * 1 + 2) * math.log(2) / 3)
    expected = torch.tensor([0, -0.5, -1, 0, 0], dtype=torch.float64) / 3
    torch.testing.assert_close(logprobs.grad, expected)
    assert finalize(output.metrics, count(batch))["nll"] == pytest.approx(2 * math.log(2))
    with pytest.raises(ValueError, match="token_weights must be named so, got 'token_weight'"):
        nll_loss(logprobs, {**batch, "token_weight": weights})


def test_100_tokens_at_2_and_900_at_one_half_are_0_65() -> None:
    losses = []
    for num_tokens, nll in ((100, 2.0), (900, 0.5)):
        batch = {
            "token_mask": torch.ones(num_tokens).bool(),
            "cu_seqlens": torch.tensor([0, num_tokens], dtype=torch.int32),
        }
        output = nll_loss(torch.full((num_tokens,), -nll, dtype=torch.float64), batch)
        losses.append(total(output.terms, {"tokens": 1000, "sequences": 2}).item())
    # (100 * 2.0 + 900 * 0.5) / 1000, not the mean of the means, 1.25.
    assert sum(losses) == pytest.approx(0.65)


def test_nothing_trained_is_zero_with_zero_gradients() -> None:
    logprobs = torch.tensor([math.nan, -math.inf, -1.0], requires_grad=True)
    batch = {
        "token_mask": torch.zeros(3).bool(),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
    }
    output = nll_loss(logprobs, batch)
    loss = total(output.terms, count(batch))
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(logprobs.grad, torch.zeros(3))
    assert math.isnan(finalize(output.metrics, count(batch))["nll"])


def test_a_nan_at_an_untrained_token_does_not_matter() -> None:
    logprobs, batch = two_sequences()
    poisoned = torch.where(batch["token_mask"], logprobs.detach(), math.nan).requires_grad_()
    results = []
    for values in (logprobs, poisoned):
        output = nll_loss(values, batch, aggregate=sequence_mean)
        total(output.terms, count(batch)).backward()
        results.append((values.grad, finalize(output.metrics, count(batch))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=0)
    assert results[1][1] == results[0][1]


def test_gradcheck() -> None:
    logprobs, batch = two_sequences()
    assert torch.autograd.gradcheck(
        lambda values: total(nll_loss(values, batch).terms, count(batch)), logprobs
    )


def test_wrong_inputs_are_named() -> None:
    logprobs, batch = two_sequences()
    with pytest.raises(ValueError, match="must have the column token_mask"):
        nll_loss(logprobs, {})
    with pytest.raises(ValueError, match=r"token_mask must be bool, got torch.int64"):
        nll_loss(logprobs, {"token_mask": batch["token_mask"].long()})
