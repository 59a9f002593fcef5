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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from burnish_losses._columns import check_mask, column

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
    """What one batch holds, by unit; the counts of disjoint batches add up.

    Args:
        batch: columns. token_mask [T] bool and cu_seqlens [N+1] must be there.

    Returns:
        tokens: trained ones. sequences: those with at least one of them. pairs: different
        pair_ids [N] from 0 on, if there is such a column. And for every further bool column
        NAME_mask [T], such as nll_mask, NAME_tokens: where it is True.

    Raises:
        ValueError: a missing column, a token_mask that is not bool, or cu_seqlens that are not
            those of the mask.
    """
    mask = column(batch, "token_mask")
    check_mask(mask)
    per_sequence = sequence_sums(mask.float(), column(batch, "cu_seqlens"))
    counts = {"tokens": int(mask.sum()), "sequences": int((per_sequence > 0).sum())}
    if "pair_ids" in batch:
        pair_ids = batch["pair_ids"]
        counts["pairs"] = len(pair_ids[pair_ids >= 0].unique())
    for name in sorted(batch):
        if name.endswith("_mask") and name != "token_mask":
            check_mask(column(batch, name, like=mask), name)
            counts[name.removesuffix("mask") + "tokens"] = int(batch[name].sum())
    return counts


def total(terms: Sequence[Term], counts: Counts) -> Tensor:
    """The loss to call backward on: each term divided once by its global count.

    `counts` are of the global batch, also when `terms` come from one micro-batch of it. A unit
    counted 0 times has nothing in its sum; it is divided by 1, so that the loss is 0 and the
    gradients are zeros.

    Returns:
        scalar.

    Raises:
        ValueError: no terms, or a unit that was not counted.
    """
    if not terms:
        raise ValueError("total needs at least one term, got none; return a zero sum instead.")
    parts = [term.sum * (term.weight / max(_count_of(counts, term.unit), 1)) for term in terms]
    return torch.stack(parts).sum()


def combine_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of micro-batches or ranks as those of the whole: sums added, extremes kept.

    Raises:
        ValueError: one name with two units or reductions.
    """
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            first = combined.get(name)
            combined[name] = metric if first is None else _combine(name, first, metric)
    return combined


def finalize(metrics: Mapping[str, Metric], counts: Counts) -> dict[str, float]:
    """Metrics of the whole global batch as numbers; NaN where nothing was there to measure."""
    return {name: _finalize(metric, counts) for name, metric in metrics.items()}


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of values [T] where mask [T] is True: a scalar, 0 if nowhere."""
    return torch.where(mask, values, 0.0).sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of values [T] where mask [T] is True: a scalar, -inf if nowhere."""
    nothing = values.new_full((1,), -torch.inf)
    return torch.cat([torch.where(mask, values, -torch.inf), nothing]).amax()


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over each sequence of a pack, in an order that does not vary between runs.

    Args:
        values: [T], floating point.
        cu_seqlens: [N+1], int32 or int64, from 0 to T; sequence n is [cu[n], cu[n+1]).

    Returns:
        [N].

    Raises:
        ValueError: cu_seqlens that do not go from 0 to T.
    """
    ends = cu_seqlens[[0, -1]].tolist() if len(cu_seqlens) else []
    if ends != [0, len(values)]:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at the number of tokens, {len(values)}, got "
            f"{ends} as its ends; build it from the lengths of these very columns."
        )
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens.long(), initial=0.0)


def _count_of(counts: Counts, unit: str) -> int:
    if unit not in counts:
        raise ValueError(
            f"The unit of a term or metric must be counted, one of {sorted(counts)}, got {unit!r}; "
            "`count` counts it if the batch has its column."
        )
    return counts[unit]


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
        value = first.value + second.value
    return replace(first, value=value)


def _finalize(metric: Metric, counts: Counts) -> float:
    value = float(metric.value)
    if metric.reduction == "mean" and metric.unit is not None:
        num = _count_of(counts, metric.unit)
        return value / num if num else torch.nan
    if metric.reduction == "sum":
        return value
    nothing = -torch.inf if metric.reduction == "max" else torch.inf
    return torch.nan if value == nothing else value
