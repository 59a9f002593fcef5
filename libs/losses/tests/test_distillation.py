import math
from collections.abc import Callable

import pytest
import torch
from burnish_losses import (
    clipped_surrogate,
    count,
    distillation_loss,
    divergence_from_hidden,
    divergence_from_logits,
    finalize,
    forward_kl,
    jensen_shannon,
    on_policy_distillation_advantages,
    renormalized,
    reverse_kl,
    sequence_mean,
    top_k_divergence,
    total,
    with_tail,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

NAN, LN2 = math.nan, math.log(2)
STUDENT = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
TEACHER = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
DIVERGENCES = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "jensen-shannon": jensen_shannon(),
    "jensen-shannon 0.1": jensen_shannon(0.1),
}


def logits(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        # 1/4 ln(1/2) + 1/2 ln 2 + 0.
        (forward_kl, LN2 / 4),
        # 1/2 ln 2 + 1/4 ln(1/2).
        (reverse_kl, LN2 / 4),
        # m = 3/8, 3/8, 1/4; each KL 1/2 ln(4/3) + 1/4 ln(2/3).
        (jensen_shannon(), 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        # m = (teacher + 3 student) / 4 = 7/16, 5/16, 1/4.
        (
            jensen_shannon(0.25),
            0.25 * (0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5))
            + 0.75 * (0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)),
        ),
    ],
)
def test_by_hand(divergence: Callable[[Tensor, Tensor], Tensor], expected: float) -> None:
    assert divergence(STUDENT.log(), TEACHER.log()).item() == pytest.approx(expected, abs=1e-14)


def test_which_way_each_goes() -> None:
    # The student has lost a token of the teacher's; the teacher never drew one of the student's.
    lost, kept = torch.tensor([1.0, 0.0]).log(), torch.tensor([0.5, 0.5]).log()
    assert forward_kl(lost, kept).item() == math.inf
    assert reverse_kl(lost, kept).item() == pytest.approx(LN2)
    assert forward_kl(kept, lost).item() == pytest.approx(LN2)
    assert reverse_kl(kept, lost).item() == math.inf
    # m = 3/4, 1/4: (1/2 ln(2/3) + 1/2 ln 2 + ln(4/3)) / 2, either way.
    expected = (0.5 * math.log(2 / 3) + 0.5 * LN2 + math.log(4 / 3)) / 2
    assert jensen_shannon()(lost, kept).item() == pytest.approx(expected)
    assert jensen_shannon()(kept, lost).item() == pytest.approx(expected)


