import math

import pytest
import torch
from burnish_losses import LossOutput, bradley_terry_loss, finalize, total

COUNTS = {"pairs": 2}


def two_pairs() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pair 7: chosen 2.0, rejected 0.5; pair 3: chosen -1.0, rejected 1.0; one in no pair."""
    scores = torch.tensor([1.0, 2.0, 9.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    batch = {
        "pair_ids": torch.tensor([3, 7, -1, 3, 7]),
        "chosen": torch.tensor([False, True, True, True, False]),
    }
    return scores, batch


def loss_of(output: LossOutput) -> torch.Tensor:
    return total(output.terms, COUNTS)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_by_hand() -> None:
    scores, batch = two_pairs()
    output = bradley_terry_loss(scores, batch)
    loss = loss_of(output)
    loss.backward()
    # Gaps 1.5 and -2.
    assert loss.item() == pytest.approx((softplus(-1.5) + softplus(2.0)) / 2)
    seven, three = 1 / (1 + math.exp(1.5)) / 2, 1 / (1 + math.exp(-2.0)) / 2
    expected = torch.tensor([three, -seven, 0, -three, seven], dtype=torch.float64)
    torch.testing.assert_close(scores.grad, expected)


def test_metrics_by_hand() -> None:
    scores, batch = two_pairs()
    metrics = finalize(bradley_terry_loss(scores, batch).metrics, COUNTS)
    assert metrics == pytest.approx(
        {
            "loss/preference": (softplus(-1.5) + softplus(2.0)) / 2,
            "rewards/chosen": 0.5,
            "rewards/rejected": 0.75,
            "rewards/margin": -0.25,
            "rewards/accuracy": 0.5,
        }
    )


def test_margins_are_read_at_the_chosen_one() -> None:
    scores, batch = two_pairs()
    batch["margins"] = torch.tensor([math.nan, 1.0, math.nan, 0.5, math.nan])
    output = bradley_terry_loss(scores, batch)
    loss = loss_of(output)
    loss.backward()
    assert loss.item() == pytest.approx((softplus(-0.5) + softplus(2.5)) / 2)
    assert bool(scores.grad.isfinite().all())
    assert finalize(output.metrics, COUNTS)["rewards/margin"] == pytest.approx(-0.25)  # scores'


def test_centring_by_hand() -> None:
    scores, batch = two_pairs()
    difference = loss_of(bradley_terry_loss(scores, batch, center_coefficient=0.1)) - loss_of(
        bradley_terry_loss(scores, batch)
    )
    difference.backward()
    assert difference.item() == pytest.approx(0.1 * (2.5**2 + 0) / 2)
    # 0.1 * 2 * 2.5 / 2 for both of pair 7; the sum of pair 3 is 0.
    expected = torch.tensor([0, 0.25, 0, 0, 0.25], dtype=torch.float64)
    torch.testing.assert_close(scores.grad, expected)


def test_equal_scores_are_log_2_and_half_right() -> None:
    batch = {"pair_ids": torch.tensor([0, 0]), "chosen": torch.tensor([True, False])}
    output = bradley_terry_loss(torch.full((2,), 3.0), batch)
    metrics = finalize(output.metrics, {"pairs": 1})
    assert output.terms[0].sum.item() == pytest.approx(math.log(2))
    assert metrics["rewards/accuracy"] == 0.5


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_score_in_no_pair_does_not_matter(poison: float) -> None:
    scores, batch = two_pairs()
    poisoned = scores.detach().clone()
    poisoned[2] = poison
    poisoned.requires_grad_()
    for values in (scores, poisoned):
        loss_of(bradley_terry_loss(values, batch, center_coefficient=0.1)).backward()
    torch.testing.assert_close(poisoned.grad, scores.grad, rtol=0, atol=0)


@pytest.mark.parametrize("num_sequences", [0, 2])
def test_without_pairs_the_loss_is_a_connected_zero(num_sequences: int) -> None:
    scores = torch.full((num_sequences,), math.nan, requires_grad=True)
    batch = {
        "pair_ids": torch.full((num_sequences,), -1),
        "chosen": torch.zeros(num_sequences).bool(),
        "margins": torch.full((num_sequences,), math.nan),
    }
    loss = total(
        bradley_terry_loss(scores, batch, center_coefficient=0.1).terms,
        {"pairs": 0},
    )
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(scores.grad, torch.zeros(num_sequences))


def test_far_scores_stay_finite() -> None:
    batch = {"pair_ids": torch.tensor([0, 0]), "chosen": torch.tensor([True, False])}
    scores = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = bradley_terry_loss(scores, batch).terms[0].sum
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    torch.testing.assert_close(scores.grad, torch.tensor([-1.0, 1.0]))


def test_gradcheck() -> None:
    scores, batch = two_pairs()
    batch["margins"] = torch.full((5,), 0.3)
    assert torch.autograd.gradcheck(
        lambda values: loss_of(bradley_terry_loss(values, batch, center_coefficient=0.2)), scores
    )


def test_wrong_inputs_are_named() -> None:
    scores, batch = two_pairs()
    with pytest.raises(ValueError, match=r"scores must be \[N\], got \(5, 1\)"):
        bradley_terry_loss(scores.unsqueeze(1), batch)
    with pytest.raises(ValueError, match=r"margins must have the shape \(5,\) .*, got \(2,\)"):
        bradley_terry_loss(scores, batch | {"margins": torch.ones(2)})
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(
            ValueError, match=f"center_coefficient must be 0 or more and finite, got {bad}"
        ):
            bradley_terry_loss(scores, batch, center_coefficient=bad)
    with pytest.raises(ValueError, match="must have the column pair_ids"):
        bradley_terry_loss(scores, {"chosen": batch["chosen"]})
