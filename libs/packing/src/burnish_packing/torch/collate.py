"""Flat tokens and lengths in, a PackedBatch out: packed into one row, or padded to rows.

Both ways compute `slots`, the position in the model call of every flat token, and share the rest:
the token before token t of a sequence scores it, so its position is `slots[t - 1]`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from burnish_packing._checks import IntArray, as_lengths, as_prefixes, check_positive
from burnish_packing.layout import PackLayout, Span, pack_layout, round_up
from burnish_packing.layout import position_ids as positions_of
from burnish_packing.layout import sequence_ids as sequences_of
from burnish_packing.microbatches import MicroBatch
from burnish_packing.torch.batch import PackedBatch


def pack_sequences(
    token_ids: Tensor,
    lengths: ArrayLike,
    *,
    token_mask: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
    prefix_ids: ArrayLike | None = None,
    prefix_lengths: ArrayLike | None = None,
    sequence_multiple: int = 1,
    pad_multiple: int = 1,
    fill_to: int | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """Lay sequences one after another in one row; a shared prefix is stored once.

    Args:
        token_ids: int64 [T], the sequences concatenated.
        lengths: [N] tokens of each, all >= 1, summing to T.
        token_mask: bool [T], True where a token is trained; None: all but each sequence's first
            and shared prefixes.
        columns: other values of the tokens by name, each [T, ...] of any dtype. They are laid out
            like the tokens, 0 in padding; in a shared prefix all its sequences have the same.
        prefix_ids: int [N], equal for sequences that begin with the same tokens, -1 for none.
        prefix_lengths: int [N], how many tokens they share (read where prefix_ids >= 0).
        sequence_multiple: every sequence is padded to a multiple of this (context parallelism).
        pad_multiple: the row is filled up to a multiple of this; the fill is a span of its own.
        fill_to: the row is filled up to exactly this many positions instead.
        pad_token_id: what padding and fill hold.

    Raises:
        ValueError: shapes disagree; a trained token is the first of its sequence or lies in a
            shared prefix; the tokens or columns of a shared prefix differ.
    """
    lengths, flat_mask = _check_columns(token_ids, lengths, token_mask)
    if token_mask is None:
        in_prefix = positions_of(lengths) < np.repeat(
            as_prefixes(lengths, prefix_ids, prefix_lengths)[1], lengths
        )
        flat_mask &= ~torch.from_numpy(in_prefix).to(flat_mask.device)
    layout = pack_layout(
        lengths,
        prefix_ids=prefix_ids,
        prefix_lengths=prefix_lengths,
        sequence_multiple=sequence_multiple,
        pad_multiple=pad_multiple,
        fill_to=fill_to,
    )
    positions = layout.position_ids[None]
    batch = _batch(
        token_ids, flat_mask, lengths, layout.slots, positions, layout, columns, pad_token_id
    )
    _check_prefixes(batch, token_ids, flat_mask, columns or {}, prefix_ids, prefix_lengths)
    return batch


def pad_sequences(
    token_ids: Tensor,
    lengths: ArrayLike,
    *,
    token_mask: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
    pad_multiple: int = 1,
    num_rows: int | None = None,
    row_length: int | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """Lay every sequence in a row of its own, padded on the right (arguments: pack_sequences).

    Rows are as long as the longest sequence, rounded up to `pad_multiple`, or `row_length` long.
    With `num_rows`, rows of padding follow, so that all ranks run one shape. Causal attention needs
    no mask for them: no token sees the padding that comes after it.
    """
    lengths, flat_mask = _check_columns(token_ids, lengths, token_mask)
    check_positive(pad_multiple, "pad_multiple")
    longest = int(lengths.max())
    num_rows = len(lengths) if num_rows is None else num_rows
    check_positive(num_rows, "num_rows")
    if row_length is not None:
        check_positive(row_length, "row_length")
    if num_rows < len(lengths):
        raise ValueError(
            f"num_rows must hold the {len(lengths)} sequences, got {num_rows}; raise it or pass "
            f"fewer sequences"
        )
    width = round_up(longest, pad_multiple) if row_length is None else row_length
    if width < longest or (row_length is not None and pad_multiple > 1):
        raise ValueError(
            f"row_length must hold the longest sequence, {longest} tokens, and come without "
            f"pad_multiple, got row_length {row_length} and pad_multiple {pad_multiple}; raise it "
            f"or leave one out"
        )
    slots = sequences_of(lengths) * width + positions_of(lengths)
    positions = np.tile(np.arange(width), (num_rows, 1))
    return _batch(token_ids, flat_mask, lengths, slots, positions, None, columns, pad_token_id)


def empty_batch(
    pad_token_id: int = 0,
    *,
    shape: tuple[int, int] = (1, 1),
    packed: bool = True,
    columns: Mapping[str, Tensor] | None = None,
) -> PackedBatch:
    """Padding that is never scored, for the empty slot of a plan: a model call that counts 0.

    It keeps the collectives of a rank without work in step with the others.

    Args:
        pad_token_id: what it holds.
        shape: [rows, positions] of the call; one row if packed.
        packed: one span for the row; else right-padded rows, without spans.
        columns: the others, of no tokens, [0, ...]: they give the names, dtypes and shapes.
    """
    num_rows, num_positions = shape
    check_positive(num_rows, "the rows of shape")
    check_positive(num_positions, "the positions of shape")
    if packed and num_rows > 1:
        raise ValueError(
            f"a packed batch must have one row, got shape {shape}; pass packed=False for rows"
        )
    nothing = np.zeros(0, np.int64)
    positions = np.tile(np.arange(num_positions), (num_rows, 1))
    fill = (Span(0, num_positions),)
    return _batch(
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.bool),
        nothing,
        nothing,
        positions,
        PackLayout(nothing, nothing, num_positions, nothing, positions[0], fill)
        if packed
        else None,
        columns,
        pad_token_id,
    )


def lay_out(
    micro_batch: MicroBatch,
    token_ids: Tensor | Sequence[Tensor],
    *,
    token_mask: Tensor | Sequence[Tensor] | None = None,
    columns: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
    pad_token_id: int = 0,
) -> PackedBatch:
    """The model call of a plan's micro-batch: its mode, shape, multiples and shared prefixes.

    Args:
        micro_batch: of `MicroBatchPlan.micro_batches`; the call of an empty slot has the slot's
            shape and counts nothing.
        token_ids: int64; either the rows that were planned, all of them, of which the micro-batch's
            are taken; or one tensor [T], the tokens of its sequences in the order of its indices.
        token_mask, columns: likewise, rows or one tensor; else as in `pack_sequences`.
        pad_token_id: what padding and fill hold.

    Raises:
        ValueError: the plan was made for sequences of other lengths, or as in `pack_sequences`.
    """
    if not isinstance(micro_batch, MicroBatch):
        raise ValueError(
            f"lay_out takes one micro-batch, got {type(micro_batch).__name__}; loop over "
            f"plan.micro_batches(rank)"
        )
    token_ids = _rows_of(micro_batch, token_ids, "token_ids")
    token_mask = None if token_mask is None else _rows_of(micro_batch, token_mask, "token_mask")
    columns = {
        name: _rows_of(micro_batch, column, name) for name, column in (columns or {}).items()
    }
    num_tokens = sum(micro_batch.lengths)
    if token_ids.shape != (num_tokens,):
        raise ValueError(
            f"token_ids must hold the sequences that were planned, of {num_tokens} tokens in all, "
            f"got shape {tuple(token_ids.shape)}; pass the tokens of micro_batch.indices, or plan "
            f"again with their lengths"
        )
    packed = micro_batch.mode == "packed"
    num_rows, num_positions = micro_batch.shape
    arguments: dict[str, Any] = {"columns": columns, "pad_token_id": pad_token_id}
    if not micro_batch.indices:
        batch = empty_batch(shape=micro_batch.shape, packed=packed, **arguments)
        batch = batch.to(token_ids.device)
    elif packed:
        batch = pack_sequences(
            token_ids,
            micro_batch.lengths,
            token_mask=token_mask,
            prefix_ids=micro_batch.prefix_ids,
            prefix_lengths=micro_batch.prefix_lengths,
            sequence_multiple=micro_batch.sequence_multiple,
            fill_to=num_positions,
            **arguments,
        )
    else:
        batch = pad_sequences(
            token_ids,
            micro_batch.lengths,
            token_mask=token_mask,
            num_rows=num_rows,
            row_length=num_positions,
            **arguments,
        )
    return replace(batch, micro_batch=micro_batch)


def _rows_of(micro_batch: MicroBatch, column: Tensor | Sequence[Tensor], name: str) -> Tensor:
    """The values of the micro-batch's sequences [T, ...], from all rows of the plan."""
    if isinstance(column, Tensor):
        return column
    if not len(column):
        raise ValueError(f"{name} must hold the rows that were planned, got none; pass all of them")
    if not micro_batch.indices:
        return column[0][:0]
    last = max(micro_batch.indices)
    if last >= len(column):
        raise ValueError(
            f"{name} must hold all rows that were planned, got {len(column)} for a micro-batch "
            f"with row {last}; do not take the micro-batch's rows yourself, or concatenate them"
        )
    rows = [column[i] for i in micro_batch.indices]
    for i, row, planned in zip(micro_batch.indices, rows, micro_batch.lengths, strict=True):
        if len(row) != planned:
            raise ValueError(
                f"{name} must hold the rows that were planned, got {len(row)} values in row {i}, "
                f"which was planned with {planned} tokens; pass all, in the order of the lengths"
            )
    return torch.cat(rows)


