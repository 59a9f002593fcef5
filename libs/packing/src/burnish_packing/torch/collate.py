"""Flat tokens and lengths in, a PackedBatch out: packed into one row, or padded to rows.

Both ways compute `slots`, the position in the model call of every flat token, and share the rest:
the token before token t of a sequence scores it, so its position is `slots[t - 1]`.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from burnish_packing._checks import IntArray, as_lengths, as_prefixes, check_positive
from burnish_packing.layout import Span, pack_layout, round_up
from burnish_packing.layout import position_ids as positions_of
from burnish_packing.layout import sequence_ids as sequences_of
from burnish_packing.torch.batch import PackedBatch


def pack_sequences(
    token_ids: Tensor,
    lengths: ArrayLike,
    *,
    token_mask: Tensor | None = None,
    prefix_ids: ArrayLike | None = None,
    prefix_lengths: ArrayLike | None = None,
    pad_multiple: int = 1,
    pad_token_id: int = 0,
) -> PackedBatch:
    """Lay sequences one after another in one row; a shared prefix is stored once.

    Args:
        token_ids: int64 [T], the sequences concatenated.
        lengths: [N] tokens of each, all >= 1, summing to T.
        token_mask: bool [T], True where a token is trained; None: all but each sequence's first.
        prefix_ids: int [N], equal for sequences that begin with the same tokens, -1 for none.
        prefix_lengths: int [N], how many tokens they share (read where prefix_ids >= 0).
        pad_multiple: the row is filled up to a multiple of this; the fill is a span of its own.
        pad_token_id: what the fill holds.

    Raises:
        ValueError: shapes disagree; a trained token is the first of its sequence or lies in a
            shared prefix; the tokens of a shared prefix differ.
    """
    lengths, flat_mask = _check_columns(token_ids, lengths, token_mask)
    layout = pack_layout(
        lengths, prefix_ids=prefix_ids, prefix_lengths=prefix_lengths, pad_multiple=pad_multiple
    )
    groups, shared = as_prefixes(lengths, prefix_ids, prefix_lengths)
    _check_prefixes(token_ids, flat_mask, lengths, layout.slots, groups, shared)
    positions = layout.position_ids[None]
    return _model_batch(
        token_ids, flat_mask, lengths, layout.slots, positions, layout.spans, pad_token_id
    )


def pad_sequences(
    token_ids: Tensor,
    lengths: ArrayLike,
    *,
    token_mask: Tensor | None = None,
    pad_multiple: int = 1,
    pad_token_id: int = 0,
) -> PackedBatch:
    """Lay every sequence in a row of its own, padded on the right (arguments: pack_sequences).

    Rows are as long as the longest sequence, rounded up to `pad_multiple`. Causal attention needs
    no mask for them: no token sees the padding that comes after it.
    """
    lengths, flat_mask = _check_columns(token_ids, lengths, token_mask)
    check_positive(pad_multiple, "pad_multiple")
    width = round_up(int(lengths.max()), pad_multiple)
    slots = sequences_of(lengths) * width + positions_of(lengths)
    positions = np.tile(np.arange(width), (len(lengths), 1))
    return _model_batch(token_ids, flat_mask, lengths, slots, positions, None, pad_token_id)


def empty_batch(pad_token_id: int = 0) -> PackedBatch:
    """One token that is never scored, for the empty slot of a plan: a model call that counts 0.

    It keeps the collectives of a rank without work in step with the others.
    """
    none = torch.zeros(0, dtype=torch.int64)
    return PackedBatch(
        token_ids=torch.tensor([[pad_token_id]]),
        position_ids=torch.tensor([[0]]),
        spans=(Span(0, 1),),
        slots=none,
        score_positions=none,
        labels=none,
        target_positions=none,
        lengths=(),
    )


def _check_columns(
    token_ids: Tensor, lengths: ArrayLike, token_mask: Tensor | None
) -> tuple[IntArray, Tensor]:
    """The lengths as int64 [N] and the mask as bool [T], once they are known to fit together."""
    lengths = as_lengths(lengths)
    if not lengths.size or lengths.min() < 1:
        raise ValueError(
            f"lengths must hold at least one sequence and each at least one token, got "
            f"{lengths.tolist()}; use empty_batch() for a micro-batch of nothing"
        )
    if token_ids.dtype != torch.int64 or token_ids.shape != (lengths.sum(),):
        raise ValueError(
            f"token_ids must be int64 of shape ({lengths.sum()},), the sum of lengths, got "
            f"{token_ids.dtype} of shape {tuple(token_ids.shape)}; concatenate the sequences"
        )
    starts = torch.from_numpy(np.cumsum(lengths) - lengths).to(token_ids.device)
    if token_mask is None:
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        mask[starts] = False
        return lengths, mask
    if token_mask.dtype != torch.bool or token_mask.shape != token_ids.shape:
        raise ValueError(
            f"token_mask must be bool with the shape of token_ids, {tuple(token_ids.shape)}, got "
            f"{token_mask.dtype} of shape {tuple(token_mask.shape)}; make it one flag per token"
        )
    first = token_mask[starts].nonzero()
    if len(first):
        raise ValueError(
            f"token_mask must be False at the first token of a sequence, which nothing scores, got "
            f"True in sequence {int(first[0])}; mask it or put a start token before it"
        )
    return lengths, token_mask


def _model_batch(
    token_ids: Tensor,
    token_mask: Tensor,
    lengths: IntArray,
    slots: IntArray,
    positions: IntArray,
    spans: tuple[Span, ...] | None,
    pad_token_id: int,
) -> PackedBatch:
    """Write flat tokens [T] to their slots [T] in a batch shaped like `positions` [B, L]."""
    slot_of_token = torch.from_numpy(slots).to(token_ids.device)
    laid_out = token_ids.new_full((positions.size,), pad_token_id)
    laid_out[slot_of_token] = token_ids
    targets = token_mask.nonzero().squeeze(1)
    return PackedBatch(
        token_ids=laid_out.view(positions.shape),
        position_ids=torch.from_numpy(positions).to(token_ids.device),
        spans=spans,
        slots=slot_of_token,
        score_positions=slot_of_token[targets - 1],
        labels=token_ids[targets],
        target_positions=targets,
        lengths=tuple(lengths.tolist()),
    )


def _check_prefixes(
    token_ids: Tensor,
    token_mask: Tensor,
    lengths: IntArray,
    slots: IntArray,
    groups: IntArray,
    shared: IntArray,
) -> None:
    """ValueError when a shared prefix is trained, or is not the same tokens in its whole group."""
    if not shared.any():
        return
    sequence_of_token = sequences_of(lengths)
    in_prefix = positions_of(lengths) < shared[sequence_of_token]
    trained = np.flatnonzero(in_prefix & token_mask.cpu().numpy())
    if trained.size:
        sequence = sequence_of_token[trained[0]]
        raise ValueError(
            f"token_mask must be False in a shared prefix, got True in sequence {sequence} of "
            f"group {groups[sequence]}; pack sequences whose prompt is trained without prefix_ids"
        )
    tokens = token_ids.cpu().numpy()
    stored = np.zeros(slots.max() + 1, np.int64)
    stored[slots] = tokens
    differing = np.flatnonzero(stored[slots] != tokens)
    if differing.size:
        group = groups[sequence_of_token[differing[0]]]
        raise ValueError(
            f"sequences of one prefix id must begin with the same tokens, got other tokens in "
            f"group {group}; give them different prefix_ids or a shorter prefix_lengths"
        )
