"""Weights and optimizer between the device and the CPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def move(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> None:
    """Move parameters, gradients, buffers and optimizer state to ``device``, and free the other's.

    Steps are counted by the optimizer in tensors of no dimension, which stay where they are.
    """
    model.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = value.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
