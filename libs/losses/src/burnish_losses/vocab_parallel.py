"""A vocabulary whose rows are spread over the ranks of a process group.

The head's weight of a rank is `[V_rank, D]`, its logits `[M, V_rank]`: rows of the vocabulary in
the order of the ranks, of any sizes. Hidden states and labels are the same on every rank. What
one process finds by looking at all logits (the largest, the sum of the exponentials, the label's
own) is put together here; without a group every function is the identity.

Every rank of the group must make the same calls, with as many tokens and the same mask, and
compute the same loss from the results: the gradient of hidden states is then summed over the
ranks, whole on each, and that of the weight is the rank's own rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Shard(NamedTuple):
    """Where a rank's rows of the vocabulary lie; it need not divide evenly."""

    start: int
    total: int  # rows of all ranks
    largest: int  # rows of the rank with the most: what all ranks cut their chunks by


def shard_of(num_rows: int, group: ProcessGroup | None, device: torch.device) -> Shard:
    """The rank's shard; ValueError, on every rank, if one of them holds no row."""
    if group is None:
        return Shard(0, num_rows, num_rows)
    own = torch.tensor([num_rows], device=device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    rows: list[int] = torch.cat(sizes).tolist()
    if min(rows) == 0:
        raise ValueError(
            f"Every rank must hold a row of the vocabulary, got {rows}; use fewer ranks."
        )
    return Shard(sum(rows[: dist.get_rank(group)]), sum(rows), max(rows))


def all_sum(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Summed over the ranks, in place."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.SUM, group=group)
    return values


def all_max(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The largest over the ranks, in place."""
    if group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def all_columns(values: Tensor, fill: float, group: ProcessGroup | None) -> Tensor:
    """[m, n] of every rank side by side, in the order of the ranks.

    A rank with fewer columns than another has `fill` in its place.
    """
    if group is None:
        return values
    width = int(all_max(torch.tensor([values.shape[1]], device=values.device), group))
    padded = torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat(parts, -1)
