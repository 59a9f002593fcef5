import math

import pytest
import torch
from burnish_losses import finalize, logprob_mismatch


def test_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    sampled = torch.tensor([-1.5, -1.0, math.nan])
    metrics = logprob_mismatch(logprobs, sampled, torch.tensor([True, True, False]))
    assert finalize(metrics, {"tokens": 2, "sequences": 1}) == pytest.approx(
        {
            "mismatch/mean_abs": 0.75,
            "mismatch/max_abs": 1.0,
            "mismatch/mean_ratio": (math.exp(0.5) + math.e) / 2,
        }
    )
    assert not any(metric.value.requires_grad for metric in metrics.values())


def test_equal_logprobs_are_a_ratio_of_one() -> None:
    logprobs = torch.tensor([-1.0, -2.0])
    metrics = logprob_mismatch(logprobs, logprobs, torch.ones(2).bool())
    assert finalize(metrics, {"tokens": 2, "sequences": 1}) == {
        "mismatch/mean_abs": 0.0,
        "mismatch/max_abs": 0.0,
        "mismatch/mean_ratio": 1.0,
    }