def test_jensen_shannon_has_the_kls_as_limits() -> None:
    student, teacher = STUDENT.log(), torch.tensor([0.7, 0.2, 0.1]).double().log()
    assert jensen_shannon(0) is forward_kl
    assert jensen_shannon(1) is reverse_kl
    small = 1e-6
    forward = jensen_shannon(small)(student, teacher) / small
    torch.testing.assert_close(forward, forward_kl(student, teacher), rtol=1e-4, atol=0)
    reverse = jensen_shannon(1 - small)(student, teacher) / small
    torch.testing.assert_close(reverse, reverse_kl(student, teacher), rtol=1e-4, atol=0)
    assert abs(forward_kl(student, teacher) - reverse_kl(student, teacher)) > 0.01
    for beta in (-0.1, 1.1, NAN):
        with pytest.raises(ValueError, match=r"beta must be in \[0, 1\]"):
            jensen_shannon(beta)


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
@given(seed=st.integers(0, 1000))
def test_never_negative_and_zero_for_equals(
    divergence: Callable[[Tensor, Tensor], Tensor], seed: int
) -> None:
    student, teacher = logits(4, 6, seed=seed), logits(4, 6, seed=seed + 1)
    mask = torch.ones(4).bool()
    values = divergence_from_logits(student, teacher, mask, divergence=divergence)
    assert (values > 0).all()
    same = divergence_from_logits(student, student + 3, mask, divergence=divergence)
    torch.testing.assert_close(same, torch.zeros(4).double(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_gradcheck(divergence: Callable[[Tensor, Tensor], Tensor]) -> None:
    mask, teacher = torch.tensor([True, False, True]), logits(3, 5, seed=1)
    student = logits(3, 5).requires_grad_()

    def values(student: Tensor) -> Tensor:
        return divergence_from_logits(
            student, teacher, mask, divergence=divergence, temperature=0.7
        )

    assert torch.autograd.gradcheck(values, (student,))


def test_forward_kl_has_the_gradient_of_soft_labels() -> None:
    # d/dlogits = (student - teacher) / temperature.
    student, teacher = logits(1, 5).requires_grad_(), logits(1, 5, seed=1)
    divergence_from_logits(student, teacher, torch.ones(1).bool(), temperature=2.0).sum().backward()
    difference = (student.detach() / 2).softmax(-1) - (teacher / 2).softmax(-1)
    torch.testing.assert_close(student.grad, difference / 2)


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_masked_nan_and_excluded_tokens_are_harmless(
    divergence: Callable[[Tensor, Tensor], Tensor],
) -> None:
    student, teacher = logits(3, 5), logits(3, 5, seed=1)
    expected = divergence_from_logits(
        student[1:2, :4], teacher[1:2, :4], torch.ones(1).bool(), divergence=divergence
    )
    student[0], teacher[2] = NAN, NAN  # not trained
    student[1, 4] = teacher[1, 4] = -math.inf  # excluded by both
    student.requires_grad_()
    mask = torch.tensor([False, True, False])
    values = divergence_from_logits(student, teacher, mask, divergence=divergence)
    torch.testing.assert_close(values, torch.cat([torch.zeros(1), expected.detach(), values[2:]]))
    values.sum().backward()
    assert student.grad.isfinite().all()
    assert (student.grad[[0, 2]] == 0).all()
    assert student.grad[1, 4] == 0
    assert (student.grad[1, :4] != 0).all()


def test_a_broken_trained_token_is_not_hidden() -> None:
    student = logits(2, 5)
    student[0] = NAN
    for divergence in DIVERGENCES.values():
        values = divergence_from_logits(
            student, logits(2, 5, seed=1), torch.ones(2).bool(), divergence=divergence
        )
        assert values.isnan().tolist() == [True, False]


def test_tail_and_renormalised_by_hand() -> None:
    # Two of three tokens kept, in (student, teacher): (1/2, 1/4), (1/4, 1/2); the tails are alike.
    student, teacher = STUDENT[None, :2].log(), TEACHER[None, :2].log()
    mask = torch.ones(1).bool()
    torch.testing.assert_close(with_tail(student).exp(), STUDENT[None])
    torch.testing.assert_close(renormalized(student).exp(), torch.tensor([[2 / 3, 1 / 3]]).double())
    tail = top_k_divergence(student, teacher, mask)
    assert tail.item() == pytest.approx(LN2 / 4)
    # 1/3 ln(1/2) + 2/3 ln 2.
    kept = top_k_divergence(student, teacher, mask, support=renormalized)
    assert kept.item() == pytest.approx(LN2 / 3)


@given(seed=st.integers(0, 1000), num_kept=st.integers(1, 5))
def test_with_a_tail_the_forward_kl_lacks_what_the_tails_differ_by(
    seed: int, num_kept: int
) -> None:
    student, teacher = (logits(1, 6, seed=s).log_softmax(-1) for s in (seed, seed + 1))
    ids = teacher.topk(num_kept).indices
    others = torch.ones(6).bool()
    others[ids[0]] = False
    seen = top_k_divergence(student.gather(1, ids), teacher.gather(1, ids), torch.ones(1).bool())
    within = forward_kl(renormalized(student[:, others]), renormalized(teacher[:, others]))
    mass = teacher[:, others].exp().sum(-1)
    torch.testing.assert_close(seen + mass * within, forward_kl(student, teacher))


def test_renormalised_is_blind_to_mass_elsewhere_and_the_tail_is_not() -> None:
    teacher = torch.tensor([[0.5, 0.25]]).double().log()
    student = torch.tensor([[0.02, 0.01]]).double().log()
    mask = torch.ones(1).bool()
    kept = top_k_divergence(student, teacher, mask, support=renormalized)
    assert kept.item() == pytest.approx(0.0, abs=1e-15)
    # 3/4 ln 25 + 1/4 ln(0.25 / 0.97).
    expected = 0.75 * math.log(25) + 0.25 * math.log(0.25 / 0.97)
    assert top_k_divergence(student, teacher, mask).item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_gradients_are_finite_when_nothing_is_left_of_the_tail(dtype: torch.dtype) -> None:
    # The whole vocabulary is kept, and its float32 sum may be above 1.
    student = logits(64, 6).to(dtype).requires_grad_()
    teacher = logits(64, 6, seed=1).to(dtype)
    mask = torch.ones(64).bool()
    seen = top_k_divergence(student.log_softmax(-1), teacher.log_softmax(-1), mask)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    whole = divergence_from_logits(student, teacher, mask)
    torch.testing.assert_close(seen, whole, rtol=tolerance, atol=tolerance)
    (gradient,) = torch.autograd.grad(seen.sum(), student)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(whole.sum(), student)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("support", [with_tail, renormalized])
def test_top_k_gradcheck_with_masked_nan(support: Callable[[Tensor], Tensor]) -> None:
    student = logits(3, 5).log_softmax(-1)[:, :2]
    teacher = logits(3, 5, seed=1).log_softmax(-1)[:, :2].clone()
    student, mask = student.clone(), torch.tensor([True, False, True])
    student[1], teacher[1] = NAN, NAN
    student.requires_grad_()
    values = top_k_divergence(student, teacher, mask, support=support)
    values.sum().backward()
    assert values[1] == 0
    assert (student.grad[1] == 0).all()
    assert (student.grad[[0, 2]] != 0).all()
    trained = student.detach()[[0, 2]].requires_grad_()
    both = torch.ones(2).bool()
    assert torch.autograd.gradcheck(
        lambda s: top_k_divergence(s, teacher[[0, 2]], both, support=support), (trained,)
    )


def test_on_policy_advantages_by_hand() -> None:
    logprobs, teacher = torch.tensor([-1.0, NAN, -3.0]), torch.tensor([-2.0, -1.0, -1.0])
    mask = torch.tensor([True, False, True])
    advantages = on_policy_distillation_advantages(logprobs.requires_grad_(), teacher, mask)
    assert advantages.tolist() == [-1.0, 0.0, 2.0]
    assert not advantages.requires_grad
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        on_policy_distillation_advantages(logprobs, teacher[:2], mask)


def test_on_policy_gradient_over_the_whole_vocabulary_is_that_of_the_reverse_kl() -> None:
    student, teacher = logits(5).requires_grad_(), logits(5, seed=1).log_softmax(-1)
    logprobs = student.log_softmax(-1)
    advantages = on_policy_distillation_advantages(logprobs, teacher, torch.ones(5).bool())
    ratios = (logprobs - logprobs.detach()).exp()
    losses = clipped_surrogate(ratios, advantages, clip_low=0.2, clip_high=0.2)
    expected_loss = (logprobs.exp().detach() * losses).sum()
    (estimate,) = torch.autograd.grad(expected_loss, student, retain_graph=True)
    (reverse,) = torch.autograd.grad(reverse_kl(logprobs, teacher), student, retain_graph=True)
    (forward,) = torch.autograd.grad(forward_kl(logprobs, teacher), student)
    torch.testing.assert_close(estimate, reverse)
    assert (estimate - forward).abs().max() > 0.01


def test_loss_by_hand() -> None:
    # Sequences of 2 and 1 trained tokens.
    batch = {
        "token_mask": torch.tensor([True, True, False, True]),
        "cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32),
    }
    values = torch.tensor([1.0, 2.0, NAN, 6.0], requires_grad=True)
    counts = count(batch)
    output = distillation_loss(values, batch)
    assert total(output.terms, counts).item() == pytest.approx(3.0)
    assert finalize(output.metrics, counts) == {"loss/distillation": pytest.approx(3.0)}
    total(output.terms, counts).backward()
    torch.testing.assert_close(values.grad, torch.tensor([1 / 3, 1 / 3, 0, 1 / 3]))
    by_sequence = distillation_loss(values, batch, aggregate=sequence_mean)
    assert total(by_sequence.terms, counts).item() == pytest.approx((1.5 + 6) / 2)


def test_all_masked_or_empty_gives_zero_and_zero_gradients() -> None:
    for num_tokens in (0, 3):
        student = torch.full((num_tokens, 5), NAN, requires_grad=True)
        head = torch.zeros(5, 4, requires_grad=True)
        hidden = torch.full((num_tokens, 4), NAN, requires_grad=True)
        mask = torch.zeros(num_tokens).bool()
        batch = {"token_mask": mask, "cu_seqlens": torch.tensor([0, num_tokens])}
        teacher = student.detach()
        for values in (
            divergence_from_logits(student, teacher, mask),
            divergence_from_hidden(hidden, head, hidden, head, mask),
            top_k_divergence(student, teacher, mask),
        ):
            loss = total(distillation_loss(values, batch).terms, count(batch))
            assert loss.item() == 0
            loss.backward()
        for tensor in (student, hidden, head):
            assert (tensor.grad == 0).all()


def test_shapes_and_settings_are_checked() -> None:
    student, mask = torch.zeros(3, 5), torch.ones(3).bool()
    with pytest.raises(ValueError, match="Student and teacher must have one shape"):
        divergence_from_logits(student, torch.zeros(3, 6), mask)
    with pytest.raises(ValueError, match="Student and teacher must have one shape"):
        top_k_divergence(student, student, mask[:2])
    with pytest.raises(ValueError, match="token_mask must be bool"):
        divergence_from_logits(student, student, torch.ones(3))
    for temperature in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="temperature must be positive"):
            divergence_from_logits(student, student, mask, temperature=temperature)
