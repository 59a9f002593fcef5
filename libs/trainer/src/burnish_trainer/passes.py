"""Passes over a rank's micro-batches: outputs, losses and what they come to over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch
from burnish_distributed.collectives import all_gather_object, all_reduce
from burnish_losses.reduce import (
    LossOutput,
    Metric,
    add_counts,
    combine_metrics,
    count,
    finalize,
    total,
)
from torch import Tensor

from burnish_trainer.checks import check_work
from burnish_trainer.images import check_images, collect_images, has_images, rope_positions
from burnish_trainer.layouts import lay_out, loss_columns
from burnish_trainer.policy import LossFunction, MicroBatches
from burnish_trainer.scoring import OUTPUTS, Request, ScoringModel

COUNTED = {"token_mask", "pair_ids"}


@dataclass(frozen=True)
class Work:
    """A rank's part of a global batch, and what is to be made of it."""

    batch: RaggedBatch
    micro_batches: MicroBatches
    layout: str
    request: Request
    loss_fn: LossFunction
    counts: Mapping[str, int]  # of the whole global batch


def prepare(
    model: ScoringModel,
    batch: RaggedBatch,
    micro_batches: MicroBatches,
    loss_fn: LossFunction,
    layout: str,
    request: Request,
) -> Work:
    """Check the batch, and count the whole global batch before its first micro-batch.

    Raises:
        ValueError: if batch or plan are not as `check_work` wants them, or nothing is trained on
            any rank.
    """
    whole_sequences = model.head == "reward"
    masked = not whole_sequences
    check_work(batch, micro_batches, layout, model.model.config, masked=masked)
    local = {"sequences": batch.num_sequences} if whole_sequences else {}
    if masked or COUNTED & (batch.token_columns.keys() | batch.sequence_columns.keys()):
        local = {**count(loss_columns(batch, torch.device("cpu"))), **local}
    counts = add_counts(all_gather_object(local))
    if not any(counts.values()):
        raise ValueError(
            "a training batch must hold at least one trained token or pair, got none on any rank; "
            "skip batches without any"
        )
    return Work(batch, micro_batches, layout, request, loss_fn, counts)


def accumulate(
    model: ScoringModel, work: Work, *, backward: bool
) -> tuple[float, list[Mapping[str, Metric]]]:
    """Run all micro-batches; the loss of the whole global batch, and this rank's metrics."""
    parts: list[Mapping[str, Metric]] = []
    loss_sum = torch.zeros((), dtype=torch.float64, device=model.device())
    for indices in work.micro_batches:
        loss, metrics = micro_batch_loss(model, work, indices)
        if backward:
            loss.backward()
        loss_sum += loss.detach()
        parts += [metrics] if indices else []
    return float(all_reduce(loss_sum.cpu(), "sum")), parts


def micro_batch_loss(
    model: ScoringModel, work: Work, indices: Sequence[int]
) -> tuple[Tensor, Mapping[str, Metric]]:
    """The part of the loss that is one micro-batch's, and its metrics."""
    micro_batch = work.batch.select(indices)
    outputs = forward(model, micro_batch, work.layout, work.request)
    if not micro_batch.num_sequences:
        # Nothing to train, but the other ranks wait in the collectives of the backward pass.
        return torch.stack([value.sum() for value in outputs.values()]).sum(), {}
    main = outputs.pop(OUTPUTS[model.head])
    output = work.loss_fn(main, {**loss_columns(micro_batch, main.device), **outputs})
    if not isinstance(output, LossOutput):
        raise ValueError(
            f"a loss must return a burnish_losses.reduce.LossOutput, got {type(output).__name__}; "
            "return LossOutput((Term(sum, unit),), metrics)"
        )
    return total(output.terms, work.counts), output.metrics


def forward(
    model: ScoringModel, micro_batch: RaggedBatch, layout: str, request: Request
) -> dict[str, Tensor]:
    """One model call; see `ScoringModel.forward` for its outputs."""
    check_images(micro_batch, model.model)
    images, positions = None, None
    if has_images(micro_batch):
        positions = rope_positions(micro_batch, model.model)
    laid_out = lay_out(micro_batch, layout, positions)
    if has_images(micro_batch):
        images = collect_images(micro_batch, laid_out, model.model).to(model.device())
    outputs: dict[str, Tensor] = model(laid_out.to(model.device()), request, images)
    return outputs


def score(
    model: ScoringModel,
    batch: RaggedBatch,
    micro_batches: MicroBatches,
    layout: str,
    request: Request,
) -> dict[str, npt.NDArray[Any]]:
    """Outputs of all micro-batches in the batch's own order, without gradients or dropout."""
    check_work(batch, micro_batches, layout, model.model.config, masked=model.head != "reward")
    model.eval()
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    with torch.no_grad():
        for indices in micro_batches:
            for name, value in forward(model, batch.select(indices), layout, request).items():
                parts.setdefault(name, []).append(value.cpu().numpy())
    order = np.array([i for indices in micro_batches for i in indices], dtype=np.int64)
    sizes = np.ones_like(batch.lengths) if model.head == "reward" else batch.lengths
    starts = np.cumsum(sizes) - sizes
    parted = [np.arange(starts[i], starts[i] + sizes[i]) for i in order]
    places = np.concatenate([np.arange(0), *parted])  # a rank may have empty slots alone
    results = {}
    for name, values in parts.items():
        planned = np.concatenate(values)
        results[name] = np.empty_like(planned)
        results[name][places] = planned
    return results


def summarize(
    name: str, work: Work, loss: float, parts: Sequence[Mapping[str, Metric]]
) -> dict[str, float]:
    """Metrics of the whole global batch: the loss's own by their rules, its loss and its counts."""
    local = {
        metric_name: Metric(metric.value.detach().cpu(), metric.unit, metric.reduction)
        for metric_name, metric in combine_metrics(parts).items()
    }
    metrics = finalize(combine_metrics(all_gather_object(local)), work.counts)
    metrics[f"{name}/loss"] = loss
    for unit in ("tokens", "sequences", "pairs"):
        if unit in work.counts:
            metrics[f"{name}/num_{unit}"] = float(work.counts[unit])
    return metrics
