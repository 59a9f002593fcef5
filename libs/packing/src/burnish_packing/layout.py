"""Where every token of a pack lies, and which tokens see each other: index arrays, numpy only."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish_packing._checks import IntArray, as_lengths, as_prefixes, check_positive

IntOrArray = TypeVar("IntOrArray", int, IntArray)


def cu_seqlens(lengths: ArrayLike) -> NDArray[np.int32]:
    """Cumulative lengths, int32 [N + 1] from 0: sequence i is [cu_seqlens[i], cu_seqlens[i + 1]).

    The form of FlashAttention's varlen kernels, hence int32; ValueError beyond 2**31 - 1 tokens.
    """
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(as_lengths(lengths))])
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"lengths must sum to less than 2**31 for cu_seqlens, got {ends[-1]}; use smaller packs"
        )
    return ends.astype(np.int32)


def position_ids(lengths: ArrayLike) -> IntArray:
    """Position of every token in its own sequence, int64 [sum(lengths)]: [2, 3] -> 0 1 0 1 2."""
    lengths = as_lengths(lengths)
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def sequence_ids(lengths: ArrayLike) -> IntArray:
    """Sequence of every token, int64 [sum(lengths)]: [2, 3] -> 0 0 1 1 1."""
    lengths = as_lengths(lengths)
    return np.repeat(np.arange(len(lengths)), lengths)


def round_up(value: IntOrArray, multiple: int) -> IntOrArray:
    """The smallest multiple of `multiple` that is >= value, an integer or an array of them."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """Who sees whom in a pack: positions [start, end) are queries that see themselves causally.

    Before that they see every key in [prefix_start, prefix_end), the prefix they share with others.
    """

    start: int
    end: int
    prefix_start: int = 0
    prefix_end: int = 0


@dataclass(frozen=True)
class PackLayout:
    """Where the sequences of one pack lie in its row of L positions.

    "Flat" means the caller's order: sequences concatenated, T = sum(lengths) tokens.
    """

    lengths: IntArray  # int64 [N], tokens of each sequence
    padded_lengths: IntArray  # int64 [N], multiples of sequence_multiple; equal to lengths with 1
    num_positions: int  # L, the fill included
    slots: IntArray  # int64 [T], position of every flat token; siblings share their prefix's
    position_ids: IntArray  # int64 [L]; padding and fill count from 0, as sequences of their own
    spans: tuple[Span, ...]  # tile [0, L) in order; padding and fill are spans of their own


def pack_layout(
    lengths: ArrayLike,
    *,
    prefix_ids: ArrayLike | None = None,
    prefix_lengths: ArrayLike | None = None,
    sequence_multiple: int = 1,
    pad_multiple: int = 1,
    fill_to: int | None = None,
) -> PackLayout:
    """Lay sequences one after another; a shared prefix lies once, before its first sequence's rest.

    Args:
        lengths: int [N], tokens of each sequence, all >= 1, N >= 1.
        prefix_ids: int [N], equal for sequences that begin with the same tokens, -1 for none.
        prefix_lengths: int [N], tokens they share; read where prefix_ids >= 0.
        sequence_multiple: every sequence is padded to a multiple of this (context parallelism:
            `context_parallel_multiple`). Not together with prefixes.
        pad_multiple: the row is filled up to a multiple of this.
        fill_to: the row is filled up to exactly this many positions instead.

    Raises:
        ValueError: an argument is out of range or they do not go together.
    """
    lengths = as_lengths(lengths)
    if not lengths.size or lengths.min() < 1:
        raise ValueError(
            f"lengths must hold at least one sequence and each at least one token, got "
            f"{lengths.tolist()}; leave empty sequences out of a pack"
        )
    check_positive(sequence_multiple, "sequence_multiple")
    check_positive(pad_multiple, "pad_multiple")
    groups, shared = as_prefixes(lengths, prefix_ids, prefix_lengths)
    if sequence_multiple > 1 and shared.any():
        raise ValueError(
            f"sequences behind a shared prefix must not be padded one by one, got "
            f"sequence_multiple {sequence_multiple}; leave out prefix_ids"
        )
    padded = round_up(lengths, sequence_multiple)
    slots, spans = _tile(lengths, padded, groups, shared)
    used = spans[-1].end
    size = _filled_size(used, pad_multiple, fill_to)
    if size > used:
        spans.append(Span(used, size))
    positions = np.concatenate([np.arange(span.end - span.start) for span in spans])
    positions[slots] = position_ids(lengths)  # those behind a prefix go on from it
    return PackLayout(lengths, padded, size, slots, positions, tuple(spans))


def _tile(
    lengths: IntArray, padded: IntArray, groups: IntArray, shared: IntArray
) -> tuple[IntArray, list[Span]]:
    """Position of every flat token, int64 [T], and the spans, without the fill at the end."""
    slots: list[np.ndarray] = []
    spans: list[Span] = []
    prefix_of: dict[int, Span] = {}
    end = 0
    for length, size, group, prefix in zip(
        lengths.tolist(), padded.tolist(), groups.tolist(), shared.tolist(), strict=True
    ):
        if prefix and group not in prefix_of:
            prefix_of[group] = Span(end, end + prefix)
            spans.append(prefix_of[group])
            end += prefix
        before = prefix_of[group] if prefix else Span(0, 0)
        own = length - prefix
        slots += [np.arange(before.start, before.end), np.arange(end, end + own)]
        if own:
            spans.append(Span(end, end + own, before.start, before.end))
            end += own
        if size > length:
            spans.append(Span(end, end + size - length))
            end += size - length
    return np.concatenate(slots), spans


def _filled_size(used: int, pad_multiple: int, fill_to: int | None) -> int:
    if fill_to is None:
        return round_up(used, pad_multiple)
    check_positive(fill_to, "fill_to")
    if pad_multiple > 1 or fill_to < used:
        raise ValueError(
            f"fill_to must hold the {used} positions of the pack and come without pad_multiple, "
            f"got fill_to {fill_to} and pad_multiple {pad_multiple}; raise fill_to or pack less"
        )
    return fill_to
