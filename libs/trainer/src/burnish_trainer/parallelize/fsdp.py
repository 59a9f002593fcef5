"""Fully sharded data parallelism (FSDP2), with gradients summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from burnish_trainer.parallelize.layers import layer_stacks


def shard_parameters(
    model: nn.Module,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    cpu_offload: bool = False,
) -> None:
    """Bring a model to its device; shard every layer, and the rest as one group, over all ranks.

    Weights, gradients and their sums over ranks stay in the parameters' own dtype; only forward
    and backward run in ``compute_dtype``.

    Gradients are summed, not averaged: a loss has already been divided by the counts of the whole
    global batch. Without a process group the model stays whole.

    Args:
        model: changed in place.
        device: of the computation.
        compute_dtype: of forward and backward.
        cpu_offload: keep shards, gradients and optimizer state in the CPU's memory.

    Raises:
        ValueError: for cpu_offload without a GPU or without a process group.
    """
    if cpu_offload and not (dist.is_initialized() and device.type == "cuda"):
        raise ValueError(
            f"cpu_offload needs a GPU and a process group, got the device {device} "
            f"{'with' if dist.is_initialized() else 'without'} one; leave it out"
        )
    if not cpu_offload:
        model.to(device)
    if not dist.is_initialized():
        return
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
    }
    if cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    for layer in (layer for stack in layer_stacks(model) for layer in stack):
        fully_shard(layer, **settings)
    # Else the last group stays gathered after a forward without a backward, and whoever reads the
    # parameters then (a checkpoint) finds other tensors than the optimizer's.
    fully_shard(model, **settings, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has sums only


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor behind a shard (a collective), or the tensor itself."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
