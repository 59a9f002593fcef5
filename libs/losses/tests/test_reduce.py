import math

import pytest
import torch
from burnish_losses import (
    Metric,
    Term,
    combine_metrics,
    count,
    finalize,
    masked_max,
    masked_sum,
    sequence_sums,
    total,
)
from hypothesis import given
from hypothesis import strategies as st

PARTS = ((100, 2.0), (900, 0.5))


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_micro_batches_weigh_by_their_tokens() -> None:
    """100 tokens at loss 2.0 and 900 at 0.5 are 0.65; a mean of means would be 1.25."""
    counts = {"tokens": 1000, "sequences": 2}
    sums = [masked_sum(torch.full((n,), mean), torch.ones(n).bool()) for n, mean in PARTS]
    loss = sum(total([Term(part, "tokens")], counts) for part in sums)
    assert float(loss) == pytest.approx(0.65)


def test_total_mixes_units_and_weights() -> None:
    terms = [Term(scalar(6.0), "tokens"), Term(scalar(8.0), "sequences", weight=0.5)]
    assert float(total(terms, {"tokens": 3, "sequences": 4})) == 6 / 3 + 0.5 * 8 / 4


def test_nothing_trained_is_zero_loss_with_zero_gradients() -> None:
    values = torch.tensor([torch.nan, -torch.inf], requires_grad=True)
    loss = total(
        [Term(masked_sum(values, torch.zeros(2).bool()), "tokens")], {"tokens": 0, "sequences": 0}
    )
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(values.grad, torch.zeros(2))


def test_total_refuses_what_it_cannot_divide() -> None:
    with pytest.raises(ValueError, match="at least one term"):
        total([], {"tokens": 1, "sequences": 1})
    with pytest.raises(ValueError, match="got 'token'"):
        total([Term(scalar(1.0), "token")], {"tokens": 1, "sequences": 1})


def test_count_leaves_out_sequences_without_trained_tokens() -> None:
    token_mask = torch.tensor([0, 1, 1, 0, 0, 0, 1]).bool()
    cu_seqlens = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    assert count({"token_mask": token_mask, "cu_seqlens": cu_seqlens}) == {
        "tokens": 3,
        "sequences": 2,
    }


def test_sequence_sums_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    sums = sequence_sums(values, torch.tensor([0, 1, 1, 4], dtype=torch.int32))
    assert sums.tolist() == [1.0, 0.0, 14.0]


def test_sequence_sums_gradcheck() -> None:
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    assert torch.autograd.gradcheck(lambda values: sequence_sums(values, cu_seqlens), values)


def test_sequence_sums_of_nothing() -> None:
    values = torch.zeros(0, requires_grad=True)
    sums = sequence_sums(values, torch.tensor([0], dtype=torch.int32))
    sums.sum().backward()
    assert sums.shape == (0,)


def test_sequence_sums_refuses_foreign_boundaries() -> None:
    with pytest.raises(ValueError, match=r"number of tokens, 3, got \[0, 4\]"):
        sequence_sums(torch.zeros(3), torch.tensor([0, 4]))


def test_masked_max() -> None:
    values = torch.tensor([torch.nan, -3.0, -1.0])
    assert masked_max(values, torch.tensor([False, True, False])).item() == -3.0
    assert masked_max(values, torch.zeros(3).bool()).item() == -math.inf
    assert masked_max(values[:0], torch.zeros(0).bool()).item() == -math.inf


def test_each_metric_is_reduced_by_its_rule() -> None:
    parts = [
        {
            "mean": Metric(scalar(200.0), "tokens", "mean"),
            "sum": Metric(scalar(1.0), None, "sum"),
            "max": Metric(scalar(5.0), None, "max"),
            "min": Metric(scalar(-1.0), None, "min"),
        },
        {
            "mean": Metric(scalar(450.0), "tokens", "mean"),
            "sum": Metric(scalar(2.0), None, "sum"),
            "max": Metric(scalar(3.0), None, "max"),
            "min": Metric(scalar(-4.0), None, "min"),
        },
    ]
    values = finalize(combine_metrics(parts), {"tokens": 1000, "sequences": 2})
    assert values == {"mean": 0.65, "sum": 3.0, "max": 5.0, "min": -4.0}


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), st.data())
def test_combining_in_any_grouping_is_the_same(values: list[float], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))
    parts = [
        {name: Metric(scalar(value), None, name) for name in ("sum", "max", "min")}  # type: ignore[arg-type]
        for value in values
    ]
    nested = combine_metrics([combine_metrics(parts[:cut]), combine_metrics(parts[cut:])])
    result = finalize(nested, {"tokens": 0, "sequences": 0})
    assert result["max"] == max(values)
    assert result["min"] == min(values)
    assert result["sum"] == pytest.approx(sum(values), abs=1e-9)


def test_a_metric_that_only_one_part_has_is_kept() -> None:
    combined = combine_metrics([{}, {"only": Metric(scalar(2.0), None, "sum")}])
    assert finalize(combined, {"tokens": 0, "sequences": 0}) == {"only": 2.0}


def test_nothing_measured_is_nan_not_zero() -> None:
    metrics = {
        "mean": Metric(scalar(0.0), "sequences", "mean"),
        "max": Metric(scalar(-math.inf), None, "max"),
    }
    assert all(math.isnan(v) for v in finalize(metrics, {"tokens": 0, "sequences": 0}).values())


def test_an_infinite_maximum_is_shown() -> None:
    metrics = {"max": Metric(scalar(math.inf), None, "max")}
    assert finalize(metrics, {"tokens": 1, "sequences": 1}) == {"max": math.inf}


def test_one_name_has_one_declaration() -> None:
    one = {"x": Metric(scalar(1.0), None, "sum")}
    other = {"x": Metric(scalar(1.0), "tokens", "mean")}
    with pytest.raises(ValueError, match="'x' must be declared alike"):
        combine_metrics([one, other])


def test_a_mean_names_its_unit() -> None:
    with pytest.raises(ValueError, match="must name its unit"):
        Metric(scalar(1.0), None, "mean")


@pytest.mark.parametrize("cu_seqlens", [[1, 3], [-1, 3], [3], []])
def test_boundaries_start_at_the_first_token(cu_seqlens: list[int]) -> None:
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    with pytest.raises(ValueError, match="must start at 0 and end at the number of tokens, 3"):
        sequence_sums(torch.ones(3), boundaries)
    with pytest.raises(ValueError, match="must start at 0"):
        count({"token_mask": torch.ones(3, dtype=torch.bool), "cu_seqlens": boundaries})


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_a_mask_that_is_not_bool_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"token_mask must be bool, got {dtype}"):
        count({"token_mask": torch.tensor([0, 2, 1], dtype=dtype)})


def test_count_by_unit() -> None:
    batch = {
        "token_mask": torch.tensor([0, 1, 1, 0, 1, 1, 0]).bool(),
        "cu_seqlens": torch.tensor([0, 3, 5, 7], dtype=torch.int32),
        "pair_ids": torch.tensor([4, 4, -1]),
        "nll_mask": torch.tensor([0, 1, 1, 0, 0, 0, 0]).bool(),
    }
    assert count(batch) == {"tokens": 4, "sequences": 3, "pairs": 1, "nll_tokens": 2}
    assert "nll_tokens" not in count({**batch, "nll_mask": batch["nll_mask"].float()})
