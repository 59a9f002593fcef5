"""Losses as sums with units, divided once by counts of the whole global batch.

A loss over a micro-batch knows only its own tokens; a mean taken there and averaged later would
weigh micro-batches alike whatever their size. So losses return sums (`Term`), the caller counts
tokens and sequences over all micro-batches and ranks beforehand (`Counts`), and `total` divides.
Summing `total` over micro-batches and ranks then gives the same number however they were cut.

Masking selects, it never multiplies: 0 * NaN is NaN. Selection must also come before any function
whose derivative may not be finite there, since 0 * NaN in the backward pass is NaN as well.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from burnish_losses._columns import (
    check_cu_seqlens,
    check_integers,
    check_mask,
    check_tensors,
    check_tokens,
    column,
    trained_mask,
    widened,
)

# What is counted over the whole global batch, by unit: see `count`.
Counts = Mapping[str, int]
Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Term:
    """One summand of a loss: `weight * sum / (global count of unit)`."""

    sum: Tensor  # scalar
    unit: str
    weight: float = 1.0


@dataclass(frozen=True)
class Metric:
    """A number to report, with the rule by which parts of a batch become one.

    For "mean", `value` is a sum over `unit`, divided by the global count in `finalize`.
    The others need no unit.
    """

    value: Tensor  # scalar, detached
    unit: str | None
    reduction: Reduction

    def __post_init__(self) -> None:
        if self.reduction == "mean" and self.unit is None:
            raise ValueError("A metric reduced by mean must name its unit, got None.")


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns for one micro-batch."""

    terms: tuple[Term, ...]
    metrics: dict[str, Metric]


def count(batch: Mapping[str, Tensor]) -> dict[str, int]:
    """What one batch holds, by unit; the counts of disjoint batches add up: `add_counts`.

    Args:
        batch: columns. What is counted is what has its columns there.

    Returns:
        tokens, with token_mask [T] bool: trained ones. sequences, with cu_seqlens [N+1] as well:
        those with at least one of them. pairs, with pair_ids [N]: different ones from 0 on. And
        with token_mask, for every further bool column NAME_mask [T], such as nll_mask,
        NAME_tokens: where it is True.

    Raises:
        ValueError: nothing that could be counted, a token_mask that is not bool or not [T], or
            cu_seqlens that are not those of the mask.
    """
    counts: dict[str, int] = {}
    if "token_mask" in batch:
        mask = trained_mask(batch)
        counts["tokens"] = int(mask.sum())
        if "cu_seqlens" in batch:
            lengths = sequence_lengths(mask, batch["cu_seqlens"])
            counts["sequences"] = int((lengths > 0).sum())
    if "pair_ids" in batch:
        pair_ids = column(batch, "pair_ids")
        check_integers("[N]", pair_ids=pair_ids)
        counts["pairs"] = len(pair_ids[pair_ids >= 0].unique())
    if not counts:
        raise ValueError(
            "count needs token_mask [T], for sequences cu_seqlens [N+1] as well, or pair_ids [N], "
            f"got the columns {sorted(batch)}; add those of what the loss is divided by."
        )
    for name in sorted(batch) if "tokens" in counts else ():
        values = batch[name]
        if not name.endswith("_mask") or name == "token_mask" or not isinstance(values, Tensor):
            continue
        if values.dtype == torch.bool and values.shape == mask.shape:
            counts[name.removesuffix("mask") + "tokens"] = int(values.sum())
    return counts


def add_counts(parts: Iterable[Counts]) -> dict[str, int]:
    """Counts of micro-batches or ranks as those of the whole global batch.

    Args:
        parts: of `count`, for batches that share no sequence; from ranks, gathered as they are
            (`all_gather_object`), since their units may differ. A unit that one of them lacks is 0
            there; one that is 0 everywhere stays.

    Returns:
        By unit, the sum.

    Raises:
        ValueError: no list of counts, or an empty one.
    """
    listed = _listed(parts)
    if not listed:
        raise ValueError(
            f"add_counts must be given a list of counts, got {_kind(parts)}; pass "
            "[count(batch) for batch in batches]."
        )
    counts: dict[str, int] = {}
    for part in listed:
        for unit, num in _as_counts(part).items():
            counts[unit] = counts.get(unit, 0) + num
    return counts


