"""The named objectives, each against literal values, and what all of them must bear."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from burnish_losses import (
    LossOutput,
    cispo_loss,
    count,
    dapo_loss,
    dr_grpo_loss,
    finalize,
    grpo_loss,
    gspo_loss,
    icepop_importance,
    policy_gradient_loss,
    ppo_loss,
    reinforce_plus_plus_loss,
    reinforce_surrogate,
    rloo_loss,
    sapo_loss,
    sequence_mean,
    sequence_token_ratio,
    total,
    truncated_importance,
)
from torch import Tensor

Objective = Callable[..., LossOutput]


def two_sequences() -> tuple[Tensor, dict[str, Tensor]]:
    """Two and one trained tokens behind an untrained one each.

    Ratios 1.5, 1.1 | 0.5; advantages 1, 1 | -2; log-probs log(ratio) - 1.
    """
    ratios = torch.tensor([math.nan, 1.5, 1.1, math.nan, 0.5]).double()
    batch = {
        "token_mask": torch.tensor([False, True, True, False, True]),
        "advantages": torch.tensor([math.nan, 1.0, 1.0, math.nan, -2.0]).double(),
        "old_logprobs": torch.full((5,), -1.0).double(),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    return (ratios.log() - 1).requires_grad_(), batch


def loss_and_gradient(
    objective: Objective, batch: dict[str, Tensor], logprobs: Tensor
) -> tuple[float, list[float]]:
    loss = total(objective(logprobs, batch).terms, count(batch))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist()


S1, S2 = math.sqrt(1.65), 0.5  # GSPO's ratios: the geometric mean of 1.5 and 1.1, and 0.5
L1, L2, L3 = (math.log(ratio) - 1 for ratio in (1.5, 1.1, 0.5))


def gate(ratio: float, temperature: float) -> float:
    return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))


def gate_weight(ratio: float, temperature: float) -> float:
    p = 1 / (1 + math.exp(-temperature * (ratio - 1)))
    return 4 * p * (1 - p) * ratio


BY_HAND: dict[str, tuple[Objective, float, list[float]]] = {
    # -1.2 (clipped), -1.1, +1.6 (clipped): mean of tokens.
    "grpo": (grpo_loss, -0.7 / 3, [0, 0, -1.1 / 3, 0, 0]),
    # Mean of tokens, then of the two sequences.
    "grpo, sequences": (
        partial(grpo_loss, aggregate=sequence_mean),
        (-2.3 / 2 + 1.6) / 2,
        [0, 0, -1.1 / 4, 0, 0],
    ),
    # Over 2 sequences and a budget of 10 tokens.
    "dr_grpo": (partial(dr_grpo_loss, num_tokens=10), -0.7 / 20, [0, 0, -1.1 / 20, 0, 0]),
    # The upper bound is 1.28.
    "dapo": (dapo_loss, (-1.28 - 1.1 + 1.6) / 3, [0, 0, -1.1 / 3, 0, 0]),
    # Ratios sqrt(1.65) = 1.2845, clipped at 1.0004, and 0.5, clipped at 0.9997.
    "gspo": (gspo_loss, (-1.0004 + 2 * 0.9997) / 2, [0, 0, 0, 0, 0]),
    # Not clipped: each token of the first has half of its sequence's gradient, halved by the mean.
    "gspo, wide": (
        partial(gspo_loss, clip_low=0.6, clip_high=0.6),
        (-S1 + 2 * S2) / 2,
        [0, -S1 / 4, -S1 / 4, 0, S2],
    ),
    "gspo-token, wide": (
        partial(gspo_loss, ratio=sequence_token_ratio, clip_low=0.6, clip_high=0.6),
        (-S1 + 2 * S2) / 2,
        [0, -S1 / 4, -S1 / 4, 0, S2],
    ),
    # Weights min(r, 1.3): 1.3, 1.1, 0.5.
    "cispo": (
        partial(cispo_loss, clip_high=0.3),
        (-1.3 * L1 - 1.1 * L2 + 2 * 0.5 * L3) / 3,
        [0, -1.3 / 3, -1.1 / 3, 0, 2 * 0.5 / 3],
    ),
    "sapo": (
        sapo_loss,
        (-(gate(1.5, 1) + gate(1.1, 1)) / 2 + 2 * gate(0.5, 1.05)) / 2,
        [0, -gate_weight(1.5, 1) / 4, -gate_weight(1.1, 1) / 4, 0, gate_weight(0.5, 1.05)],
    ),
    # Sums over tokens of -A log pi, mean over 2 sequences.
    "rloo": (rloo_loss, (-L1 - L2 + 2 * L3) / 2, [0, -0.5, -0.5, 0, 1]),
    "reinforce++": (reinforce_plus_plus_loss, -0.7 / 3, [0, 0, -1.1 / 3, 0, 0]),
    "ppo": (partial(ppo_loss, clip_high=0.3), (-1.3 - 1.1 + 1.6) / 3, [0, 0, -1.1 / 3, 0, 0]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    objective, loss, gradient = BY_HAND[name]
    logprobs, batch = two_sequences()
    assert loss_and_gradient(objective, batch, logprobs) == (
        pytest.approx(loss),
        pytest.approx(gradient),
    )


@pytest.mark.parametrize("name", BY_HAND)
def test_nothing_trained_is_zero_with_zero_gradients(name: str) -> None:
    """Whatever stands there, and with every part on."""
    for poison in (math.nan, math.inf, -math.inf):
        poisoned = torch.full((5,), poison).double()
        batch = {
            "token_mask": torch.zeros(5).bool(),
            "nll_mask": torch.zeros(5).bool(),
            "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
        }
        for column in ("advantages", "old_logprobs", "reference_logprobs", "sampled_logprobs"):
            batch[column] = poisoned
        batch["entropies"] = poisoned
        objective = partial(
            BY_HAND[name][0],
            importance=icepop_importance,
            kl_coefficient=0.1,
            entropy_coefficient=0.1,
            nll_coefficient=0.1,
        )
        logprobs = poisoned.clone().requires_grad_()
        assert loss_and_gradient(objective, batch, logprobs) == (0.0, [0.0] * 5)


@pytest.mark.parametrize("name", BY_HAND)
def test_no_tokens(name: str) -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    batch = {
        "token_mask": torch.zeros(0).bool(),
        "advantages": torch.zeros(0),
        "sampled_logprobs": torch.zeros(0),
        "cu_seqlens": torch.tensor([0], dtype=torch.int32),
    }
    objective = partial(BY_HAND[name][0], importance=truncated_importance)
    assert loss_and_gradient(objective, batch, logprobs) == (0.0, [])


@pytest.mark.parametrize("name", BY_HAND)
def test_a_truncated_rollout_is_in_neither_sum_nor_count(name: str) -> None:
    logprobs, batch = two_sequences()
    batch["token_mask"][3:] = False
    alone = {name: column[:3] for name, column in batch.items() if name != "cu_seqlens"}
    alone["cu_seqlens"] = batch["cu_seqlens"][:2]
    objective = BY_HAND[name][0]
    loss, gradient = loss_and_gradient(objective, batch, logprobs)
    expected = loss_and_gradient(objective, alone, logprobs[:3].detach().requires_grad_())
    assert (loss, gradient[:3]) == expected
    assert gradient[3:] == [0.0, 0.0]


# Where the gradient is that of the value: CISPO's weights and GSPO-token's ratio are held fixed.
DIFFERENTIATED = [name for name in BY_HAND if "cispo" not in name and "gspo-token" not in name]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradcheck(name: str) -> None:
    logprobs, batch = two_sequences()
    batch["reference_logprobs"] = torch.full((5,), -1.5).double()
    logprobs = torch.where(batch["token_mask"], logprobs.detach(), -1.0).requires_grad_()

    def loss(logprobs: Tensor) -> Tensor:
        output = BY_HAND[name][0](logprobs, batch, kl_coefficient=0.3)
        return total(output.terms, count(batch))

    assert torch.autograd.gradcheck(loss, logprobs)


def test_the_entropy_bonus_is_subtracted_and_reaches_the_model() -> None:
    logprobs, batch = two_sequences()
    entropies = torch.tensor([math.nan, 0.5, 1.5, math.nan, 4.0]).double().requires_grad_()
    batch["entropies"] = entropies
    output = grpo_loss(logprobs, batch, entropy_coefficient=0.1)
    loss = total(output.terms, count(batch))
    loss.backward()
    assert loss.item() == pytest.approx(-0.7 / 3 - 0.1 * 2.0)
    torch.testing.assert_close(entropies.grad, -0.1 / 3 * torch.tensor([0, 1, 1, 0, 1]).double())
    metrics = finalize(output.metrics, count(batch))
    assert metrics["policy/entropy"] == pytest.approx(2.0)
    assert metrics["loss/entropy"] == pytest.approx(-0.2)


def test_the_nll_of_right_answers_is_a_mean_over_their_tokens() -> None:
    logprobs, batch = two_sequences()
    batch["nll_mask"] = torch.tensor([False, True, True, False, False])
    output = ppo_loss(logprobs, batch, nll_coefficient=0.1)
    loss = total(output.terms, count(batch))
    loss.backward()
    assert loss.item() == pytest.approx(-0.7 / 3 - 0.1 * (L1 + L2) / 2)
    expected = torch.tensor([0, -0.05, -1.1 / 3 - 0.05, 0, 0]).double()
    torch.testing.assert_close(logprobs.grad, expected)
    nll = finalize(output.metrics, count(batch))["loss/nll"]
    assert nll == pytest.approx(-0.1 * (L1 + L2) / 2)


def test_the_penalty_pulls_also_where_the_weights_drop_a_token() -> None:
    logprobs, batch = two_sequences()
    batch["reference_logprobs"] = torch.where(batch["token_mask"], logprobs.detach() - 1.0, 0.0)
    batch["sampled_logprobs"] = torch.full((5,), -90.0).double()
    output = policy_gradient_loss(
        logprobs,
        batch,
        surrogate=reinforce_surrogate,
        importance=icepop_importance,
        kl_coefficient=1.0,
    )
    loss = total(output.terms, count(batch)).item()
    # ratio * (exp(x) - x - 1) with x = -1 is ratio / e.
    assert loss == pytest.approx((1.5 + 1.1 + 0.5) / 3 / math.e)
    metrics = finalize(output.metrics, count(batch))
    assert metrics["loss/policy"] == 0.0
    assert metrics["loss/kl"] == pytest.approx(loss)
    assert metrics["importance/zero_fraction"] == 1.0


def test_old_logprobs_carry_no_gradient() -> None:
    """Giving the current ones is on-policy, not a ratio that cancels itself."""
    logprobs, batch = two_sequences()
    batch["old_logprobs"] = logprobs
    _, gradient = loss_and_gradient(grpo_loss, batch, logprobs)
    assert gradient == pytest.approx([0, -1 / 3, -1 / 3, 0, 2 / 3])


def test_clip_fractions_have_the_surrogates_bounds() -> None:
    logprobs, batch = two_sequences()
    batch["advantages"] = -batch["advantages"]  # -1, -1 | 2, with ratios 1.5, 1.1 | 0.5
    output = ppo_loss(logprobs, batch, dual_clip=1.4)
    metrics = finalize(output.metrics, count(batch))
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["policy/clip_fraction_dual"] == pytest.approx(1 / 3)
    loss = total(output.terms, count(batch)).item()
    assert loss == pytest.approx((1.4 + 1.1 - 2 * 0.5) / 3)
    metrics = finalize(cispo_loss(logprobs, batch, clip_high=0.3).metrics, count(batch))
    assert metrics["policy/clip_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["policy/clip_fraction_low"] == 0.0
