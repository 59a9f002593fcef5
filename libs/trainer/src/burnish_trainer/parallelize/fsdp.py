"""Fully sharded data parallelism (FSDP2), with gradients summed over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard_parameters(
    model: nn.Module, *, device: torch.device, compute_dtype: torch.dtype
) -> nn.Module:
    """Shard every decoder layer, and the rest as one group, over all ranks.

    Weights, gradients and their sums over ranks stay in the parameters' own dtype; only forward
    and backward run in ``compute_dtype``.

    Gradients are summed, not averaged: a loss has already been divided by the counts of the whole
    global batch. Without a process group the model is returned as it is.
    """
    if not dist.is_initialized():
        return model
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in _decoder_layers(model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    # Else the last group stays gathered after a forward without a backward, and whoever reads the
    # parameters then (a checkpoint) finds other tensors than the optimizer's.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has sums only
    return model


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor behind a shard (a collective), or the tensor itself."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    stacks = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not stacks:
        raise ValueError(
            f"a model to shard must hold its decoder layers in an nn.ModuleList, got none in "
            f"{type(model).__name__}; use a transformers decoder"
        )
    return max(stacks, key=len)
