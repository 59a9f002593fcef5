import math
from collections.abc import Callable

import pytest
import torch
from burnish_losses import kl_k1, kl_k2, kl_k2_off_policy, kl_k3, kl_k3_off_policy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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


def gradients_of(logits: Tensor, drawn_from: Tensor) -> dict[str, Tensor]:
    """By the logits, of each estimator's expectation over tokens drawn from `drawn_from`, and of
    the divergences written out; each token of the vocabulary enumerated."""
    policy, reference = logits.log_softmax(0), REFERENCE.log()
    losses = {
        estimator.__name__: drawn_from @ estimator(policy, reference, drawn_from.log())
        for estimator in (kl_k1, kl_k2, kl_k3, kl_k2_off_policy, kl_k3_off_policy)
    }
    losses["KL(policy || reference)"] = (policy.exp() * (policy - reference)).sum()
    losses["KL(reference || policy)"] = (REFERENCE * (reference - policy)).sum()
    losses["KL(old || policy)"] = (drawn_from * (drawn_from.log() - policy)).sum()
    return {
        name: torch.autograd.grad(loss, logits, retain_graph=True)[0]
        for name, loss in losses.items()
    }


def test_on_policy_gradients_are_those_documented() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    gradients = gradients_of(logits, drawn_from=logits.detach().softmax(0))
    reverse, forward = gradients["KL(policy || reference)"], gradients["KL(reference || policy)"]
    torch.testing.assert_close(gradients["kl_k1"], torch.zeros_like(logits), rtol=0, atol=1e-15)
    torch.testing.assert_close(gradients["kl_k2"], reverse)
    torch.testing.assert_close(gradients["kl_k3"], forward)
    torch.testing.assert_close(gradients["kl_k2_off_policy"], reverse)
    torch.testing.assert_close(gradients["kl_k3_off_policy"], reverse)
    assert (reverse - forward).abs().max() > 0.01  # else the lines above would say nothing


def test_off_policy_gradients_are_those_documented() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    gradients = gradients_of(logits, drawn_from=POLICY)
    reverse = gradients["KL(policy || reference)"]
    torch.testing.assert_close(gradients["kl_k1"], -gradients["KL(old || policy)"])
    torch.testing.assert_close(gradients["kl_k2_off_policy"], reverse)
    torch.testing.assert_close(gradients["kl_k3_off_policy"], reverse)
    for plain in ("kl_k2", "kl_k3"):
        for divergence in ("KL(policy || reference)", "KL(reference || policy)"):
            assert (gradients[plain] - gradients[divergence]).abs().max() > 0.01


def test_off_policy_values_by_hand() -> None:
    # Policy 0.25, reference 0.5, old 0.125: x = ln 2, ratio 2.
    inputs = (torch.tensor([p]).log() for p in (0.25, 0.5, 0.125))
    logprobs, reference, old = inputs
    k2, k3 = math.log(2) ** 2 / 2, 1 - math.log(2)
    assert kl_k2_off_policy(logprobs, reference, old).item() == pytest.approx(2 * k2)
    assert kl_k3_off_policy(logprobs, reference, old).item() == pytest.approx(2 * k3)


def test_k3_is_finite_where_the_policy_has_lost_the_token() -> None:
    logprobs = torch.tensor([-30.0, -300.0], requires_grad=True)
    kl = kl_k3(logprobs, torch.tensor([-1.0, -1.0]))
    kl.sum().backward()
    # x = 29 and 299; beyond 20 the exponential goes on as its tangent.
    slope = math.exp(20)
    expected = torch.tensor([slope * (1 + 9) - 30, slope * (1 + 279) - 300])
    torch.testing.assert_close(kl.detach(), expected)
    torch.testing.assert_close(logprobs.grad, torch.full((2,), -(slope - 1)))


@pytest.mark.parametrize("estimator", [kl_k2_off_policy, kl_k3_off_policy])
def test_off_policy_forms_are_finite_where_the_policy_has_lost_the_token(
    estimator: Callable[..., Tensor],
) -> None:
    logprobs = torch.tensor([-30.0], requires_grad=True)
    kl = estimator(logprobs, torch.tensor([-1.0]), torch.tensor([-2.0]))
    kl.sum().backward()
    assert math.isfinite(kl.item())
    # The token is less likely than the reference has it: descent makes it likelier.
    assert math.isfinite(logprobs.grad.item())
    if estimator is kl_k2_off_policy:
        assert logprobs.grad.item() == pytest.approx(math.exp(-28) * -29)


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


def test_gradcheck_off_policy() -> None:
    logprobs = torch.tensor([-0.5, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    old = torch.tensor([-0.6, -1.5, -4.5], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_k3_off_policy(x, reference, old), logprobs)
    # k2's weight is held fixed: its gradient is (p / q) * (log p - log r).
    (gradient,) = torch.autograd.grad(kl_k2_off_policy(logprobs, reference, old).sum(), logprobs)
    expected = (logprobs - old).exp() * (logprobs - reference)
    torch.testing.assert_close(gradient, expected.detach())
