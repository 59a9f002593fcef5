"""Optimizers and schedules by dotted path.

Any class of torch's form does: `torch.optim.AdamW`, an 8-bit one (`torchao.optim.AdamW8bit`),
`torch.optim.Muon`. A path is code: it is imported. Muon takes matrices only: embeddings, heads and
vectors go to AdamW beside it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

MATRICES_ONLY = "torch.optim.Muon"
FUSIBLE = ("torch.optim.Adam", "torch.optim.AdamW")  # of those with a fused pass, on shards too


def build_optimizers(
    model: nn.Module,
    *,
    optimizer: str,
    learning_rate: float | None,
    optimizer_args: Mapping[str, Any] | None = None,
) -> list[torch.optim.Optimizer]:
    """Those of the parameters that are trained: one, or Muon and AdamW; none without a rate.

    Beside Muon, AdamW has its learning rate and weight decay; Muon's steps are scaled to the size
    of AdamW's (``adjust_lr_fn="match_rms_adamw"``, Liu et al. 2025, "Muon is scalable") unless
    ``optimizer_args`` say otherwise.
    """
    if learning_rate is None:
        return []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    arguments = dict(optimizer_args or {})
    if optimizer != MATRICES_ONLY:
        return [
            build_optimizer(
                trained.values(),
                optimizer=optimizer,
                learning_rate=learning_rate,
                optimizer_args=arguments,
            )
        ]
    outer = _embeddings_and_heads(model)
    matrices = [p for p in trained.values() if p.ndim == 2 and id(p) not in outer]
    others = [p for p in trained.values() if p.ndim != 2 or id(p) in outer]
    built = []
    if matrices:
        settings = {"adjust_lr_fn": "match_rms_adamw", **arguments}
        built.append(
            build_optimizer(
                matrices, optimizer=optimizer, learning_rate=learning_rate, optimizer_args=settings
            )
        )
    if others:
        built.append(
            build_optimizer(
                others,
                learning_rate=learning_rate,
                optimizer_args={"weight_decay": arguments.get("weight_decay", 0.1)},
            )
        )
    return built


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    optimizer: str = "torch.optim.AdamW",
    learning_rate: float,
    optimizer_args: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer named by its dotted path; Adam and AdamW of torch in one fused pass.

    Raises:
        ValueError: if the path names no class, or the class does not take the arguments.
    """
    cls = imported(optimizer, "optimizer", "torch.optim.AdamW")
    arguments = dict(optimizer_args or {})
    alternatives = {"fused", "foreach", "capturable", "differentiable"}
    if optimizer in FUSIBLE and not alternatives & arguments.keys():
        arguments["fused"] = True
    try:
        built: torch.optim.Optimizer = cls(parameters, lr=learning_rate, **arguments)
    except TypeError as error:
        raise ValueError(
            f"optimizer_args must be arguments of {optimizer}, got {sorted(arguments)}: {error}"
        ) from error
    return built


def set_learning_rate(
    optimizers: Sequence[torch.optim.Optimizer],
    learning_rate: float,
    schedule: str,
    step: int,
    schedule_args: Mapping[str, Any],
) -> float:
    """Set the rate of optimizer step ``step`` (from 0), and return it.

    It depends on these arguments alone, not on what the optimizers hold: they come from a
    checkpoint after resuming.

    Raises:
        ValueError: if the schedule is no function of `burnish_trainer.schedules`' form.
    """
    rate = learning_rate * schedule_factor(schedule, step, schedule_args)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao's must stay the same tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
    return rate


def schedule_factor(schedule: str, step: int, schedule_args: Mapping[str, Any]) -> float:
    """The factor on the learning rate in optimizer step ``step``.

    Raises:
        ValueError: if the schedule is no function of `burnish_trainer.schedules`' form.
    """
    function = imported(schedule, "schedule", "burnish_trainer.schedules.cosine")
    try:
        factor = float(function(step, **schedule_args))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"schedule_args must be those of {schedule}, got {dict(schedule_args)}: {error}"
        ) from error
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(
            f"a schedule must give a finite factor of at least 0, got {factor} from {schedule} in "
            f"step {step}"
        )
    return factor


def imported(path: str, what: str, example: str) -> Callable[..., Any]:
    """The class or function that a dotted path names (the path is code: it is imported).

    Raises:
        ValueError: if it names none.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        if not callable(found):
            raise AttributeError("it is no class or function")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{what} must be a dotted path, got {path!r} ({error}); for example {example}"
        ) from error
    return found


def _embeddings_and_heads(model: nn.Module) -> set[int]:
    """ids of the weights of embeddings and of linear layers outside the stacks of layers."""
    from burnish_trainer.parallelize import layer_stacks

    inner = {id(p) for stack in layer_stacks(model) for layer in stack for p in layer.parameters()}
    embeddings = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    return {id(p) for p in model.parameters() if id(p) not in inner} | embeddings
