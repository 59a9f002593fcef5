import math

import pytest
import torch
from burnish_losses import kl_k1, kl_k2, kl_k3
from hypothesis import given
from hypothesis import strategies as st

POLICY = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def test_by_hand() -> None:
    # The reference gives the token twice the policy's probability: x = ln 2.
    logprobs, reference = torch.tensor([math.log(0.25)]), torch.tensor([math.log(0.5)])
    assert kl_k1(logprobs, reference).item() == pytest.approx(-math.log(2))
    assert kl_k2(logprobs, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(logprobs, reference).item() == pytest.approx(2 - math.log(2) - 1)


def test_k1_and_k3_are_unbiased() -> None:
    exact = (POLICY * (POLICY / REFERENCE).log()).sum()
    for estimator in (kl_k1, kl_k3):
        expectation = (POLICY * estimator(POLICY.log(), REFERENCE.log())).sum()
        torch.testing.assert_close(expectation, exact)


def test_gradients_over_the_whole_vocabulary_are_those_documented() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)

    def gradient(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits)[0]

    def log_policy() -> torch.Tensor:
        return logits.log_softmax(0)

    def expected(per_token: torch.Tensor) -> torch.Tensor:
        return gradient((log_policy().exp().detach() * per_token).sum())

    reference = REFERENCE.log()
    reverse = gradient((log_policy().exp() * (log_policy() - reference)).sum())
    forward = gradient((REFERENCE * (reference - log_policy())).sum())
    weight = (log_policy() - log_policy().detach()).exp()

    torch.testing.assert_close(
        expected(kl_k1(log_policy(), reference)), torch.zeros_like(logits), rtol=0, atol=1e-15
    )
    torch.testing.assert_close(expected(kl_k2(log_policy(), reference)), reverse)
    torch.testing.assert_close(expected(kl_k3(log_policy(), reference)), forward)
    torch.testing.assert_close(expected(weight * kl_k3(log_policy(), reference)), reverse)
    assert (reverse - forward).abs().max() > 0.01  # else the lines above would say nothing


def test_k3_is_finite_where_the_policy_has_lost_the_token() -> None:
    logprobs = torch.tensor([-30.0, -300.0], requires_grad=True)
    kl = kl_k3(logprobs, torch.tensor([-1.0, -1.0]))
    kl.sum().backward()
    # x = 29 and 299; beyond 20 the exponential goes on as its tangent.
    slope = math.exp(20)
    expected = torch.tensor([slope * (1 + 9) - 30, slope * (1 + 279) - 300])
    torch.testing.assert_close(kl.detach(), expected)
    torch.testing.assert_close(logprobs.grad, torch.full((2,), -(slope - 1)))


def test_k3_where_the_reference_has_lost_the_token() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = kl_k3(logprobs, torch.tensor([-30.0]))
    kl.sum().backward()
    assert kl.item() == pytest.approx(28.0)
    torch.testing.assert_close(logprobs.grad, torch.ones(1))


@given(st.floats(-40, 0), st.floats(-40, 0))
def test_k2_and_k3_are_never_negative(logprob: float, reference: float) -> None:
    inputs = (torch.tensor([logprob]).double(), torch.tensor([reference]).double())
    assert kl_k2(*inputs).item() >= 0
    assert kl_k3(*inputs).item() >= -1e-15


def test_equal_policies_have_none() -> None:
    logprobs = torch.tensor([-0.1, -3.0, -20.0])
    for estimator in (kl_k1, kl_k2, kl_k3):
        assert estimator(logprobs, logprobs).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_gradcheck(estimator: object) -> None:
    logprobs = torch.tensor([-0.5, -2.0, -24.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(estimator, (logprobs, reference))  # type: ignore[arg-type]
