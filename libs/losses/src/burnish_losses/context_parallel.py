"""Values of tokens that context parallelism spread over ranks, put together for the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from burnish_losses._columns import check_tensors


def gather_context_parallel(values: Tensor, order: Tensor, group: ProcessGroup | None) -> Tensor:
    """The shards of all ranks as one tensor in the order of the pack, differentiable.

    Every rank of the group then computes the same loss from the whole, and `backward` gives the
    gradient of that one loss with respect to the rank's own values: its slice, with nothing summed
    over ranks, as each rank holds the whole loss already. What a parameter gets on a rank is
    thus the part of its gradient that runs through the rank's tokens, and the *sum* over the group
    is the whole. A data-parallel wrapper that averages over the group divides by its size: multiply
    the loss by that size then.

    Args:
        values: [T / cp, ...], of this rank's tokens in the order it holds them; as many on every
            rank.
        order: [T] int64, the same on every rank: where each token of the pack lies in the shards
            of all ranks, concatenated (`merge_positions` of burnish-packing).
        group: the context-parallel process group; None for one process.

    Returns:
        [T, ...], the same on every rank.

    Raises:
        ValueError: an order that is not a permutation of the tokens of all shards.
    """
    check_tensors("[T / cp, ...]", values=values)
    check_tensors("[T]", order=order)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    if order.shape != (num_ranks * len(values),) or order.dtype != torch.int64:
        raise ValueError(
            f"order must be int64 [{num_ranks} * {len(values)}], one entry a token of all shards, "
            f"got {order.dtype} {tuple(order.shape)}."
        )
    if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise ValueError(
            f"order must hold each of the {len(order)} places once, got repeated or other ones; "
            "each token of the pack lies in one shard."
        )
    whole: Tensor = _Gather.apply(values, order, group)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(order)
        ctx.length, ctx.rank = len(values), 0 if group is None else dist.get_rank(group)
        if group is None:
            return values[order]
        shards = [
            torch.empty_like(values, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(shards, values.contiguous(), group=group)
        return torch.cat(shards)[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        in_shards = torch.zeros_like(grad).index_add_(0, order, grad)
        start = ctx.rank * ctx.length
        return in_shards[start : start + ctx.length], None, None