def total(terms: Iterable[Term], counts: Counts) -> Tensor:
    """The loss to call backward on: each term divided once by its global count.

    `counts` are of the global batch, also when `terms` come from one micro-batch of it. A unit
    counted 0 times has nothing in its sum; it is divided by 1, so that the loss is 0 and the
    gradients are zeros.

    The whole loss is the sum of this over micro-batches and ranks, and so is its gradient. A
    wrapper that averages gradients over data-parallel ranks, as DDP and FSDP do, divides once too
    often: there, call backward on `total(...) * num_ranks`.

    Args:
        terms: of `LossOutput.terms`; those of several losses can be put together.
        counts: of `count` and `add_counts`, over all micro-batches and ranks.

    Returns:
        scalar, float32 or wider.

    Raises:
        ValueError: no terms, what are no terms, or a unit that was not counted.
    """
    listed = _listed(terms)
    if listed is None or not all(isinstance(term, Term) for term in listed):
        raise ValueError(
            f"total must be given a list of terms, got {_kind(terms)}; pass output.terms."
        )
    if not listed:
        raise ValueError("total needs at least one term, got none; return a zero sum instead.")
    counts = _as_counts(counts)
    parts = [
        widened(term.sum) * (term.weight / max(_count_of(counts, term.unit), 1)) for term in listed
    ]
    return torch.stack(parts).sum()


def combine_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of micro-batches or ranks as those of the whole: sums added, extremes kept.

    A part without any metric is an empty one, of a rank with nothing to do, and counts nowhere.

    Raises:
        ValueError: no list of metrics, one name with two units or reductions, or a mean that some
            parts lack.
    """
    listed = _listed(parts)
    if listed is None or not all(_are_metrics(part) for part in listed):
        raise ValueError(
            f"combine_metrics must be given a list of metrics, got {_kind(parts)}; pass "
            "[output.metrics for output in outputs]."
        )
    combined: dict[str, Metric] = {}
    for part in listed:
        for name, metric in part.items():
            first = combined.get(name)
            combined[name] = metric if first is None else _combine(name, first, metric)
    for name, metric in combined.items():
        present = [name in part for part in listed if part]
        if metric.reduction == "mean" and not all(present):
            raise ValueError(
                f"Metric {name!r}, a mean, must be in every part, got it in {sum(present)} of "
                f"{len(present)}: it is divided by the count of all. Give the column that it is of "
                "to every micro-batch."
            )
    return combined


def finalize(metrics: Mapping[str, Metric], counts: Counts) -> dict[str, float]:
    """Metrics of the whole global batch as numbers; NaN where nothing was there to measure.

    Args:
        metrics: of `LossOutput.metrics`, or of several by `combine_metrics`.
        counts: as for `total`.

    Raises:
        ValueError: what are no metrics, or a unit that was not counted.
    """
    if not _are_metrics(metrics):
        raise ValueError(
            f"finalize must be given metrics by name, got {_kind(metrics)}; pass output.metrics, "
            "or combine_metrics([output.metrics for output in outputs])."
        )
    counts = _as_counts(counts)
    return {name: _finalize(metric, counts) for name, metric in metrics.items()}


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of values [T] where mask [T] is True: a scalar, 0 if nowhere; float32 or wider."""
    check_mask(mask, "mask")
    check_tokens(values=values, mask=mask)
    return widened(torch.where(mask, values, 0.0)).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of values [T] where mask [T] is True: a scalar, -inf if nowhere."""
    check_mask(mask, "mask")
    check_tokens(values=values, mask=mask)
    nothing = values.new_full((1,), -torch.inf)
    return torch.cat([torch.where(mask, values, -torch.inf), nothing]).amax()


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence of a pack, in an order that does not vary between runs.

    Args:
        values: [T].
        cu_seqlens: [N+1], int32 or int64, from 0 to T; sequence n is [cu[n], cu[n+1]).

    Returns:
        [N], float32 or wider: values of a narrower dtype are added in float32.

    Raises:
        ValueError: values that are not [T], cu_seqlens that do not go from 0 to T.
    """
    check_tokens(values=values)
    check_cu_seqlens(cu_seqlens, len(values))
    return _segment_sums(values, cu_seqlens)


