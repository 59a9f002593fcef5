import pytest
import torch
from burnish_losses import (
    LossOutput,
    Metric,
    Term,
    add_counts,
    bradley_terry_loss,
    combine_metrics,
    count,
    finalize,
    kto_baseline,
    total,
)

MASK = torch.tensor([0, 1, 1, 0, 1]).bool()
CU_SEQLENS = torch.tensor([0, 3, 5], dtype=torch.int32)


def test_each_unit_is_counted_if_its_columns_are_there() -> None:
    assert count({"token_mask": MASK}) == {"tokens": 3}
    assert count({"token_mask": MASK, "cu_seqlens": CU_SEQLENS}) == {"tokens": 3, "sequences": 2}
    assert count({"pair_ids": torch.tensor([0, 0, 7, 7, -1])}) == {"pairs": 2}
    nll = {"token_mask": MASK, "nll_mask": ~MASK}
    assert count(nll) == {"tokens": 3, "nll_tokens": 2}
    with pytest.raises(ValueError, match=r"count needs token_mask .* got the columns \['labels'\]"):
        count({"labels": torch.zeros(5)})
    with pytest.raises(ValueError, match="count needs token_mask"):
        count({"cu_seqlens": CU_SEQLENS})


def test_a_reward_model_needs_no_tokens() -> None:
    batch = {"pair_ids": torch.tensor([0, 0]), "chosen": torch.tensor([True, False])}
    output = bradley_terry_loss(torch.tensor([1.0, 0.0]), batch)
    assert total(output.terms, count(batch)).item() == pytest.approx(0.31326169)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(5, dtype=torch.int64),  # attention_mask of a tokenizer
        torch.ones(1, 5, dtype=torch.bool),
        torch.ones(2, dtype=torch.bool),  # keep_mask of sequences
        [True] * 5,
    ],
)
def test_masks_that_are_not_of_tokens_are_left_alone(mask: object) -> None:
    assert count({"token_mask": MASK, "other_mask": mask}) == {"tokens": 3}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("unit", "needed"),
    [
        ("tokens", "if the batch has token_mask"),
        ("sequences", "if the batch has token_mask and cu_seqlens"),
        ("pairs", "if the batch has pair_ids"),
        ("nll_tokens", r"if the batch has nll_mask \[T\] bool, beside token_mask"),
        ("steps", "counts tokens, sequences, pairs, and NAME_tokens"),
    ],
)
def test_what_was_not_counted_says_what_it_needs(unit: str, needed: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{unit}'; .*{needed}"):
        total([Term(torch.ones(()), unit)], {"other": 1})
    with pytest.raises(ValueError, match=needed):
        finalize({"x": Metric(torch.ones(()), unit, "mean")}, {"other": 1})


def test_counts_add_up_over_the_union_of_units() -> None:
    parts = [{"tokens": 3, "pairs": 0}, {"tokens": 4, "nll_tokens": 0}, {"tokens": 0}]
    assert add_counts(parts) == {"tokens": 7, "pairs": 0, "nll_tokens": 0}
    assert add_counts(part for part in parts) == add_counts(parts)
    assert add_counts([{"tokens": torch.tensor(3)}]) == {"tokens": 3}
    for wrong in ({"tokens": 3}, [], 3):
        with pytest.raises(ValueError, match="add_counts must be given a list of counts"):
            add_counts(wrong)  # type: ignore[arg-type]


def test_counts_may_be_tensors_as_an_all_reduce_leaves_them() -> None:
    counts = {"tokens": torch.tensor(4)}
    loss = total([Term(torch.tensor(2.0), "tokens")], counts)  # type: ignore[arg-type]
    assert loss.item() == 0.5
    metrics = {"x": Metric(torch.tensor(2.0), "tokens", "mean")}
    assert finalize(metrics, counts) == {"x": 0.5}  # type: ignore[arg-type]


def test_one_thing_in_the_place_of_another_is_named() -> None:
    metric, term = Metric(torch.ones(()), None, "sum"), Term(torch.ones(()), "tokens")
    output, counts = LossOutput((term,), {"x": metric}), {"tokens": 1}
    for wrong in (output, term, output.metrics, [output]):
        with pytest.raises(ValueError, match=r"list of terms, got .*; pass output.terms"):
            total(wrong, counts)  # type: ignore[arg-type]
    for wrong in (output, [output.metrics], {"x": 1.0}):
        with pytest.raises(ValueError, match=r"metrics by name, got .*; pass output.metrics"):
            finalize(wrong, counts)  # type: ignore[arg-type]
    for wrong in (output, output.metrics, [output], [metric]):
        with pytest.raises(ValueError, match=r"list of metrics, got .*\[output.metrics for output"):
            combine_metrics(wrong)  # type: ignore[arg-type]
    for wrong in (5, [counts], None):
        with pytest.raises(ValueError, match=r"counts must be numbers by unit, got .*count\(batch"):
            total([term], wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="counts must be numbers by unit"):
            finalize(output.metrics, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_mismatched_sequences must be a number"):
        kto_baseline(torch.ones(()), counts)  # type: ignore[arg-type]


def test_parts_may_come_one_by_one() -> None:
    metrics = {"x": Metric(torch.ones(()), None, "sum")}
    assert finalize(combine_metrics(metrics for _ in range(3)), {}) == {"x": 3.0}
    terms = {"a": Term(torch.ones(()), "tokens"), "b": Term(torch.ones(()), "tokens")}
    assert total(terms.values(), {"tokens": 1}).item() == 2.0
