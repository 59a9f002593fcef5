"""Which positions of a pack every context-parallel rank holds, and the way back: numpy only.

Zig-zag: a sequence is cut into 2 * cp equal chunks and rank r holds chunks r and 2 * cp - 1 - r, an
early one and a late one, so that causal attention costs all ranks the same. It is what Megatron
Core and Transformer Engine expect of packed (`thd`) inputs, sequence by sequence.
"""

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import IntArray, as_lengths, check_positive
from burnish_packing.layout import PackLayout, position_ids


def context_parallel_multiple(context_parallel_size: int, tensor_parallel_size: int = 1) -> int:
    """What to pad every sequence to a multiple of: `sequence_multiple` of a pack or plan.

    With cp = context_parallel_size > 1 every sequence has to split into 2 * cp chunks, and with
    sequence parallelism a rank's shard over tp ranks, for which 2 * cp * tp is enough. Without
    context parallelism tp; 1 if there is neither.
    """
    check_positive(context_parallel_size, "context_parallel_size")
    check_positive(tensor_parallel_size, "tensor_parallel_size")
    chunks = 1 if context_parallel_size == 1 else 2 * context_parallel_size
    return chunks * tensor_parallel_size


def shard_lengths(layout: PackLayout, context_parallel_size: int) -> IntArray:
    """The lengths that the two functions below take: padded sequences, then the fill, if any.

    The fill at the end of a pack is sharded as a sequence of its own, int64 [N] or [N + 1], summing
    to `layout.num_positions`.

    Raises:
        ValueError: sequences share prefixes, or a length or the fill does not split into chunks.
    """
    if any(span.prefix_end > span.prefix_start for span in layout.spans):
        raise ValueError(
            "a pack that is sharded must have no shared prefixes, which ranks cannot split in "
            "step, got spans behind a prefix; lay it out without prefix_ids"
        )
    fill = layout.num_positions - int(layout.padded_lengths.sum())
    lengths = np.append(layout.padded_lengths, fill) if fill else layout.padded_lengths
    _check_chunks(lengths, context_parallel_size, has_fill=fill > 0)
    return lengths


def zigzag_positions(padded_lengths: ArrayLike, context_parallel_size: int, rank: int) -> IntArray:
    """Positions of a pack that a rank holds, in its order, int64 [L / cp].

    Lengths [8], cp 2: rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5. With cp 1: all, in order.

    Args:
        padded_lengths: int [N], L in all, multiples of 2 * cp if cp > 1 (`shard_lengths`).
        context_parallel_size: cp.
        rank: of the context-parallel group, 0 <= rank < cp.

    Raises:
        ValueError: a length does not split into chunks, or there is no such rank.
    """
    lengths = as_lengths(padded_lengths)
    _check_chunks(lengths, context_parallel_size)
    is_integer = isinstance(rank, int | np.integer) and not isinstance(rank, bool)
    if not is_integer or not 0 <= rank < context_parallel_size:
        raise ValueError(
            f"rank must be from 0 to {context_parallel_size - 1}, the last of the context-parallel "
            f"group, got {rank!r}; pass the rank inside that group"
        )
    starts = np.cumsum(lengths) - lengths
    if context_parallel_size == 1:
        return np.arange(int(lengths.sum()))
    chunk = lengths // (2 * context_parallel_size)
    last = 2 * context_parallel_size - 1
    run_starts = np.stack([starts + rank * chunk, starts + (last - rank) * chunk], axis=1).ravel()
    run_lengths = np.repeat(chunk, 2)
    return np.repeat(run_starts, run_lengths) + position_ids(run_lengths)


def merge_positions(padded_lengths: ArrayLike, context_parallel_size: int) -> IntArray:
    """Where each position of the pack lies in the shards of all ranks, concatenated, int64 [L].

    `np.concatenate(shards)[merge_positions(...)]` undoes the sharding (arguments and errors:
    `zigzag_positions`).
    """
    check_positive(context_parallel_size, "context_parallel_size")
    held = np.concatenate(
        [
            zigzag_positions(padded_lengths, context_parallel_size, rank)
            for rank in range(context_parallel_size)
        ]
    )
    merged = np.empty_like(held)
    merged[held] = np.arange(len(held))
    return merged


def _check_chunks(lengths: IntArray, context_parallel_size: int, has_fill: bool = False) -> None:
    """ValueError unless every length splits into the chunks of the ranks."""
    multiple = context_parallel_multiple(context_parallel_size)
    uneven = np.flatnonzero(lengths % multiple)
    if not uneven.size:
        return
    i = int(uneven[0])
    if has_fill and i == len(lengths) - 1:
        raise ValueError(
            f"the fill at the end of a pack must be a multiple of 2 * context_parallel_size = "
            f"{multiple} positions, got {lengths[i]}; choose fill_to or pad_multiple as a multiple "
            f"of it"
        )
    raise ValueError(
        f"every sequence must be padded to a multiple of 2 * context_parallel_size = {multiple}, "
        f"got {lengths[i]} positions for sequence {i}; lay the pack out with "
        f"sequence_multiple=context_parallel_multiple({context_parallel_size})"
    )
