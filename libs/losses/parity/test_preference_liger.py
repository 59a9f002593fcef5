"""Losses and gradients equal those of Liger's chunked losses, from hidden states, on a CPU.

Liger gets rows of hidden states and labels, chosen then rejected; this library the tokens one after
another, rejected first, with log-probs that never were whole logits either. Liger compiles only for
speed: here it does not. It computes in float32, hence the tolerances.
"""

from functools import partial
from typing import Any

import pytest
import torch
from burnish_losses import (
    LossOutput,
    PairLoss,
    apo_down_pair_loss,
    apo_zero_pair_loss,
    count,
    cpo_loss,
    dpo_loss,
    finalize,
    hinge_pair_loss,
    kto_loss,
    logprobs_from_hidden,
    orpo_loss,
    robust_pair_loss,
    sigmoid_pair_loss,
    simpo_loss,
    total,
)
from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from torch import Tensor

NUM_PAIRS, LENGTH, HIDDEN, VOCABULARY = 3, 6, 5, 11
ORDER = torch.tensor([3, 4, 5, 0, 1, 2])  # rejected first


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def policy() -> tuple[Tensor, Tensor]:
    """Hidden states [2P, L, D] and the head's weight [V, D]."""
    hidden = randn(0, 2 * NUM_PAIRS, LENGTH, HIDDEN).requires_grad_()
    return hidden, randn(1, VOCABULARY, HIDDEN).requires_grad_()


@pytest.fixture
def reference() -> tuple[Tensor, Tensor]:
    return randn(2, 2 * NUM_PAIRS, LENGTH, HIDDEN), randn(3, VOCABULARY, HIDDEN)


