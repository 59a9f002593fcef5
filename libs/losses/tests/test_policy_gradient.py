import math

import pytest
import torch
from burnish_losses import (
    Aggregate,
    LossOutput,
    count,
    finalize,
    grpo_loss,
    kl_k3,
    sequence_mean,
    token_mean,
    total,
    truncated_importance,
)

OLD = -1.0


def two_sequences() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Three and two tokens, first ones untrained; ratios 1.5, 1.1 | 0.5, advantages 1, 1 | -2."""
    ratios = torch.tensor([1.0, 1.5, 1.1, 1.0, 0.5], dtype=torch.float64)
    batch = {
        "token_mask": torch.tensor([False, True, True, False, True]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]),
        "old_logprobs": torch.full((5,), OLD),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    return (ratios.log() + OLD).requires_grad_(), batch


def loss_of(output: LossOutput, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return total(output.terms, count(batch))


def metrics_of(output: LossOutput, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    return finalize(output.metrics, count(batch))


def test_token_aggregation_by_hand() -> None:
    logprobs, batch = two_sequences()
    output = grpo_loss(logprobs, batch)
    loss = loss_of(output, batch)
    loss.backward()
    # -1.2 (clipped), -1.1, +1.6 (clipped).
    assert loss.item() == pytest.approx(-0.7 / 3)
    expected = torch.tensor([0, 0, -1.1 / 3, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


def test_sequence_aggregation_by_hand() -> None:
    logprobs, batch = two_sequences()
    output = grpo_loss(logprobs, batch, aggregate=sequence_mean)
    loss = loss_of(output, batch)
    loss.backward()
    assert loss.item() == pytest.approx((-2.3 / 2 + 1.6) / 2)
    expected = torch.tensor([0, 0, -1.1 / 2 / 2, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)


def test_metrics_by_hand() -> None:
    logprobs, batch = two_sequences()
    # The reference gives every token twice the policy's probability: k3 = 1 - ln 2.
    batch["reference_logprobs"] = logprobs.detach() + math.log(2)
    batch["sampled_logprobs"] = batch["old_logprobs"] + torch.tensor([9.0, 0.1, -0.3, 9.0, 0.2])
    metrics = metrics_of(grpo_loss(logprobs, batch), batch)
    assert metrics == pytest.approx(
        {
            "loss/policy": -0.7 / 3,
            "policy/clip_fraction": 2 / 3,
            "policy/clip_fraction_high": 1 / 3,
            "policy/clip_fraction_low": 1 / 3,
            "policy/ratio_max": 1.5,
            # k3 of old against new: r - 1 - ln r.
            "policy/approximate_kl": sum(r - 1 - math.log(r) for r in (1.5, 1.1, 0.5)) / 3,
            "policy/kl_reference": 1 - math.log(2),
            "mismatch/mean_abs": 0.2,
            "mismatch/max_abs": 0.3,
            "mismatch/mean_ratio": (math.exp(0.1) + math.exp(0.3) + math.exp(0.2)) / 3,
            "mismatch/mean_sequence_ratio": ((math.exp(0.1) + math.exp(0.3)) / 2 + math.exp(0.2))
            / 2,
            "mismatch/max_sequence_ratio": (math.exp(0.1) + math.exp(0.3)) / 2,
            # exp(d) - d - 1, d = -0.1, 0.3, -0.2.
            "mismatch/kl": sum(math.exp(d) - d - 1 for d in (-0.1, 0.3, -0.2)) / 3,
        }
    )


def test_clip_fraction_counts_only_what_clipping_stopped() -> None:
    logprobs, batch = two_sequences()
    batch["advantages"] = -batch["advantages"]  # now each ratio has moved the unwanted way
    assert metrics_of(grpo_loss(logprobs, batch), batch)["policy/clip_fraction"] == 0.0


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce() -> None:
    logprobs, batch = two_sequences()
    del batch["old_logprobs"]
    output = grpo_loss(logprobs, batch)
    loss = loss_of(output, batch)
    loss.backward()
    assert loss.item() == pytest.approx(-(1 + 1 - 2) / 3)
    expected = torch.tensor([0, -1, -1, 0, 2], dtype=torch.float64) / 3
    torch.testing.assert_close(logprobs.grad, expected)
    assert metrics_of(output, batch)["policy/ratio_max"] == 1.0


def test_kl_term_has_its_weight() -> None:
    logprobs, batch = two_sequences()
    batch["reference_logprobs"] = logprobs.detach() + math.log(2)
    difference = loss_of(grpo_loss(logprobs, batch, kl_coefficient=0.5), batch) - loss_of(
        grpo_loss(logprobs, batch), batch
    )
    assert difference.item() == pytest.approx(0.5 * (1 - math.log(2)) * (1.5 + 1.1 + 0.5) / 3)


def test_the_first_papers_kl_is_plain_k3() -> None:
    logprobs, batch = two_sequences()
    batch["reference_logprobs"] = logprobs.detach() + math.log(2)
    difference = loss_of(grpo_loss(logprobs, batch, kl=kl_k3, kl_coefficient=0.5), batch) - loss_of(
        grpo_loss(logprobs, batch), batch
    )
    assert difference.item() == pytest.approx(0.5 * (1 - math.log(2)))


def test_kl_gradient_over_the_whole_vocabulary_is_that_of_reverse_kl() -> None:
    """Tokens drawn as often as the old policy says, so that the token mean is an expectation."""
    drawn = torch.tensor([0, 0, 1, 2])
    old = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    batch = {
        "token_mask": torch.ones(4).bool(),
        "advantages": torch.zeros(4),
        "old_logprobs": old[drawn],
        "reference_logprobs": reference[drawn],
    }
    for offset in (torch.zeros(3), torch.tensor([0.1, -0.3, 0.2])):  # on and off policy
        logits = (old + offset).requires_grad_()
        policy = logits.log_softmax(0)
        output = grpo_loss(policy[drawn], batch, kl_coefficient=1.0)
        (gradient,) = torch.autograd.grad(
            total(output.terms, {"tokens": 4, "sequences": 1}), logits
        )
        policy = logits.log_softmax(0)
        exact = (policy.exp() * (policy - reference)).sum()
        torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0])


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_gradcheck(aggregate: Aggregate) -> None:
    logprobs, batch = two_sequences()
    batch["reference_logprobs"] = torch.full((5,), -1.5)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        output = grpo_loss(logprobs, batch, kl_coefficient=0.3, aggregate=aggregate)
        return loss_of(output, batch)

    assert torch.autograd.gradcheck(loss, logprobs)


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_at_untrained_tokens_does_not_matter(
    aggregate: Aggregate, poison: float
) -> None:
    results = []
    for value in (0.0, poison):
        logprobs, batch = two_sequences()
        batch["reference_logprobs"] = torch.full((5,), -1.5)
        batch["sampled_logprobs"] = torch.full((5,), -1.2)
        batch["token_mask"] = torch.tensor([False, True, True, False, False])
        untrained = ~batch["token_mask"]
        for name in ("advantages", "old_logprobs", "reference_logprobs", "sampled_logprobs"):
            batch[name] = torch.where(untrained, value, batch[name])
        logprobs = torch.where(untrained, value, logprobs.detach()).requires_grad_()
        output = grpo_loss(logprobs, batch, kl_coefficient=0.3, aggregate=aggregate)
        loss = loss_of(output, batch)
        loss.backward()
        results.append((loss.item(), logprobs.grad, metrics_of(output, batch)))
    (clean_loss, clean_gradient, clean_metrics), (loss_, gradient, metrics) = results
    assert loss_ == clean_loss
    assert metrics == clean_metrics
    torch.testing.assert_close(gradient, clean_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_nothing_trained_is_zero_with_zero_gradients(aggregate: Aggregate) -> None:
    logprobs = torch.tensor([math.nan, -math.inf, -1.0], requires_grad=True)
    batch = {
        "token_mask": torch.zeros(3).bool(),
        "advantages": torch.full((3,), math.nan),
        "reference_logprobs": torch.full((3,), -math.inf),
        "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32),
    }
    output = grpo_loss(logprobs, batch, kl_coefficient=0.1, aggregate=aggregate)
    for counts in (
        {"tokens": 0, "sequences": 0},
        {"tokens": 10, "sequences": 2},
    ):  # alone, or an idle rank's slot
        logprobs.grad = None
        loss = total(output.terms, counts)
        loss.backward(retain_graph=True)
        assert loss.item() == 0.0
        torch.testing.assert_close(logprobs.grad, torch.zeros(3))


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_a_batch_without_tokens(aggregate: Aggregate) -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    batch = {
        "token_mask": torch.zeros(0).bool(),
        "advantages": torch.zeros(0),
        "cu_seqlens": torch.tensor([0], dtype=torch.int32),
    }
    loss = loss_of(grpo_loss(logprobs, batch, aggregate=aggregate), batch)
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("aggregate", [token_mean, sequence_mean])
def test_a_truncated_rollout_is_in_neither_sum_nor_count(aggregate: Aggregate) -> None:
    logprobs, batch = two_sequences()
    batch["token_mask"][3:] = False
    with_it = loss_of(grpo_loss(logprobs, batch, aggregate=aggregate), batch)
    alone = {name: column[:3] for name, column in batch.items() if name != "cu_seqlens"}
    alone["cu_seqlens"] = batch["cu_seqlens"][:2]
    without = loss_of(grpo_loss(logprobs[:3], alone, aggregate=aggregate), alone)
    assert with_it.item() == without.item() == pytest.approx(-2.3 / 2)


def test_engine_logprob_outside_the_support_touches_only_its_metric() -> None:
    logprobs, batch = two_sequences()
    clean = loss_of(grpo_loss(logprobs, batch), batch)
    batch["sampled_logprobs"] = torch.full((5,), -math.inf)
    output = grpo_loss(logprobs, batch)
    assert loss_of(output, batch).item() == clean.item()
    assert metrics_of(output, batch)["mismatch/max_abs"] == math.inf


@pytest.mark.parametrize(
    ("drop", "settings", "message"),
    [
        ("advantages", {}, "must have the column advantages"),
        ("token_mask", {}, "must have the column token_mask"),
        ("cu_seqlens", {"aggregate": sequence_mean}, "must have the column cu_seqlens"),
        ("", {"kl_coefficient": 0.1}, "must have the column reference_logprobs"),
        ("", {"clip_low": -0.2}, "clip_low must be 0 or more, got -0.2"),
        ("", {"kl_coefficient": -0.1}, "kl_coefficient must be 0 or more and finite, got -0.1"),
        ("", {"entropy_coefficient": 0.1}, "must have the column entropies"),
        ("", {"nll_coefficient": 0.1}, "must have the column nll_mask"),
        ("", {"importance": truncated_importance}, "must have the column sampled_logprobs"),
    ],
)
def test_wrong_inputs_are_named(drop: str, settings: dict[str, object], message: str) -> None:
    logprobs, batch = two_sequences()
    batch.pop(drop, None)
    with pytest.raises(ValueError, match=message):
        grpo_loss(logprobs, batch, **settings)  # type: ignore[arg-type]


def test_columns_must_be_aligned() -> None:
    logprobs, batch = two_sequences()
    batch["advantages"] = torch.ones(2)  # one per sequence: would broadcast or fail far away
    with pytest.raises(ValueError, match=r"advantages must have the shape \(5,\) .*, got \(2,\)"):
        grpo_loss(logprobs, batch)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_the_mask_is_bool(dtype: torch.dtype) -> None:
    logprobs, batch = two_sequences()
    batch["token_mask"] = batch["token_mask"].to(dtype)
    with pytest.raises(ValueError, match=f"token_mask must be bool, got {dtype}"):
        grpo_loss(logprobs, batch)


@pytest.mark.parametrize(
    "name",
    ["clip_low", "clip_high", "kl_coefficient", "entropy_coefficient", "nll_coefficient"],
)
def test_a_setting_that_is_nan_is_refused(name: str) -> None:
    logprobs, batch = two_sequences()
    batch["reference_logprobs"] = torch.full((5,), OLD)
    with pytest.raises(ValueError, match=r"must be 0 or more.*, got nan"):
        grpo_loss(logprobs, batch, **{name: math.nan})
