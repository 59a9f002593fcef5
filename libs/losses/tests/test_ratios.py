import math

import pytest
import torch
from burnish_losses import (
    logprobs_from_logits,
    sequence_geometric_mean,
    sequence_product,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from torch import Tensor


def two_and_five_tokens() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Trained lengths 2 and 5 behind an untrained token each; log-ratios of mean 0.1 and -0.2."""
    log_ratios = torch.tensor([9.0, 0.3, -0.1, 9.0, -0.6, 0.2, -0.4, 0.1, -0.3]).double()
    mask = torch.tensor([False, True, True, False, True, True, True, True, True])
    batch = {"token_mask": mask, "cu_seqlens": torch.tensor([0, 3, 9], dtype=torch.int32)}
    old = torch.full((9,), -2.0).double()
    return (old + log_ratios).requires_grad_(), old, batch


def test_token_ratio_by_hand_and_finite() -> None:
    ratios = token_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -200.0]))
    # Beyond 20 the tangent: exp(20) * (1 + 199 - 20).
    torch.testing.assert_close(ratios, torch.tensor([math.e, math.exp(20) * 180]))


def test_a_token_that_the_policy_rules_out_has_ratio_0() -> None:
    """As one outside the trainer's own top-k may: no NaN, in neither direction."""
    logprobs = torch.tensor([-math.inf, -1.0], requires_grad=True)
    old = torch.tensor([-2.0, -1.0])
    batch = {
        "token_mask": torch.ones(2).bool(),
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32),
    }
    for ratio, expected in ((token_ratio, [0.0, 1.0]), (sequence_ratio, [0.0, 0.0])):
        ratios = ratio(logprobs, old, batch)
        assert ratios.tolist() == expected
        assert torch.autograd.grad(ratios.sum(), logprobs)[0].tolist() == expected


def test_a_sequence_has_one_ratio_whatever_its_length() -> None:
    logprobs, old, batch = two_and_five_tokens()
    ratios = sequence_ratio(logprobs, old, batch)
    expected = torch.tensor([math.exp(0.1)] * 3 + [math.exp(-0.2)] * 6).double()
    torch.testing.assert_close(ratios, expected)


def test_each_trained_token_has_its_share_of_the_sequences_gradient() -> None:
    logprobs, old, batch = two_and_five_tokens()
    first_token_of_each = sequence_ratio(logprobs, old, batch)[[0, 3]]
    (gradient,) = torch.autograd.grad(first_token_of_each.sum(), logprobs)
    shares = [0, *[math.exp(0.1) / 2] * 2, 0, *[math.exp(-0.2) / 5] * 5]
    torch.testing.assert_close(gradient, torch.tensor(shares).double())


def test_gspo_token_has_the_sequences_value_and_the_tokens_gradient() -> None:
    logprobs, old, batch = two_and_five_tokens()
    ratios = sequence_token_ratio(logprobs, old, batch)
    torch.testing.assert_close(ratios, sequence_ratio(logprobs, old, batch))
    weights = torch.arange(9).double()  # what each token's ratio counts in some loss
    (gradient,) = torch.autograd.grad((weights * ratios).sum(), logprobs)
    expected = weights * torch.tensor([math.exp(0.1)] * 3 + [math.exp(-0.2)] * 6).double()
    torch.testing.assert_close(gradient, expected)


def test_levels_by_hand() -> None:
    logprobs, old, batch = two_and_five_tokens()
    log_ratio = (logprobs - old).detach()
    log_ratio[[0, 3]] = math.nan
    product = sequence_product(log_ratio, batch)
    torch.testing.assert_close(product, torch.tensor([0.2] * 3 + [-1.0] * 6).double())
    mean = sequence_geometric_mean(log_ratio, batch)
    torch.testing.assert_close(mean, torch.tensor([0.1] * 3 + [-0.2] * 6).double())


def test_a_sequence_without_trained_tokens_has_ratio_one() -> None:
    logprobs, old, batch = two_and_five_tokens()
    batch["token_mask"][:3] = False
    assert sequence_ratio(logprobs, old, batch)[:3].tolist() == [1.0, 1.0, 1.0]


def test_no_tokens() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    batch = {
        "token_mask": torch.zeros(0).bool(),
        "cu_seqlens": torch.tensor([0], dtype=torch.int32),
    }
    for ratio in (token_ratio, sequence_ratio, sequence_token_ratio):
        assert ratio(nothing, nothing, batch).shape == (0,)


@pytest.mark.parametrize("ratio", [token_ratio, sequence_ratio])
def test_gradcheck(ratio: object) -> None:
    logprobs, old, batch = two_and_five_tokens()
    assert torch.autograd.gradcheck(lambda x: ratio(x, old, batch), logprobs)  # type: ignore[operator]


def test_same_weights_at_temperature_0_7_give_ratio_one() -> None:
    """Both sides name the log-probs of the processed distribution; raw ones would differ."""
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([3, 0, 7, 10, 1])
    engine = torch.log_softmax(logits / 0.7, -1).gather(-1, labels[:, None])[:, 0]
    trainer = logprobs_from_logits(logits, labels, temperature=0.7)
    torch.testing.assert_close(token_ratio(trainer, engine), torch.ones(5).double())
    raw = logprobs_from_logits(logits, labels)
    assert (token_ratio(raw, engine) - 1).abs().max() > 0.1