@pytest.fixture
def target() -> Tensor:
    """Labels [2P, L], aligned to the hidden states that predict them; -100 is not trained."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(VOCABULARY, (2 * NUM_PAIRS, LENGTH), generator=generator)
    starts = torch.tensor([[1], [3], [0], [2], [4], [1]])
    ends = torch.tensor([[6], [5], [4], [6], [6], [3]])
    position = torch.arange(LENGTH)
    return torch.where((position >= starts) & (position < ends), labels, -100)


def logprobs_of(model: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    hidden, weight = model
    labels = target[ORDER].flatten().clamp(min=0)
    return logprobs_from_hidden(hidden[ORDER].flatten(0, 1), weight, labels, chunk_tokens=4)


def batch_of(target: Tensor, reference: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    mask = (target[ORDER] != -100).flatten()
    is_chosen = ORDER < NUM_PAIRS
    batch = {
        "token_mask": mask,
        "nll_mask": mask & is_chosen.repeat_interleave(LENGTH),
        "cu_seqlens": torch.arange(0, len(mask) + 1, LENGTH, dtype=torch.int32),
        "pair_ids": ORDER % NUM_PAIRS,
        "chosen": is_chosen,
    }
    if reference is not None:
        batch["reference_logprobs"] = logprobs_of(reference, target)
    return batch


def assert_equal(
    output: LossOutput, batch: dict[str, Tensor], liger_loss: Tensor, policy: tuple[Tensor, Tensor]
) -> None:
    loss = total(output.terms, count(batch))
    torch.testing.assert_close(loss, liger_loss, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(liger_loss, policy)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-3
    torch.testing.assert_close(torch.autograd.grad(loss, policy), expected, rtol=1e-4, atol=1e-6)


def liger(
    cls: type, policy: tuple[Tensor, Tensor], target: Tensor, *rest: Any, **settings: Any
) -> tuple[Tensor, Any]:
    hidden, weight = policy
    loss = cls(compiled=False, **settings)
    result: tuple[Tensor, Any] = loss(weight, hidden, target, *rest)
    return result


@pytest.mark.parametrize(
    ("loss_type", "pair_loss"),
    [
        ("sigmoid", sigmoid_pair_loss),
        ("robust", partial(robust_pair_loss, label_smoothing=0.2)),
        ("hinge", hinge_pair_loss),
        ("apo_zero", apo_zero_pair_loss),
        ("apo_down", apo_down_pair_loss),
    ],
)
@pytest.mark.parametrize("length_average", [False, True])
@pytest.mark.parametrize("nll_coefficient", [0.0, 0.3])
def test_dpo(
    loss_type: str,
    pair_loss: PairLoss,
    length_average: bool,
    nll_coefficient: float,
    policy: tuple[Tensor, Tensor],
    reference: tuple[Tensor, Tensor],
    target: Tensor,
) -> None:
    liger_loss, (chosen_logps, rejected_logps, *_, chosen_rewards, rejected_rewards) = liger(
        LigerFusedLinearDPOLoss,
        policy,
        target,
        None,
        *reference,
        loss_type=loss_type,
        beta=0.3,
        label_smoothing=0.2,
        average_log_prob=length_average,
        compute_nll_loss=nll_coefficient > 0,
        alpha=nll_coefficient,
    )
    batch = batch_of(target, reference)
    output = dpo_loss(
        logprobs_of(policy, target),
        batch,
        beta=0.3,
        pair_loss=pair_loss,
        length_average=length_average,
        nll_coefficient=nll_coefficient,
    )
    assert_equal(output, batch, liger_loss, policy)
    metrics = finalize(output.metrics, count(batch))
    for name, values in (
        ("logps/chosen", chosen_logps),
        ("logps/rejected", rejected_logps),
        ("rewards/chosen", chosen_rewards),
        ("rewards/rejected", rejected_rewards),
    ):
        assert metrics[name] == pytest.approx(values.mean().item(), rel=1e-4), name


@pytest.mark.parametrize("length_average", [False, True])
def test_cpo(length_average: bool, policy: tuple[Tensor, Tensor], target: Tensor) -> None:
    liger_loss, _ = liger(
        LigerFusedLinearCPOLoss,
        policy,
        target,
        beta=0.3,
        alpha=0.6,
        label_smoothing=0.2,
        average_log_prob=length_average,
    )
    batch = batch_of(target)
    output = cpo_loss(
        logprobs_of(policy, target),
        batch,
        beta=0.3,
        pair_loss=partial(sigmoid_pair_loss, label_smoothing=0.2),
        length_average=length_average,
        nll_coefficient=0.6,
    )
    assert_equal(output, batch, liger_loss, policy)


@pytest.mark.parametrize("nll_coefficient", [0.0, 0.6])
def test_simpo(nll_coefficient: float, policy: tuple[Tensor, Tensor], target: Tensor) -> None:
    settings = {"beta": 2.0, "gamma": 0.7, "label_smoothing": 0.2}
    liger_loss, _ = liger(
        LigerFusedLinearSimPOLoss,
        policy,
        target,
        compute_nll_loss=nll_coefficient > 0,  # its default is True, unlike the paper
        alpha=nll_coefficient,
        **settings,
    )
    batch = batch_of(target)
    output = simpo_loss(
        logprobs_of(policy, target), batch, nll_coefficient=nll_coefficient, **settings
    )
    assert_equal(output, batch, liger_loss, policy)


def test_orpo(policy: tuple[Tensor, Tensor], target: Tensor) -> None:
    liger_loss, _ = liger(LigerFusedLinearORPOLoss, policy, target, beta=0.3)
    batch = batch_of(target)
    output = orpo_loss(logprobs_of(policy, target), batch, beta=0.3)
    assert_equal(output, batch, liger_loss, policy)


def test_kto(
    policy: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], target: Tensor
) -> None:
    desirable = torch.tensor([True, False, False, True, True, False])
    hidden, weight = policy
    loss = LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, compiled=False)
    liger_loss, _ = loss(
        hidden,
        weight,
        target,
        bias=None,
        preference_labels=desirable,
        ref_input=reference[0],
        ref_weight=reference[1],
        kl=torch.tensor(0.4),
    )
    batch = batch_of(target, reference) | {"desirable": desirable[ORDER]}
    output = kto_loss(logprobs_of(policy, target), batch, kl_baseline=0.4, beta=0.3)
    assert_equal(output, batch, liger_loss, policy)