def _check_columns(
    token_ids: Tensor, lengths: ArrayLike, token_mask: Tensor | None
) -> tuple[IntArray, Tensor]:
    """The lengths as int64 [N] and the mask as bool [T], once they are known to fit together."""
    if not isinstance(token_ids, Tensor):
        raise ValueError(
            f"token_ids must be one tensor, got {type(token_ids).__name__}; concatenate the "
            f"sequences with torch.cat"
        )
    lengths = as_lengths(lengths)
    if not lengths.size or lengths.min() < 1:
        raise ValueError(
            f"lengths must hold at least one sequence and each at least one token, got "
            f"{lengths.tolist()}; use empty_batch() for a micro-batch of nothing"
        )
    if token_ids.dtype != torch.int64 or token_ids.shape != (lengths.sum(),):
        raise ValueError(
            f"token_ids must be int64 of shape ({lengths.sum()},), the sum of lengths, got "
            f"{token_ids.dtype} of shape {tuple(token_ids.shape)}; concatenate the sequences, and "
            f"convert with .long()"
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


def _batch(
    token_ids: Tensor,
    token_mask: Tensor,
    lengths: IntArray,
    slots: IntArray,
    positions: IntArray,
    layout: PackLayout | None,
    columns: Mapping[str, Tensor] | None,
    pad_token_id: int,
) -> PackedBatch:
    """Write flat tokens [T] to their slots [T] in a batch shaped like `positions` [B, L]."""
    slot_of_token = torch.from_numpy(slots).to(token_ids.device)

    def lay(column: Tensor, fill: int) -> Tensor:
        laid_out = column.new_full((positions.size, *column.shape[1:]), fill)
        return laid_out.index_copy(0, slot_of_token, column).unflatten(0, positions.shape)

    for name, column in (columns or {}).items():
        if not isinstance(column, Tensor) or column.shape[:1] != token_ids.shape:
            found = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
            raise ValueError(
                f"column {name!r} must be a tensor with one entry per token, {len(token_ids)}, got "
                f"{found}; concatenate the values of all sequences"
            )
    targets = token_mask.nonzero().squeeze(1)
    return PackedBatch(
        token_ids=lay(token_ids, pad_token_id),
        position_ids=torch.from_numpy(positions).to(token_ids.device),
        layout=layout,
        slots=slot_of_token,
        score_positions=slot_of_token[targets - 1],
        labels=token_ids[targets],
        target_positions=targets,
        lengths=tuple(lengths.tolist()),
        columns={name: lay(column, 0) for name, column in (columns or {}).items()},
    )


def _check_prefixes(
    batch: PackedBatch,
    token_ids: Tensor,
    token_mask: Tensor,
    columns: Mapping[str, Tensor],
    prefix_ids: ArrayLike | None,
    prefix_lengths: ArrayLike | None,
) -> None:
    """ValueError when a shared prefix is trained, or is not the same in its whole group."""
    lengths = np.array(batch.lengths)
    groups, shared = as_prefixes(lengths, prefix_ids, prefix_lengths)
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
    token = _first_differing(token_ids, batch.unpack(batch.token_ids))
    if token is not None:
        raise ValueError(
            f"sequences of one prefix id must begin with the same tokens, got other tokens in "
            f"group {groups[sequence_of_token[token]]}; give them different prefix_ids or a "
            f"shorter prefix_lengths"
        )
    for name, column in columns.items():
        token = _first_differing(column, batch.unpack(batch.columns[name]))
        if token is not None:
            raise ValueError(
                f"column {name!r} must be equal in a shared prefix, got different values in group "
                f"{groups[sequence_of_token[token]]}; set it to 0 there, or pack without prefix_ids"
            )


def _first_differing(values: Tensor, stored: Tensor) -> int | None:
    """The first flat token whose value [T, ...] is not what the pack holds; a NaN equals a NaN."""
    differing = (values != stored) & ~((values != values) & (stored != stored))
    tokens = differing.flatten(1).any(1) if differing.ndim > 1 else differing
    found = tokens.nonzero()
    return int(found[0]) if len(found) else None
