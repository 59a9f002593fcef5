import math

import pytest
import torch
from burnish_losses import (
    Metric,
    clip_fractions,
    combine_metrics,
    effective_sample_size,
    finalize,
    logprob_mismatch,
    weight_clip_fractions,
    weight_moments,
)
from torch import Tensor


def batch_of(mask: list[bool], cu_seqlens: list[int]) -> dict[str, Tensor]:
    return {
        "token_mask": torch.tensor(mask),
        "cu_seqlens": torch.tensor(cu_seqlens, dtype=torch.int32),
    }


def test_mismatch_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -1.0], requires_grad=True)
    sampled = torch.tensor([-1.5, -1.0, math.nan, -1.25])
    metrics = logprob_mismatch(logprobs, sampled, batch_of([True, True, False, True], [0, 3, 4]))
    # d = 0.5, -1 in the first sequence and 0.25 in the second.
    first = (math.exp(0.5) + math.e) / 2
    assert finalize(metrics, {"tokens": 3, "sequences": 2}) == pytest.approx(
        {
            "mismatch/mean_abs": 1.75 / 3,
            "mismatch/max_abs": 1.0,
            "mismatch/mean_ratio": (2 * first + math.exp(0.25)) / 3,
            "mismatch/mean_sequence_ratio": (first + math.exp(0.25)) / 2,
            "mismatch/max_sequence_ratio": first,
            "mismatch/kl": sum(math.exp(d) - d - 1 for d in (0.5, -1, 0.25)) / 3,
        }
    )
    assert not any(metric.value.requires_grad for metric in metrics.values())


def test_equal_logprobs_are_a_ratio_of_one() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    metrics = logprob_mismatch(logprobs, logprobs, batch_of([True, True], [0, 2]))
    assert finalize(metrics, {"tokens": 2, "sequences": 1}) == {
        "mismatch/mean_abs": 0.0,
        "mismatch/max_abs": 0.0,
        "mismatch/mean_ratio": 1.0,
        "mismatch/mean_sequence_ratio": 1.0,
        "mismatch/max_sequence_ratio": 1.0,
        "mismatch/kl": 0.0,
    }


def test_the_engines_kl_is_unbiased_over_the_engines_tokens() -> None:
    """Enumerated: each token of the vocabulary counts as often as the engine draws it."""
    engine = torch.tensor([0.5, 0.25, 0.25]).double()
    trainer = torch.tensor([0.2, 0.3, 0.5]).double()
    drawn = torch.tensor([0, 0, 1, 2])
    metrics = logprob_mismatch(
        trainer.log()[drawn], engine.log()[drawn], batch_of([True] * 4, [0, 4])
    )
    exact = float((engine * (engine / trainer).log()).sum())
    assert finalize(metrics, {"tokens": 4, "sequences": 1})["mismatch/kl"] == pytest.approx(exact)


@pytest.mark.parametrize("sampled", [-math.inf, -200.0])
def test_a_token_that_the_engine_rules_out_is_far_away(sampled: float) -> None:
    logprobs = torch.tensor([-1.0])
    metrics = logprob_mismatch(logprobs, torch.tensor([sampled]), batch_of([True], [0, 1]))
    values = finalize(metrics, {"tokens": 1, "sequences": 1})
    assert values["mismatch/max_abs"] == -1 - sampled
    assert values["mismatch/max_sequence_ratio"] == math.inf
    assert values["mismatch/kl"] > 1e9


def test_nothing_trained_measures_nothing() -> None:
    nan = torch.full((2,), math.nan)
    metrics = logprob_mismatch(nan, nan, batch_of([False, False], [0, 2]))
    values = finalize(metrics, {"tokens": 0, "sequences": 0})
    assert all(math.isnan(value) for value in values.values())
    assert all(metric.value.item() in (0.0, -math.inf) for metric in metrics.values())


def test_clip_fractions_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 4.0, 9.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0])
    mask = torch.tensor([True, True, True, True, True, False])
    metrics = clip_fractions(ratio, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    # Too high with A > 0: the first; too low with A < 0: the fourth; the fifth: dual.
    assert finalize(metrics, {"tokens": 5}) == pytest.approx(
        {
            "policy/clip_fraction": 0.4,
            "policy/clip_fraction_high": 0.2,
            "policy/clip_fraction_low": 0.2,
            "policy/clip_fraction_dual": 0.2,
        }
    )
    # Weights are clipped whatever the advantage.
    metrics = weight_clip_fractions(ratio, advantages, mask, clip_low=0.2, clip_high=2.0)
    assert finalize(metrics, {"tokens": 5}) == pytest.approx(
        {"policy/clip_fraction_high": 0.2, "policy/clip_fraction_low": 0.4}
    )


def test_effective_sample_size_of_the_whole_is_no_mean_of_parts() -> None:
    parts = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([4.0, 0.0, math.nan])]
    masks = [torch.ones(3).bool(), torch.tensor([True, True, False])]
    metrics = combine_metrics(
        [weight_moments("w", part, mask) for part, mask in zip(parts, masks, strict=True)]
    )
    values = finalize(metrics, {"tokens": 5})
    # (1 + 1 + 1 + 4)^2 / (5 * (1 + 1 + 1 + 16)); the parts' are 1 and 1/2.
    assert effective_sample_size(values, "w") == pytest.approx(49 / 95)
    assert values["w/zero_fraction"] == pytest.approx(0.2)


def test_effective_sample_size_at_its_ends() -> None:
    def size(weights: list[float]) -> float:
        weights_ = torch.tensor(weights)
        metrics = weight_moments("importance", weights_, torch.ones(len(weights)).bool())
        return effective_sample_size(finalize(metrics, {"tokens": len(weights)}))

    assert size([3.0, 3.0]) == 1.0
    assert size([3.0, 0.0, 0.0, 0.0]) == 0.25
    assert size([0.0, 0.0]) == 0.0
    assert math.isnan(size([]))


def test_each_metric_is_reduced_by_its_own_rule() -> None:
    def metrics(value: float) -> dict[str, Metric]:
        return {
            "mean": Metric(torch.tensor(value), "tokens", "mean"),
            "max": Metric(torch.tensor(value), None, "max"),
            "min": Metric(torch.tensor(value), None, "min"),
        }

    combined = combine_metrics([metrics(3.0), metrics(1.0)])
    assert finalize(combined, {"tokens": 8}) == {"mean": 0.5, "max": 3.0, "min": 1.0}
