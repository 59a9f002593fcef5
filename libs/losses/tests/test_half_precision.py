"""Columns in half types: sums are taken in float32, gradients arrive in the dtype they came in.

A running sum in bfloat16 stops growing at 256, in float16 at 2048: 4096 tokens a sequence show it.
"""

from collections.abc import Callable

import pytest
import torch
from burnish_losses import (
    LossOutput,
    Metric,
    Term,
    bradley_terry_loss,
    clip_fractions,
    combine_metrics,
    count,
    cpo_loss,
    distillation_loss,
    dpo_loss,
    finalize,
    grpo_loss,
    gspo_loss,
    kto_baseline,
    kto_log_ratio_sum,
    kto_loss,
    logprob_mismatch,
    masked_sum,
    nll_loss,
    orpo_loss,
    rloo_loss,
    select,
    sequence_mean,
    sequence_product,
    sequence_sums,
    total,
    value_loss,
    weight_moments,
)
from torch import Tensor

LENGTH = 4096
HALVES = [torch.bfloat16, torch.float16]
Columns = dict[str, Tensor]


def two_sequences() -> Columns:
    """float64; all numbers are multiples of 1/64 that both half types hold exactly."""
    generator = torch.Generator().manual_seed(0)

    def sixty_fourths(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (2 * LENGTH,), generator=generator).double() / 64

    return {
        "logprobs": sixty_fourths(-64, -16),
        "old_logprobs": sixty_fourths(-64, -16),
        "reference_logprobs": sixty_fourths(-64, -56),
        "sampled_logprobs": sixty_fourths(-64, -16),
        "advantages": sixty_fourths(-64, 64),
        "returns": sixty_fourths(0, 64),
        "old_values": sixty_fourths(-32, 0),
        "token_mask": torch.ones(2 * LENGTH, dtype=torch.bool),
        "nll_mask": torch.ones(2 * LENGTH, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
        "pair_ids": torch.zeros(2, dtype=torch.int64),
        "chosen": torch.tensor([True, False]),
        "desirable": torch.tensor([True, False]),
    }


LOSSES: dict[str, Callable[[Tensor, Columns], LossOutput]] = {
    "nll": nll_loss,
    "nll, sequence mean": lambda x, batch: nll_loss(x, batch, aggregate=sequence_mean),
    "dpo": lambda x, batch: dpo_loss(x, batch, beta=1e-3, nll_coefficient=0.1),
    "dpo, averaged": lambda x, batch: dpo_loss(x, batch, length_average=True),
    "cpo": lambda x, batch: cpo_loss(x, batch, beta=1e-3),
    "orpo": orpo_loss,
    "kto": lambda x, batch: kto_loss(x, batch, kl_baseline=3.0, beta=1e-3),
    "value": value_loss,
    "grpo": lambda x, batch: grpo_loss(x, batch, kl_coefficient=0.1),
    "gspo": lambda x, batch: gspo_loss(x, batch, clip_low=0.5, clip_high=0.5),
    "rloo": rloo_loss,
    "distillation": lambda x, batch: distillation_loss(-x, batch, aggregate=sequence_mean),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_4096_tokens_is_that_of_float64(name: str, dtype: torch.dtype) -> None:
    exact, loss_fn = two_sequences(), LOSSES[name]
    half = {k: v.to(dtype) if v.is_floating_point() else v for k, v in exact.items()}
    outputs, losses, gradients = [], [], []
    for batch in (exact, half):
        values = batch["logprobs"].clone().requires_grad_()
        output = loss_fn(values, batch)
        loss = total(output.terms, count(batch))
        loss.backward()
        outputs.append(finalize(output.metrics, count(batch)))
        losses.append(loss.item())
        gradients.append(values.grad)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert outputs[1] == pytest.approx(outputs[0], rel=1e-4, abs=1e-5)
    assert gradients[1].dtype == dtype
    rounding = torch.finfo(dtype).eps
    # float16 holds no gradient below 6e-8.
    torch.testing.assert_close(gradients[1].double(), gradients[0], rtol=rounding, atol=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_ones_are_counted_to_the_end(dtype: torch.dtype) -> None:
    ones, cu_seqlens = torch.ones(LENGTH, dtype=dtype), torch.tensor([0, LENGTH])
    mask = torch.ones(LENGTH, dtype=torch.bool)
    batch = {"token_mask": mask, "cu_seqlens": cu_seqlens}
    assert sequence_sums(ones, cu_seqlens).tolist() == [LENGTH]
    assert sequence_sums(mask, cu_seqlens).tolist() == [LENGTH]
    assert masked_sum(ones, mask).item() == LENGTH
    assert sequence_mean(ones, batch).sum.item() == 1.0
    assert sequence_product(ones, batch)[0].item() == LENGTH
    assert select(ones, batch)[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_metrics_of_64_micro_batches_add_up(dtype: torch.dtype) -> None:
    part = {
        "sum": Metric(torch.tensor(101.0).to(dtype), None, "sum"),
        "mean": Metric(torch.tensor(101.0).to(dtype), "tokens", "mean"),
        "num": Metric(torch.tensor(2**24 + 1), None, "sum"),  # an integer stays one
    }
    result = finalize(combine_metrics([part] * 64), {"tokens": 64})
    assert result == {"sum": 6464.0, "mean": 101.0, "num": 64 * (2**24 + 1)}
    loss = total([Term(torch.tensor(101.0).to(dtype), "tokens")], {"tokens": 3})
    assert loss.item() == pytest.approx(101 / 3, rel=1e-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_diagnostics_and_the_baseline(dtype: torch.dtype) -> None:
    exact = two_sequences()
    half = {k: v.to(dtype) if v.is_floating_point() else v for k, v in exact.items()}
    results = []
    for batch in (exact, half):
        columns = batch["logprobs"], batch["sampled_logprobs"]
        ratio = 1 + (columns[0] - columns[1]) / 4
        metrics = {
            **logprob_mismatch(*columns, batch),
            **weight_moments("w", ratio, batch["token_mask"]),
            **clip_fractions(
                ratio, batch["advantages"], batch["token_mask"], clip_low=0.1, clip_high=0.1
            ),
        }
        own = kto_log_ratio_sum(batch["logprobs"], batch)
        finished = finalize(metrics, count(batch)) | {"kto": float(kto_baseline(own, 2))}
        results.append(finished)
    # The half-type ratio is rounded before it comes here: 1e-2 of it, which may cross a bound.
    assert results[1] == pytest.approx(results[0], rel=1e-2, abs=1e-2)
    mismatch = [{k: v for k, v in r.items() if k[0] == "m" or k == "kto"} for r in results]
    assert mismatch[1] == pytest.approx(mismatch[0], rel=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_scores_of_a_reward_model(dtype: torch.dtype) -> None:
    """600 pairs of margin 1: the sum of the rewards passes 256, and its tenths are kept."""
    scores = torch.tensor([1.5, 0.5]).repeat(600).to(dtype).requires_grad_()
    batch = {
        "pair_ids": torch.arange(600).repeat_interleave(2),
        "chosen": torch.tensor([True, False]).repeat(600),
    }
    output = bradley_terry_loss(scores, batch, center_coefficient=0.1)
    total(output.terms, count(batch)).backward()
    expected = {
        "loss/preference": 0.31326169,
        "rewards/chosen": 1.5,
        "rewards/rejected": 0.5,
        "rewards/margin": 1.0,
        "rewards/accuracy": 1.0,
    }
    assert finalize(output.metrics, count(batch)) == pytest.approx(expected, rel=1e-6)
    assert scores.grad.dtype == dtype
