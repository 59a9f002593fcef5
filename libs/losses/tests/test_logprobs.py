import math

import pytest
import torch
from burnish_losses import logprobs_from_hidden, logprobs_from_logits

# Weights 1, 2, 5 of three tokens: probabilities 1/8, 2/8, 5/8.
LOGITS = torch.tensor([[1.0, 2.0, 5.0]]).log()


def head(num_tokens: int, *, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(num_tokens, 4, generator=generator, dtype=dtype).requires_grad_(),
        "weight": torch.randn(6, 4, generator=generator, dtype=dtype).requires_grad_(),
        "bias": torch.randn(6, generator=generator, dtype=dtype).requires_grad_(),
        "labels": torch.randint(0, 6, (num_tokens,), generator=generator),
    }


def test_logprobs_by_hand() -> None:
    labels = torch.tensor([2])
    expected = math.log(5 / 8)
    assert logprobs_from_logits(LOGITS, labels).item() == pytest.approx(expected, abs=1e-6)
    fused = logprobs_from_hidden(LOGITS, torch.eye(3), labels)
    assert fused.item() == pytest.approx(expected, abs=1e-6)


def test_temperature_scores_the_distribution_that_was_sampled_from() -> None:
    # Temperature 1/2 squares the weights: 1, 4, 25.
    labels = torch.tensor([1])
    expected = math.log(4 / 30)
    plain = logprobs_from_logits(LOGITS, labels, temperature=0.5)
    fused = logprobs_from_hidden(LOGITS, torch.eye(3), labels, temperature=0.5)
    assert plain.item() == pytest.approx(expected, abs=1e-6)
    assert fused.item() == pytest.approx(expected, abs=1e-6)
    assert logprobs_from_logits(LOGITS, labels).item() != pytest.approx(expected, abs=0.1)


def test_gradient_by_hand() -> None:
    hidden = LOGITS.clone().requires_grad_()
    logprobs_from_hidden(hidden, torch.eye(3), torch.tensor([2])).sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[-1 / 8, -2 / 8, 3 / 8]]))


def test_entropy_and_its_gradient_by_hand() -> None:
    hidden = LOGITS.clone().requires_grad_()
    _, entropy = logprobs_from_hidden(
        hidden, torch.eye(3), torch.tensor([0]), with_entropy=True, temperature=1.0
    )
    probs = (1 / 8, 2 / 8, 5 / 8)
    expected = -sum(p * math.log(p) for p in probs)
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    entropy.sum().backward()
    # dH / dlogit = -p (log p + H)
    by_hand = torch.tensor([[-p * (math.log(p) + expected) for p in probs]])
    torch.testing.assert_close(hidden.grad, by_hand)


