"""Optimizers by dotted path, and a linear warm-up."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    *,
    optimizer: str = "torch.optim.AdamW",
    learning_rate: float,
    optimizer_args: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer named by its dotted path; see `optimizer_class`."""
    cls = optimizer_class(optimizer)
    built: torch.optim.Optimizer = cls(parameters, lr=learning_rate, **(optimizer_args or {}))
    return built


def optimizer_class(path: str) -> Callable[..., Any]:
    """The class that a dotted path names (the path is code: it is imported).

    Raises:
        ValueError: if it names none.
    """
    module, _, name = path.rpartition(".")
    try:
        cls: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"optimizer must be the dotted path of a class, got {path!r} ({error}); "
            "for example torch.optim.AdamW"
        ) from error
    return cls


def warm_up(learning_rate: float, step: int, warmup_steps: int) -> float:
    """The learning rate of optimizer step ``step`` (from 0): linear up to it, then constant."""
    return learning_rate * min(1.0, (step + 1) / (warmup_steps + 1))
