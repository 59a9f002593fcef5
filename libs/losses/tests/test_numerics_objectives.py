"""Numbers of the objectives at the ends of their range, and of what they are given."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from burnish_losses import (
    LossOutput,
    Metric,
    bradley_terry_loss,
    cispo_loss,
    combine_metrics,
    count,
    cpo_loss,
    dpo_loss,
    finalize,
    grpo_loss,
    gspo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kto_loss,
    masked_importance,
    orpo_loss,
    policy_gradient_loss,
    positive_nll,
    reinforce_plus_plus_loss,
    rloo_loss,
    sapo_loss,
    token_ratio,
    total,
    truncated_importance,
    value_loss,
)
from torch import Tensor

INF = math.inf
Batch = dict[str, Tensor]


def two_sequences() -> tuple[Tensor, Batch]:
    """Three trained tokens and two."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0], requires_grad=True)
    return logprobs, {
        "token_mask": torch.ones(5).bool(),
        "nll_mask": torch.ones(5).bool(),
        "cu_seqlens": torch.tensor([0, 3, 5]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        "old_logprobs": torch.tensor([-1.1, -0.4, -2.0, -0.2, -2.8]),
        "reference_logprobs": torch.tensor([-1.3, -0.6, -1.5, -0.3, -3.5]),
        "sampled_logprobs": torch.tensor([-1.0, -0.4, -2.1, -0.2, -2.9]),
        "entropies": torch.tensor([1.0, 0.5, 2.0, 0.5, 1.0]),
        "returns": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0]),
        "old_values": torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5]),
        "pair_ids": torch.tensor([0, 0]),
        "chosen": torch.tensor([True, False]),
        "desirable": torch.tensor([True, False]),
    }


def run(
    loss_fn: Callable[..., LossOutput], logprobs: Tensor, batch: Batch
) -> tuple[float, Tensor, dict[str, float]]:
    counts = count(batch)
    output = loss_fn(logprobs, batch)
    loss = total(output.terms, counts)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return float(loss.detach()), gradient, finalize(output.metrics, counts)


EVERYTHING: dict[str, Any] = {
    "importance": truncated_importance,
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.1,
}
POLICY_LOSSES: dict[str, Callable[..., LossOutput]] = {
    "grpo": partial(grpo_loss, **EVERYTHING),
    "grpo k1": partial(grpo_loss, **EVERYTHING, kl=kl_k1),
    "grpo k2": partial(grpo_loss, **EVERYTHING, kl=kl_k2),
    "grpo k3": partial(grpo_loss, **EVERYTHING, kl=kl_k3),
    "gspo": partial(gspo_loss, **EVERYTHING),
    "cispo": partial(cispo_loss, **EVERYTHING),
    "cispo, a lower bound": partial(cispo_loss, **EVERYTHING, clip_low=0.2),
    "sapo": partial(sapo_loss, **EVERYTHING),
    "rloo": partial(rloo_loss, **EVERYTHING),
    "reinforce++": partial(reinforce_plus_plus_loss, **EVERYTHING),
}


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("old", ["finite", "as the policy", "none"])
def test_a_token_that_the_policy_rules_out_is_in_no_term(name: str, old: str) -> None:
    """It has no gradient to give: as if its advantage, penalty and bonus were 0."""
    logprobs, batch = two_sequences()
    ruled_out = logprobs.detach().clone()
    ruled_out[1] = -INF
    ruled_out.requires_grad_()
    neutral = {name: column.clone() for name, column in batch.items()}
    for column in ("advantages", "entropies"):
        neutral[column][1] = 0.0
    for column in ("old_logprobs", "reference_logprobs"):
        neutral[column][1] = logprobs[1].detach()
    if old == "as the policy":
        batch["old_logprobs"][1] = -INF
    if old == "none":
        del batch["old_logprobs"], neutral["old_logprobs"]
    value, gradient, metrics = run(POLICY_LOSSES[name], ruled_out, batch)
    expected, wanted, _ = run(POLICY_LOSSES[name], logprobs, neutral)
    assert value == pytest.approx(expected, rel=1e-6)
    assert gradient[1] == 0
    gradient, wanted = gradient[[0, 2, 3, 4]], wanted[[0, 2, 3, 4]]
    torch.testing.assert_close(gradient, wanted)
    # It is shown all the same.
    assert not math.isfinite(metrics["policy/kl_reference"])
    if old != "finite":
        assert metrics["mismatch/max_abs"] == INF


@pytest.mark.parametrize("importance", [truncated_importance, masked_importance])
def test_a_token_that_all_rule_out_is_in_no_term(importance: Any) -> None:
    logprobs, batch = two_sequences()
    del batch["old_logprobs"]
    for column in (logprobs.detach(), batch["sampled_logprobs"]):
        column[1] = -INF
    loss_fn = partial(grpo_loss, importance=importance)
    value, gradient, _ = run(loss_fn, logprobs, batch)
    assert math.isfinite(value)
    assert gradient.isfinite().all()


