import math

import pytest
import torch
from burnish_losses import (
    combine_metrics,
    count,
    explained_variance,
    finalize,
    sequence_mean,
    total,
    value_loss,
)
from torch import Tensor


def five_tokens() -> tuple[Tensor, dict[str, Tensor]]:
    """Three trained: V = 1.5, 1, 2; V_old = 1, 1, 1; R = 2, 0.5, 1."""
    values = torch.tensor([9.0, 1.5, 1.0, 9.0, 2.0]).double().requires_grad_()
    batch = {
        "token_mask": torch.tensor([False, True, True, False, True]),
        "returns": torch.tensor([math.nan, 2.0, 0.5, math.nan, 1.0]).double(),
        "old_values": torch.tensor([math.nan, 1.0, 1.0, math.nan, 1.0]).double(),
        "cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32),
    }
    return values, batch


def test_clipped_by_hand() -> None:
    values, batch = five_tokens()
    output = value_loss(values, batch)
    loss = total(output.terms, count(batch))
    loss.backward()
    # max(0.25, (1.2 - 2)^2 = 0.64), max(0.25, 0.25), max(1, (1.2 - 1)^2 = 0.04); over 2, over 3.
    assert loss.item() == pytest.approx((0.64 + 0.25 + 1) / 6)
    # The first came nearer to its return by more than 0.2; the last went away from it.
    expected = torch.tensor([0, 0, 0.5, 0, 1.0]).double() / 3
    torch.testing.assert_close(values.grad, expected)
    metrics = finalize(output.metrics, count(batch))
    assert metrics["loss/value"] == pytest.approx(1.89 / 6)
    assert metrics["value/clip_fraction"] == pytest.approx(1 / 3)


def test_the_clip_fraction_counts_values_that_were_stopped_on_their_way_to_the_return() -> None:
    values, batch = five_tokens()
    batch["returns"] = torch.tensor([math.nan, 2.0, 2.0, math.nan, 3.0]).double()
    metrics = finalize(value_loss(values, batch).metrics, count(batch))
    # V 1.5, 1, 2 from 1: the first and the last moved on by more than 0.2, towards the return.
    assert metrics["value/clip_fraction"] == pytest.approx(2 / 3)
    batch["returns"] = torch.tensor([math.nan, 0.0, 0.0, math.nan, 0.0]).double()
    metrics = finalize(value_loss(values, batch).metrics, count(batch))
    assert metrics["value/clip_fraction"] == 0.0  # away from it


def test_unclipped_by_hand() -> None:
    values, batch = five_tokens()
    del batch["old_values"]
    output = value_loss(values, batch, clip=None, coefficient=0.5, aggregate=sequence_mean)
    loss = total(output.terms, count(batch))
    # Sequences (0.25 + 0.25) / 2 and 1, each over 2; their mean; times 0.5.
    assert loss.item() == pytest.approx(0.5 * (0.125 + 0.5) / 2)
    assert finalize(output.metrics, count(batch))["loss/value"] == pytest.approx(0.3125)


def test_explained_variance_is_that_of_the_whole_batch() -> None:
    values, batch = five_tokens()
    parts = []
    for cut in (slice(0, 3), slice(3, 5)):
        part = {name: column[cut] for name, column in batch.items() if name != "cu_seqlens"}
        part["cu_seqlens"] = torch.tensor([0, len(part["returns"])], dtype=torch.int32)
        parts.append(value_loss(values[cut], part).metrics)
    metrics = finalize(combine_metrics(parts), count(batch))
    mask = batch["token_mask"]
    returns, errors = batch["returns"][mask], (batch["returns"] - values.detach())[mask]
    exact = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert explained_variance(metrics) == pytest.approx(float(exact))


def test_explained_variance_at_its_ends() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    batch = {"token_mask": torch.ones(3).bool(), "returns": returns}

    def explained(values: Tensor, batch: dict[str, Tensor] = batch) -> float:
        output = value_loss(values, batch, clip=None)
        return explained_variance(finalize(output.metrics, {"tokens": 3}))

    assert explained(returns) == 1.0
    assert explained(torch.full((3,), 7.0)) == pytest.approx(0.0)
    assert explained(-returns) == pytest.approx(-3.0)
    assert math.isnan(explained(returns, batch | {"returns": torch.ones(3)}))
    nearly = torch.tensor([1.0, 1.0001, 1.0002])
    assert explained(nearly, batch | {"returns": nearly}) == 1.0


@pytest.mark.parametrize("constant", [0.0, 0.1, -0.7, 1e4 / 3])
def test_returns_that_are_equal_have_no_variance_to_explain(constant: float) -> None:
    """The mean of 1000 squares is not quite the square of the mean."""
    batch = {"token_mask": torch.ones(1000).bool(), "returns": torch.full((1000,), constant)}
    output = value_loss(torch.arange(1000.0), batch, clip=None)
    assert math.isnan(explained_variance(finalize(output.metrics, {"tokens": 1000})))


@pytest.mark.parametrize("clip", [0.2, None])
def test_gradcheck(clip: float | None) -> None:
    values, batch = five_tokens()
    assert torch.autograd.gradcheck(
        lambda v: total(value_loss(v, batch, clip=clip).terms, count(batch)), values
    )


def test_nothing_trained_is_zero_with_zero_gradients() -> None:
    values = torch.tensor([math.nan, -math.inf], requires_grad=True)
    nan = torch.full((2,), math.nan)
    batch = {"token_mask": torch.zeros(2).bool(), "returns": nan, "old_values": nan}
    loss = total(value_loss(values, batch).terms, {"tokens": 0})
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("drop", "settings", "message"),
    [
        ("returns", {}, "must have the column returns"),
        ("old_values", {}, "must have the column old_values"),
        ("", {"clip": -1.0}, "clip must be 0 or more, got -1"),
        ("", {"clip": math.nan}, "clip must be 0 or more, got nan"),
        ("", {"coefficient": math.nan}, "coefficient must be 0 or more and finite, got nan"),
    ],
)
def test_wrong_inputs_are_named(drop: str, settings: dict[str, float], message: str) -> None:
    values, batch = five_tokens()
    batch.pop(drop, None)
    with pytest.raises(ValueError, match=message):
        value_loss(values, batch, **settings)
