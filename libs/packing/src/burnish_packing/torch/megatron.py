"""The form that Megatron Core takes packed sequences in (`thd`), and the way back from its outputs.

All is laid out, and labels are shifted, on the whole pack; only then it is split over the
context-parallel ranks. So the token that a rank's last output scores may lie on another rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from burnish_packing._checks import IntArray
from burnish_packing.context_parallel import (
    context_parallel_multiple,
    merge_positions,
    shard_lengths,
    zigzag_positions,
)
from burnish_packing.layout import cu_seqlens
from burnish_packing.torch.batch import PackedBatch
from burnish_packing.torch.collate import pack_sequences

IGNORED_LABEL = -100  # where loss_mask is False


@dataclass(frozen=True, eq=False)
class MegatronShard:
    """What one context-parallel rank passes to the model, every tensor [1, T / cp] in its order."""

    token_ids: Tensor  # int64
    labels: Tensor  # int64, the token that the output at this position scores, or IGNORED_LABEL
    loss_mask: Tensor  # bool, True where there is such a token
    position_ids: Tensor  # int64, restart at every sequence; padding counts from 0 on its own
    columns: Mapping[str, Tensor]  # others, [1, T / cp, ...], aligned to token_ids


@dataclass(frozen=True, eq=False)
class MegatronBatch:
    """One pack of T positions for Megatron Core, of which cp ranks hold a share each.

    Labels are not aligned to tokens but to outputs: `labels[0, t]` is the token after position t in
    the same sequence. Megatron's losses at IGNORED_LABEL are finite but mean nothing, and outputs
    at padding may be anything at all: select by `loss_mask` (`torch.where`), do not multiply.

    `cu_seqlens` counts the tokens of the sequences, `cu_seqlens_padded` the positions they take,
    both int32 [N + 1]. The fill at the end of the pack, which pipeline parallelism needs for equal
    shapes, is a last sequence of its own in both: neither inflates the last real one.
    """

    packed: PackedBatch
    labels: Tensor  # int64 [1, T]
    loss_mask: Tensor  # bool [1, T]
    cu_seqlens: Tensor  # int32 [N + 1], or [N + 2] with fill, on the device of the tokens
    cu_seqlens_padded: Tensor  # int32, likewise; the last entry is T
    padded_lengths: tuple[int, ...]  # positions of every sequence, then of the fill, if any
    context_parallel_size: int

    @property
    def token_ids(self) -> Tensor:
        """The whole pack, int64 [1, T]."""
        return self.packed.token_ids

    @property
    def position_ids(self) -> Tensor:
        """Of the whole pack, int64 [1, T]."""
        return self.packed.position_ids

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Of the whole pack, each [1, T, ...]."""
        return self.packed.columns

    @property
    def max_seqlen(self) -> int:
        """Positions of the longest sequence, or of the fill, before sharding."""
        return max(self.padded_lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return self.packed.lengths

    def shard(self, rank: int) -> MegatronShard:
        """The share of one context-parallel rank; with cp = 1 the whole pack."""
        return MegatronShard(
            self.shard_values(self.token_ids, rank),
            self.shard_values(self.labels, rank),
            self.shard_values(self.loss_mask, rank),
            self.shard_values(self.position_ids, rank),
            {name: self.shard_values(column, rank) for name, column in self.columns.items()},
        )

    def shard_values(self, values: Tensor, rank: int) -> Tensor:
        """Values of the pack [1, T, ...] to those of one rank [1, T / cp, ...]; differentiable."""
        self._check_shape(values, self.token_ids.shape[1], "values")
        return values.index_select(1, self._positions(zigzag_positions, values, rank))

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """The ranks' outputs, each [1, T / cp, ...], to those of the pack [1, T, ...].

        Differentiable. The shards come from all ranks in order, for instance from
        `torch.distributed.nn.functional.all_gather(output, group)`; that adds up the gradients of
        all ranks, so a loss that every rank computes over the whole pack counts cp times.
        """
        if len(shards) != self.context_parallel_size:
            raise ValueError(
                f"shards must come from all {self.context_parallel_size} ranks in order, got "
                f"{len(shards)}; gather over the context-parallel group first"
            )
        for rank, shard in enumerate(shards):
            size = self.token_ids.shape[1] // self.context_parallel_size
            self._check_shape(shard, size, f"the shard of rank {rank}")
        gathered = torch.cat(list(shards), dim=1)
        return gathered.index_select(1, self._positions(merge_positions, gathered))

    def unpack(self, values: Tensor) -> Tensor:
        """Values of the pack [1, T, ...] to the tokens of the sequences, flat; differentiable.

        [sum(lengths), ...], index t about token t if `values` are about the token at the position.
        Log-probs, which an output has about the next token: `unpack_scores`.
        """
        return self.packed.unpack(values)

    def unpack_rows(self, values: Tensor, padding: float = 0.0) -> Tensor:
        """Values of the pack [1, T, ...] to a row per sequence, [N, longest, ...]; differentiable.

        An empty batch has no rows, [0, 0, ...].
        """
        return self.packed.unpack_rows(values, padding)

    def unpack_scores(self, scores: Tensor) -> Tensor:
        """Scores of `labels`, [1, T], to the flat tokens they score, [sum(lengths)].

        Differentiable. What is at positions without a label is not read; 0 for tokens that are not
        scored, as the first of every sequence.
        """
        self._check_shape(scores, self.token_ids.shape[1], "scores")
        if scores.ndim != 2:
            raise ValueError(
                f"scores must be one number for each position, got shape {tuple(scores.shape)}; "
                f"unpack other outputs with unpack"
            )
        return self.packed.scatter(scores.flatten()[self.packed.score_positions])

    def packed_seq_params(self, *, padding_apart: bool = True) -> Any:
        """`megatron.core.packed_seq_params.PackedSeqParams` for the model call, of every rank.

        Megatron Core places rotary embeddings and context-parallel chunks by `cu_seqlens_*_padded`
        and sizes the rotary table by `max_seqlen_*`. Transformer Engine reads sequence i at
        `cu_seqlens_q_padded[i]` and as long as `cu_seqlens_q` says; what it writes at the padding
        is undefined.

        Args:
            padding_apart: False: say that padding belongs to its sequence, in `cu_seqlens_*` too.
                The outputs at tokens are the same, since causal attention never looks at padding
                behind a token. For kernels that know no padding between sequences, such as
                FlashAttention 2.
        """
        from megatron.core.packed_seq_params import PackedSeqParams  # takes 10 s

        lengths = self.cu_seqlens if padding_apart else self.cu_seqlens_padded
        arguments: dict[str, Any] = {
            "qkv_format": "thd",
            "cu_seqlens_q": lengths,
            "cu_seqlens_kv": lengths,
            "cu_seqlens_q_padded": self.cu_seqlens_padded,
            "cu_seqlens_kv_padded": self.cu_seqlens_padded,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_kv": self.max_seqlen,
        }
        # Newer versions derive from it which sequence each position is of, for state-space layers.
        if "total_tokens" in {field.name for field in fields(PackedSeqParams)}:
            arguments["total_tokens"] = self.token_ids.shape[1]
        return PackedSeqParams(**arguments)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MegatronBatch":
        """The same batch with its tensors on `device`; `non_blocking` as in `Tensor.to`."""
        names = ("packed", "labels", "loss_mask", "cu_seqlens", "cu_seqlens_padded")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        return replace(self, **moved)

    def _positions(self, order: Callable[..., IntArray], like: Tensor, *rank: int) -> Tensor:
        positions = order(self.padded_lengths, self.context_parallel_size, *rank)
        return torch.from_numpy(positions).to(like.device)

    def _check_shape(self, values: Tensor, size: int, name: str) -> None:
        if values.shape[:2] != (1, size):
            raise ValueError(
                f"{name} must begin with the shape (1, {size}), got {tuple(values.shape)}; pass "
                f"tensors of this batch, the whole pack to shard it and a rank's output to merge "
                f"it, Megatron's [T, 1, ...] transposed"
            )


def pack_for_megatron(
    token_ids: Tensor,
    lengths: ArrayLike,
    *,
    token_mask: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    fill_to: int | None = None,
    pad_token_id: int = 0,
) -> MegatronBatch:
    """Lay sequences one after another, each padded as the ranks need it, for Megatron Core.

    Args:
        token_ids: int64 [sum(lengths)], the sequences concatenated.
        lengths: int [N], tokens of each, all >= 1.
        token_mask: bool, shape of token_ids, True where a token is trained; None: all but each
            sequence's first.
        columns: other values of the tokens by name, each [sum(lengths), ...]; 0 in padding.
        context_parallel_size, tensor_parallel_size: sequences are padded to multiples of
            `context_parallel_multiple` of them (with tensor parallelism, sequence parallelism is
            meant: the positions are split over its ranks too).
        fill_to: T, the positions of the pack, a multiple of the same; None: no fill.
        pad_token_id: what padding and fill hold.

    Raises:
        ValueError: as `pack_sequences` and `to_megatron`.
    """
    packed = pack_sequences(
        token_ids,
        lengths,
        token_mask=token_mask,
        columns=columns,
        sequence_multiple=context_parallel_multiple(context_parallel_size, tensor_parallel_size),
        fill_to=fill_to,
        pad_token_id=pad_token_id,
    )
    return to_megatron(
        packed,
        context_parallel_size=context_parallel_size,
        tensor_parallel_size=tensor_parallel_size,
    )


def to_megatron(
    batch: PackedBatch,
    *,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
) -> MegatronBatch:
    """The Megatron form of a pack, as `pack_sequences`, `lay_out` or `empty_batch` made it.

    Args:
        batch: packed, without shared prefixes, its `sequence_multiple` (of the pack or plan) and
            fill such that every sequence splits into the chunks of the context-parallel ranks, and
            all of it over all ranks; `context_parallel_multiple` is such a number.
        context_parallel_size, tensor_parallel_size: as in `pack_for_megatron`.

    Raises:
        ValueError: rows instead of a pack, shared prefixes, or sequences or a fill that do not
            split over the ranks.
    """
    if batch.layout is None:
        raise ValueError(
            "Megatron takes packs, got padded rows; pack the sequences with pack_sequences, or "
            "plan them with mode packed"
        )
    multiple = context_parallel_multiple(context_parallel_size, tensor_parallel_size)
    padded = shard_lengths(batch.layout, context_parallel_size)
    num_positions = batch.token_ids.shape[1]
    if num_positions % (context_parallel_size * tensor_parallel_size):
        raise ValueError(
            f"the positions of a pack must split over {context_parallel_size} context-parallel and "
            f"{tensor_parallel_size} sequence-parallel ranks, got {num_positions}; lay it out with "
            f"sequence_multiple={multiple} and a fill that is a multiple of it"
        )
    fill = padded[len(batch.lengths) :]  # nothing, or one entry
    device = batch.token_ids.device
    labels = batch.shifted_labels(IGNORED_LABEL)
    loss_mask = torch.zeros_like(labels, dtype=torch.bool)
    loss_mask.view(-1)[batch.score_positions] = True
    return MegatronBatch(
        packed=batch,
        labels=labels,
        loss_mask=loss_mask,
        cu_seqlens=torch.from_numpy(cu_seqlens([*batch.lengths, *fill])).to(device),
        cu_seqlens_padded=torch.from_numpy(cu_seqlens(padded)).to(device),
        padded_lengths=tuple(padded.tolist()),
        context_parallel_size=context_parallel_size,
    )