def test_k3_is_infinite_where_the_policy_rules_the_token_out() -> None:
    logprobs = torch.tensor([-INF, -1.0])
    assert kl_k3(logprobs, torch.tensor([-1.0, -INF])).tolist() == [INF, INF]


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_float16_is_computed_in_float32(advantage: float) -> None:
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float16, requires_grad=True)
    batch = {
        "token_mask": torch.ones(2).bool(),
        "cu_seqlens": torch.tensor([0, 2]),
        "advantages": torch.full((2,), advantage).half(),
        "old_logprobs": torch.tensor([-13.0, -31.0]).half(),  # exp(12) and exp(30)
        "reference_logprobs": torch.tensor([-1.0, -1.0]).half(),
    }
    value, gradient, _ = run(partial(grpo_loss, kl_coefficient=0.1), logprobs, batch)
    assert value == pytest.approx(-1.2 * advantage)
    assert gradient.tolist() == [0.0, 0.0]
    assert token_ratio(logprobs, batch["old_logprobs"])[0].item() == pytest.approx(math.exp(12))


def test_orpo_of_float16_is_that_of_float32() -> None:
    _, batch = two_sequences()
    narrow = torch.tensor([-1e-7, -0.0, -0.0, -0.5, -1.0]).half().requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    value, gradient, metrics = run(orpo_loss, narrow, batch)
    expected, wanted, of_wide = run(orpo_loss, wide, batch)
    assert value == expected
    assert metrics == of_wide
    torch.testing.assert_close(gradient, wanted.half())


def test_nll_terms_of_float16_do_not_stop_at_its_range() -> None:
    num = 4000
    logprobs = torch.full((num,), -20.0, dtype=torch.float16, requires_grad=True)
    masks = {"token_mask": torch.ones(num).bool(), "nll_mask": torch.ones(num).bool()}
    assert positive_nll(logprobs, masks).sum.item() == 20.0 * num
    batch = masks | {
        "cu_seqlens": torch.tensor([0, num // 2, num]),
        "pair_ids": torch.tensor([0, 0]),
        "chosen": torch.tensor([True, False]),
    }
    value, gradient, metrics = run(partial(cpo_loss, nll_coefficient=1.0), logprobs, batch)
    assert metrics["loss/nll"] == 20.0
    assert value == pytest.approx(20 + math.log(2))
    assert gradient.isfinite().all()


GIVEN: dict[str, tuple[Callable[..., LossOutput], list[str]]] = {
    "policy gradient": (
        partial(grpo_loss, kl_coefficient=0.1, importance=truncated_importance),
        ["advantages", "old_logprobs", "reference_logprobs", "sampled_logprobs"],
    ),
    "dpo": (dpo_loss, ["reference_logprobs"]),
    "kto": (partial(kto_loss, kl_baseline=0.1), ["reference_logprobs"]),
    "value": (value_loss, ["returns", "old_values"]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_is_never_trained(name: str) -> None:
    """A reference under a forgotten no_grad would be."""
    loss_fn, columns = GIVEN[name]
    logprobs, batch = two_sequences()
    for column in columns:
        batch[column].requires_grad_()
    total(loss_fn(logprobs, batch).terms, count(batch)).backward()
    assert (logprobs.grad != 0).any()
    assert all(batch[column].grad is None for column in columns)


def test_margins_are_never_trained_and_entropies_are() -> None:
    scores = torch.tensor([1.0, 0.5], requires_grad=True)
    _, batch = two_sequences()
    batch["margins"] = torch.tensor([0.3, 0.0], requires_grad=True)
    total(bradley_terry_loss(scores, batch).terms, count(batch)).backward()
    assert batch["margins"].grad is None
    logprobs, batch = two_sequences()
    batch["entropies"].requires_grad_()
    loss_fn = partial(policy_gradient_loss, entropy_coefficient=0.1)
    total(loss_fn(logprobs, batch).terms, count(batch)).backward()
    torch.testing.assert_close(batch["entropies"].grad, torch.full((5,), -0.1 / 5))


def test_the_mismatch_is_of_the_policy_that_was_synced() -> None:
    """Between old and sampled log-probs: the same before the first update and in the second."""
    logprobs, batch = two_sequences()
    *_, second = run(grpo_loss, logprobs, batch)
    first_batch = {name: column for name, column in batch.items() if name != "old_logprobs"}
    *_, first = run(grpo_loss, batch["old_logprobs"].clone().requires_grad_(), first_batch)
    names = [name for name in first if name.startswith("mismatch/")]
    assert len(names) == 6
    assert all(first[name] == second[name] for name in names)
    assert first["mismatch/mean_abs"] == pytest.approx((0.1 + 0.0 + 0.1 + 0.0 + 0.1) / 5)


def test_a_mean_that_some_parts_lack_is_refused() -> None:
    """It would be divided by the tokens of all."""

    def part(*names: str) -> Mapping[str, Metric]:
        return {name: Metric(torch.tensor(6.0), "tokens", "mean") for name in names}

    with pytest.raises(ValueError, match="'kl', a mean, must be in every part, got it in 1 of 2"):
        combine_metrics([part("loss", "kl"), part("loss")])
    # A rank that only had empty slots has no metrics, and no tokens in the count.
    combined = combine_metrics([part("loss"), {}, part("loss")])
    assert finalize(combined, {"tokens": 4}) == {"loss": 3.0}
    assert combine_metrics([]) == {}
    # What needs no count may be in some parts alone.
    alone = {"highest": Metric(torch.tensor(2.0), None, "max")}
    assert set(combine_metrics([part("loss") | alone, part("loss")])) == {"loss", "highest"}