def sequence_lengths(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Where mask [T] is True in each sequence, counted: [N] int64. Errors as `sequence_sums`."""
    check_mask(mask)
    check_tokens(mask=mask)
    check_cu_seqlens(cu_seqlens, len(mask))
    return _segment_lengths(mask, cu_seqlens)


def sums_and_lengths(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """`sequence_sums` of the values at the mask, and `sequence_lengths`; cu_seqlens met once."""
    check_mask(mask)
    check_tokens(values=values, mask=mask)
    check_cu_seqlens(cu_seqlens, len(mask))
    sums = _segment_sums(torch.where(mask, values, 0.0), cu_seqlens)
    return sums, _segment_lengths(mask, cu_seqlens)


def to_tokens(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Values of sequences at each of their tokens: such as advantages of rollouts as a column.

    Args:
        values: [N].
        cu_seqlens: [N+1], int32 or int64, from 0 to T.

    Returns:
        [T], differentiable.

    Raises:
        ValueError: values and cu_seqlens not of the same sequences.
    """
    check_tensors("[N]", values=values)
    num_tokens = check_cu_seqlens(cu_seqlens)
    if values.shape != (len(cu_seqlens) - 1,):
        raise ValueError(
            f"values must be [N] = [{len(cu_seqlens) - 1}], one a sequence of cu_seqlens, got "
            f"{tuple(values.shape)}; what is of tokens already needs no to_tokens."
        )
    return values.repeat_interleave(cu_seqlens.long().diff(), output_size=num_tokens)


def _segment_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.segment_reduce(widened(values), "sum", offsets=cu_seqlens.long(), initial=0.0)


def _segment_lengths(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    ahead = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return ahead[cu_seqlens.long()].diff()


def _as_counts(counts: Counts) -> dict[str, int]:
    """Numbers of the units, which may be tensors: each is met once."""
    if not isinstance(counts, Mapping):
        raise ValueError(
            f"counts must be numbers by unit, got {_kind(counts)}; pass count(batch), or "
            "add_counts of several."
        )
    return {unit: int(num) for unit, num in counts.items()}


def _are_metrics(metrics: object) -> bool:
    return isinstance(metrics, Mapping) and all(isinstance(m, Metric) for m in metrics.values())


def _listed(values: Iterable[Any]) -> list[Any] | None:
    """None for a single thing, a mapping by name among them, where several are wanted."""
    is_list = isinstance(values, Iterable) and not isinstance(values, Mapping | str | Tensor)
    return list(values) if is_list else None


def _kind(value: object) -> str:
    """Type of a value, for a message, and of what it holds."""
    held = list(value.values()) if isinstance(value, Mapping) else value
    kinds = {type(x).__name__ for x in held} if isinstance(held, list | tuple) else ()
    return type(value).__name__ + (f" of {', '.join(sorted(kinds))}" if kinds else "")


def _count_of(counts: Counts, unit: str) -> int:
    if unit not in counts:
        raise ValueError(
            f"The unit of a term or metric must be counted, one of {sorted(counts)}, got {unit!r}; "
            f"`count` counts {_needed_for(unit)}."
        )
    return counts[unit]


def _needed_for(unit: str) -> str:
    needed = {
        "tokens": "token_mask",
        "sequences": "token_mask and cu_seqlens",
        "pairs": "pair_ids",
    }.get(unit)
    if needed is None and unit.endswith("_tokens"):
        needed = f"{unit.removesuffix('tokens')}mask [T] bool, beside token_mask"
    if needed is None:
        return "tokens, sequences, pairs, and NAME_tokens for a column NAME_mask"
    return f"it if the batch has {needed}"


def _combine(name: str, first: Metric, second: Metric) -> Metric:
    if (first.unit, first.reduction) != (second.unit, second.reduction):
        raise ValueError(
            f"Metric {name!r} must be declared alike in every part, got {first.reduction} over "
            f"{first.unit} and {second.reduction} over {second.unit}; rename one."
        )
    if first.reduction == "max":
        value = torch.maximum(first.value, second.value)
    elif first.reduction == "min":
        value = torch.minimum(first.value, second.value)
    else:
        value = _exact(first.value) + _exact(second.value)
    return replace(first, value=value)


def _exact(value: Tensor) -> Tensor:
    """Ready to be added to many: integers stay what they are."""
    return widened(value) if value.is_floating_point() else value


def _finalize(metric: Metric, counts: Counts) -> float:
    value = float(metric.value)
    if metric.reduction == "mean" and metric.unit is not None:
        num = _count_of(counts, metric.unit)
        return value / num if num else torch.nan
    if metric.reduction == "sum":
        return value
    nothing = -torch.inf if metric.reduction == "max" else torch.inf
    return torch.nan if value == nothing else value
