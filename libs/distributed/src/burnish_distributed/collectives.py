"""torch.distributed with one meaning everywhere: a single process counts as a group of one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def initialize_process_group(
    *, rank: int, world_size: int, init_method: str, timeout_s: float = 600.0
) -> None:
    """Join a process group: gloo for CPU tensors, and NCCL beside it where CUDA is available.

    Args:
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes.
        init_method: rendezvous, for example ``tcp://10.0.0.1:29500`` or ``file:///tmp/x``.
        timeout_s: seconds after which a collective that a dead rank never joins is an error.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """Reduce over all ranks with ``"sum"``, ``"max"`` or ``"min"`` (a new tensor).

    The input is made contiguous first: gloo returns wrong data silently for other layouts.

    Raises:
        ValueError: for another operation.
    """
    if operation not in ("sum", "max", "min"):
        raise ValueError(f"operation must be 'sum', 'max' or 'min', got {operation!r}")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if dist.is_initialized():
        dist.all_reduce(result, op=getattr(dist.ReduceOp, operation.upper()))
    return result


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's picklable ``value``, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()