def test_entropy_with_excluded_tokens_is_that_of_the_rest() -> None:
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    _, entropy = logprobs_from_hidden(
        torch.zeros(1, 3), torch.eye(3), torch.tensor([0]), bias=bias, with_entropy=True
    )
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_gradcheck_float64(chunk_tokens: int) -> None:
    inputs = head(7)

    def fused(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return logprobs_from_hidden(
            hidden, weight, inputs["labels"], temperature=0.7, chunk_tokens=chunk_tokens, bias=bias
        )

    assert torch.autograd.gradcheck(fused, (inputs["hidden"], inputs["weight"], inputs["bias"]))


def test_logits_gradcheck_float64() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    assert torch.autograd.gradcheck(
        lambda logits: logprobs_from_logits(logits, labels, temperature=1.3), logits
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_equals_logits_in_value_and_gradient(dtype: torch.dtype) -> None:
    results = []
    for fused in (True, False):
        inputs = head(9, dtype=dtype)
        hidden, weight, labels = inputs["hidden"], inputs["weight"], inputs["labels"]
        logprobs = (
            logprobs_from_hidden(hidden, weight, labels, temperature=0.7, chunk_tokens=4)
            if fused
            else logprobs_from_logits(hidden @ weight.T, labels, temperature=0.7)
        )
        assert logprobs.dtype == torch.float32
        (logprobs * torch.arange(9)).sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert hidden.grad.dtype == weight.grad.dtype == dtype
        results.append((logprobs.detach(), hidden.grad.float(), weight.grad.float()))
    # Both round their gradients to the parameters' dtype; its epsilon is the tolerance.
    tolerance = 4 * torch.finfo(dtype).eps
    for fused_value, plain_value in zip(*results, strict=True):
        scale = float(plain_value.abs().max())
        torch.testing.assert_close(fused_value, plain_value, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_is_as_exact_where_a_token_is_nearly_certain(dtype: torch.dtype) -> None:
    """W[label] - p @ W of two rounded products would lose the 1 - p that bfloat16 cannot hold."""
    weight = torch.eye(3, dtype=dtype)
    hidden = torch.tensor([[8.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    logprobs_from_hidden(hidden, weight, torch.tensor([0])).sum().backward()
    rest = math.exp(-8) / (1 + 2 * math.exp(-8))  # of each other token
    expected = torch.tensor([[2 * rest, -rest, -rest]])
    tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(hidden.grad.float(), expected, rtol=tolerance, atol=0)


def test_frozen_inputs_get_no_gradient() -> None:
    inputs = head(3)
    hidden, weight = inputs["hidden"], inputs["weight"].detach()
    logprobs_from_hidden(hidden, weight, inputs["labels"]).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_tokens_stay_attached_to_the_graph() -> None:
    inputs = head(0)
    logprobs = logprobs_from_hidden(inputs["hidden"], inputs["weight"], inputs["labels"])
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    torch.testing.assert_close(inputs["weight"].grad, torch.zeros(6, 4, dtype=torch.float64))


def test_nan_hidden_state_of_an_untrained_token_reaches_no_gradient() -> None:
    inputs = head(4)
    hidden = inputs["hidden"].detach().clone()
    hidden[1] = torch.nan
    hidden.requires_grad_()
    logprobs = logprobs_from_hidden(hidden, inputs["weight"], inputs["labels"], chunk_tokens=2)
    mask = torch.tensor([True, False, True, True])
    torch.where(mask, logprobs, 0.0).sum().backward()
    for gradient in (hidden.grad, inputs["weight"].grad):
        assert gradient is not None
        assert gradient.isfinite().all()
    assert hidden.grad is not None
    assert (hidden.grad[1] == 0).all()
    assert (hidden.grad[[0, 2, 3]] != 0).all()


def test_nan_hidden_state_of_a_trained_token_is_not_hidden() -> None:
    inputs = head(2)
    hidden = inputs["hidden"].detach().clone().fill_(torch.nan)
    logprobs_from_hidden(hidden, inputs["weight"], inputs["labels"]).sum().backward()
    assert inputs["weight"].grad is not None
    assert inputs["weight"].grad.isnan().any()


def test_excluded_tokens_leave_value_and_gradient_finite() -> None:
    # Top-k sampling excludes tokens by -inf; the sampled token itself is always inside.
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    logprobs = logprobs_from_logits(logits, torch.tensor([0]))
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[10_000.0, 0.0]])
    assert logprobs_from_logits(logits, torch.tensor([0])).item() == 0.0
    assert logprobs_from_hidden(logits, torch.eye(2), torch.tensor([1])).item() == -10_000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"must agree, got \(3, 4\), \(6, 4\)"),
        ({"weight": torch.zeros(6, 5, dtype=torch.float64)}, "must agree"),
        ({"weight": torch.zeros(6, 4, dtype=torch.float32)}, "share a dtype"),
        ({"hidden": torch.zeros(1, 3, 4, dtype=torch.float64)}, "hidden must have 2 dimensions"),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, r"bias must be \[V\] = \[6\]"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": math.nan}, "temperature must be positive and finite, got nan"),
        ({"temperature": math.inf}, "temperature must be positive and finite, got inf"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, and an integer, got 0"),
    ],
)
def test_wrong_inputs_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprobs_from_hidden(**{**head(3), **change})  # type: ignore[call-overload]


def test_logits_and_labels_must_align() -> None:
    with pytest.raises(ValueError, match=r"got \(1, 3\) and \(3,\)"):
        logprobs_from_logits(LOGITS, torch.zeros(3, dtype=torch.int64))
