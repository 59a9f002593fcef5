"""DPO, CPO, SimPO and ORPO on packed pairs, in any order."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from burnish_losses import (
    LossOutput,
    count,
    cpo_loss,
    dpo_loss,
    finalize,
    hinge_pair_loss,
    ipo_pair_loss,
    orpo_loss,
    simpo_loss,
    total,
)

Columns = dict[str, torch.Tensor]
REFERENCE = -2.0
LOSSES: list[Callable[..., LossOutput]] = [
    partial(dpo_loss, nll_coefficient=0.3),
    partial(dpo_loss, pair_loss=ipo_pair_loss, length_average=True),
    cpo_loss,
    partial(simpo_loss, nll_coefficient=0.3),
    orpo_loss,
]


def packed(*sequences: tuple[int, bool, list[float]]) -> tuple[torch.Tensor, Columns]:
    """(pair id, chosen, log-probs of the trained tokens); an untrained token before each."""
    values, mask, nll_mask, lengths = [], [], [], [0]
    for _, chosen, logprobs in sequences:
        values += [-9.0, *logprobs]
        mask += [False] + [True] * len(logprobs)
        nll_mask += [False] + [chosen] * len(logprobs)
        lengths.append(lengths[-1] + len(logprobs) + 1)
    batch = {
        "token_mask": torch.tensor(mask),
        "nll_mask": torch.tensor(nll_mask),
        "reference_logprobs": torch.full((len(values),), REFERENCE, dtype=torch.float64),
        "cu_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "pair_ids": torch.tensor([pair_id for pair_id, _, _ in sequences]),
        "chosen": torch.tensor([chosen for _, chosen, _ in sequences]),
    }
    return torch.tensor(values, dtype=torch.float64, requires_grad=True), batch


def two_pairs() -> tuple[torch.Tensor, Columns]:
    """Pair 3: log-ratios 2 (over 2 tokens) and -4 (over 1). Pair 7: -1 (1) and 0.5 (2).

    Their log-probs: -2 and -6; -3 and -3.5. A lone sequence is in between.
    """
    return packed(
        (7, False, [-1.75, -1.75]),
        (3, True, [-0.5, -1.5]),
        (-1, True, [-1.0]),
        (7, True, [-3.0]),
        (3, False, [-6.0]),
    )


def loss_of(output: LossOutput, batch: Columns) -> torch.Tensor:
    return total(output.terms, count(batch))


def metrics_of(output: LossOutput, batch: Columns) -> dict[str, float]:
    return finalize(output.metrics, count(batch))


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_by_hand() -> None:
    logprobs, batch = two_pairs()
    loss = loss_of(dpo_loss(logprobs, batch, beta=0.1), batch)
    loss.backward()
    # Margins 6 and -1.5.
    assert loss.item() == pytest.approx((softplus(-0.6) + softplus(0.15)) / 2)
    three, seven = 0.1 * sigmoid(-0.6) / 2, 0.1 * sigmoid(0.15) / 2
    expected = [0, seven, seven, 0, -three, -three, 0, 0, 0, -seven, 0, three]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64))


def test_dpo_metrics_by_hand() -> None:
    logprobs, batch = two_pairs()
    metrics = metrics_of(dpo_loss(logprobs, batch, beta=0.1, nll_coefficient=0.5), batch)
    assert metrics == pytest.approx(
        {
            "loss/preference": (softplus(-0.6) + softplus(0.15)) / 2,
            "rewards/chosen": 0.1 * (2 - 1) / 2,
            "rewards/rejected": 0.1 * (-4 + 0.5) / 2,
            "rewards/margin": 0.1 * (6 - 1.5) / 2,
            "rewards/accuracy": 0.5,
            "logps/chosen": (-2 - 3) / 2,
            "logps/rejected": (-6 - 3.5) / 2,
            # Over the 4 tokens of nll_mask, that of the lone sequence included.
            "loss/nll": (0.5 + 1.5 + 1.0 + 3.0) / 4,
        }
    )


def test_the_sft_term_has_its_weight_and_its_own_tokens() -> None:
    logprobs, batch = two_pairs()
    batch["nll_mask"][0] = True  # a prompt's token, outside token_mask
    with_it = loss_of(dpo_loss(logprobs, batch, nll_coefficient=0.5), batch)
    difference = with_it - loss_of(dpo_loss(logprobs, batch), batch)
    difference.backward()
    assert difference.item() == pytest.approx(0.5 * (9.0 + 0.5 + 1.5 + 1.0 + 3.0) / 5)
    expected = torch.where(batch["nll_mask"], -0.1, 0.0).double()
    torch.testing.assert_close(logprobs.grad, expected)


def test_length_average_divides_by_the_sequences_own_tokens() -> None:
    """Also with an untrained tail, as rows of a pack and of a padded batch have it."""
    logprobs, batch = two_pairs()
    batch["token_mask"][5] = False  # pair 3, chosen: one token of log-ratio 1.5 is left
    output = dpo_loss(logprobs, batch, beta=0.5, pair_loss=ipo_pair_loss, length_average=True)
    # Margins 1.5 - (-4) and -1 - 0.25, the aim 1 / (2 * 0.5) = 1.
    assert loss_of(output, batch).item() == pytest.approx((4.5**2 + 2.25**2) / 2)
    metrics = metrics_of(output, batch)
    assert metrics["rewards/margin"] == pytest.approx(0.5 * (5.5 - 1.25) / 2)
    assert metrics["logps/rejected"] == pytest.approx((-6 - 1.75) / 2)


def test_ipo_sums_unless_told_otherwise() -> None:
    logprobs, batch = two_pairs()
    output = dpo_loss(logprobs, batch, beta=0.5, pair_loss=ipo_pair_loss)
    assert loss_of(output, batch).item() == pytest.approx((5.0**2 + 2.5**2) / 2)


def test_at_the_reference_the_margin_is_exactly_0_and_the_loss_log_2() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(1000, generator=generator) * 5  # float32
    batch = {
        "token_mask": torch.rand(1000, generator=generator) < 0.8,
        "reference_logprobs": logprobs.clone(),
        "cu_seqlens": torch.tensor([0, 700, 1000], dtype=torch.int32),
        "pair_ids": torch.tensor([0, 0]),
        "chosen": torch.tensor([False, True]),
    }
    output = dpo_loss(logprobs, batch)
    metrics = metrics_of(output, batch)
    assert metrics["rewards/margin"] == 0.0
    assert metrics["rewards/accuracy"] == 0.5  # a tie is half right
    assert loss_of(output, batch).item() == torch.tensor(math.log(2)).item()


def test_the_order_of_sequences_does_not_matter_but_who_is_chosen_does() -> None:
    logprobs, batch = packed((0, True, [-1.0]), (0, False, [-3.0]))
    turned, turned_batch = packed((0, False, [-3.0]), (0, True, [-1.0]))
    loss = loss_of(dpo_loss(logprobs, batch), batch)
    assert loss.item() == pytest.approx(softplus(-0.2))
    assert loss_of(dpo_loss(turned, turned_batch), turned_batch).item() == loss.item()
    batch["chosen"] = ~batch["chosen"]
    assert loss_of(dpo_loss(logprobs, batch), batch).item() == pytest.approx(softplus(0.2))


def test_cpo_by_hand() -> None:
    logprobs, batch = two_pairs()
    del batch["reference_logprobs"]
    loss = loss_of(cpo_loss(logprobs, batch, beta=0.1), batch)
    loss.backward()
    # Margins 4 and 0.5; NLL 6 over 4 tokens.
    assert loss.item() == pytest.approx((softplus(-0.4) + softplus(-0.05)) / 2 + 6 / 4)
    three, seven = 0.1 * sigmoid(-0.4) / 2, 0.1 * sigmoid(-0.05) / 2
    expected = [0, seven, seven, 0, -three, -three, 0, 0, 0, -seven, 0, three]
    nll = torch.where(batch["nll_mask"], -0.25, 0.0).double()
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64) + nll)


def test_simpo_by_hand() -> None:
    logprobs, batch = two_pairs()
    del batch["reference_logprobs"]
    loss = loss_of(simpo_loss(logprobs, batch, beta=2.0, gamma=0.5), batch)
    loss.backward()
    # Means -1 and -6, -3 and -1.75: 2 * 5 - 0.5 and 2 * (-1.25) - 0.5.
    assert loss.item() == pytest.approx((softplus(-9.5) + softplus(3.0)) / 2)
    three, seven = 2 * sigmoid(-9.5) / 2, 2 * sigmoid(3.0) / 2
    expected = [0, seven / 2, seven / 2, 0, -three / 2, -three / 2, 0, 0, 0, -seven, 0, three]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=torch.float64))


def test_simpo_label_smoothing_by_hand() -> None:
    logprobs, batch = packed((0, True, [-1.0]), (0, False, [-3.0]))
    output = simpo_loss(logprobs, batch, beta=2.0, gamma=0.5, label_smoothing=0.2)
    expected = 0.8 * softplus(-3.5) + 0.2 * softplus(3.5)
    assert loss_of(output, batch).item() == pytest.approx(expected)


def test_orpo_by_hand() -> None:
    # Geometric means 1/2 (of 1/4 and 1) and 1/5: odds 1 and 1/4.
    logprobs, batch = packed((0, True, [math.log(0.25), 0.0]), (0, False, [math.log(0.2)]))
    output = orpo_loss(logprobs, batch, beta=0.3)
    loss = loss_of(output, batch)
    loss.backward()
    # -log sigmoid(log 4) = log(1 + 1/4); NLL log 4 over 2 tokens.
    assert loss.item() == pytest.approx(0.3 * math.log(1.25) + math.log(4) / 2)
    # d log odds / d log p = 1 / (1 - p): 2 and 5/4; sigmoid(-log 4) = 1/5.
    chosen, rejected = -0.3 * 0.2 * 2 / 2 - 0.5, 0.3 * 0.2 * 1.25
    expected = torch.tensor([0, chosen, chosen, 0, rejected], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected)
    metrics = metrics_of(output, batch)
    assert metrics["preference/log_odds"] == pytest.approx(math.log(4))
    assert metrics["loss/preference"] == pytest.approx(math.log(1.25))
    assert metrics["rewards/margin"] == pytest.approx(0.3 * math.log(0.5 / 0.2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("certain", [0.0, -1e-12, -1e-8, -1e-6, -1e-4])
def test_orpo_stays_finite_at_certainty(dtype: torch.dtype, certain: float) -> None:
    for chosen, rejected in ((certain, -1e4), (-1e4, certain), (certain, certain)):
        logprobs, batch = packed((0, True, [chosen, chosen]), (0, False, [rejected]))
        logprobs = logprobs.detach().to(dtype).requires_grad_()
        loss = loss_of(orpo_loss(logprobs, batch, nll_coefficient=0.0), batch)
        loss.backward()
        assert bool(loss.isfinite())
        assert bool(logprobs.grad.isfinite().all())
        if rejected == certain:  # most wrong or even: the rejected one is pushed down
            assert logprobs.grad[-1] > 0


def test_orpo_in_float32_is_that_in_float64() -> None:
    gradients = []
    for dtype in (torch.float64, torch.float32):
        logprobs, batch = packed((0, True, [-1.0, -0.3]), (0, False, [-0.7]))
        logprobs = logprobs.detach().to(dtype).requires_grad_()
        loss_of(orpo_loss(logprobs, batch), batch).backward()
        gradients.append(logprobs.grad.double())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


def test_orpo_log_odds_go_on_as_their_tangent() -> None:
    losses = []
    for offset in (-1e-9, 0.0, 1e-9):  # across the limit, in float64
        logprobs, batch = packed((0, True, [-1.0]), (0, False, [-1e-6 + offset]))
        loss = loss_of(orpo_loss(logprobs, batch, beta=1.0, nll_coefficient=0.0), batch)
        loss.backward()
        losses.append(loss.item())
    # The derivative of the rejected one's log-odds, 1 / (1 - exp(-1e-6)) = 1e6, on both sides.
    below, above = losses[1] - losses[0], losses[2] - losses[1]
    assert [below, above] == pytest.approx([1e-3, 1e-3], rel=2e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradcheck(loss: Callable[..., LossOutput]) -> None:
    logprobs, batch = two_pairs()
    assert torch.autograd.gradcheck(lambda x: loss_of(loss(x, batch), batch), logprobs)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_at_untrained_tokens_does_not_matter(
    loss: Callable[..., LossOutput], poison: float
) -> None:
    logprobs, batch = two_pairs()
    untrained = ~batch["token_mask"]
    poisoned = torch.where(untrained, poison, logprobs.detach()).requires_grad_()
    poisoned_batch = batch | {
        "reference_logprobs": torch.where(untrained, poison, batch["reference_logprobs"])
    }
    clean, dirty = loss(logprobs, batch), loss(poisoned, poisoned_batch)
    loss_of(clean, batch).backward()
    loss_of(dirty, batch).backward()
    assert metrics_of(dirty, batch) == metrics_of(clean, batch)
    torch.testing.assert_close(poisoned.grad, logprobs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pair_ids", [[0, 0], [-1, -1]])
def test_nothing_trained_moves_nothing(
    loss: Callable[..., LossOutput], pair_ids: list[int]
) -> None:
    logprobs, batch = packed((0, True, [-1.0]), (0, False, [-1.0]))
    batch["token_mask"][:] = False
    batch["nll_mask"][:] = False
    batch["pair_ids"] = torch.tensor(pair_ids)
    logprobs = torch.full_like(logprobs.detach(), math.nan).requires_grad_()
    value = loss_of(loss(logprobs, batch), batch)
    value.backward()
    # A pair of empty completions is still one pair, at margin 0.
    assert (value.item() == 0.0) == (pair_ids == [-1, -1])
    assert bool(value.isfinite())
    torch.testing.assert_close(logprobs.grad, torch.zeros(4).double())


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_sequences_is_a_connected_zero(loss: Callable[..., LossOutput]) -> None:
    _, batch = two_pairs()
    batch = {name: values[:0] for name, values in batch.items()}
    batch["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    logprobs = torch.zeros(0, requires_grad=True)
    value = total(loss(logprobs, batch).terms, {"pairs": 4, "nll_tokens": 9})
    value.backward()
    assert value.item() == 0.0


def broken(pair_ids: list[int], chosen: list[bool]) -> tuple[torch.Tensor, Columns]:
    return packed(*((i, c, [-1.0]) for i, c in zip(pair_ids, chosen, strict=True)))


@pytest.mark.parametrize(
    ("pair_ids", "chosen", "message"),
    [
        ([5, -1], [True, False], "got 1 chosen and 0 rejected with pair id 5"),
        ([4, 4, 5], [True, False, False], "got 0 chosen and 1 rejected with pair id 5"),
        ([5, 5], [True, True], "got 2 chosen and 0 rejected with pair id 5"),
        ([5, 5], [False, False], "got 0 chosen and 2 rejected with pair id 5"),
        ([4, 5, 5, 5, 4], [True, True, False, False, False], "1 chosen and 2 rejected with pair"),
        ([5] * 4, [True, False, True, False], "got 2 chosen and 2 rejected with pair id 5"),
        # Halves of two pairs, cut apart.
        ([4, 5], [True, False], "got 1 chosen and 0 rejected with pair id 4; keep pairs whole"),
    ],
)
def test_a_pair_must_be_whole(pair_ids: list[int], chosen: list[bool], message: str) -> None:
    logprobs, batch = broken(pair_ids, chosen)
    with pytest.raises(ValueError, match=message):
        dpo_loss(logprobs, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": torch.tensor([1, 0])}, "chosen must be bool, got torch.int64"),
        ({"chosen": torch.tensor([True])}, r"chosen must have the shape \(2,\) .*, got \(1,\)"),
        ({"pair_ids": torch.zeros(4).int()}, r"pair_ids must have the shape \(2,\) .* \(4,\)"),
        ({"pair_ids": torch.zeros(2)}, "pair_ids must be integers, got torch.float32"),
        ({"nll_mask": torch.zeros(4)}, "nll_mask must be bool, got torch.float32"),
        ({"nll_mask": None}, "must have the column nll_mask"),
        ({"reference_logprobs": None}, "must have the column reference_logprobs"),
        ({"pair_ids": None}, "must have the column pair_ids"),
        ({"cu_seqlens": None}, "must have the column cu_seqlens"),
    ],
)
def test_wrong_columns_are_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    logprobs, batch = broken([5, 5], [True, False])
    changed = {name: value for name, value in (batch | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        dpo_loss(logprobs, changed, nll_coefficient=0.1)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("loss", [dpo_loss, cpo_loss, simpo_loss, orpo_loss])
@pytest.mark.parametrize("name", ["beta", "nll_coefficient"])
def test_a_setting_out_of_range_is_named(
    loss: Callable[..., LossOutput], name: str, bad: float
) -> None:
    logprobs, batch = two_pairs()
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {bad}"):
        loss(logprobs, batch, **{name: bad})


def test_a_negative_gamma_and_a_beta_of_0_are_refused() -> None:
    logprobs, batch = two_pairs()
    with pytest.raises(ValueError, match=r"gamma must be 0 or more and finite, got -0.5"):
        simpo_loss(logprobs, batch, gamma=-0.5)
    with pytest.raises(ValueError, match="beta must be positive and finite, got 0"):
        dpo_loss(logprobs, batch, beta=0)


def test_hinge_through_dpo_by_hand() -> None:
    # One token each, log-ratios 2 and -4: margin 6, 1 - 0.1 * 6.
    logprobs, batch = packed((0, True, [0.0]), (0, False, [-6.0]))
    output = dpo_loss(logprobs, batch, beta=0.1, pair_loss=hinge_pair_loss)
    assert loss_of(output, batch).item() == pytest.approx(0.4)
