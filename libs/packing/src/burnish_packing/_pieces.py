"""Pieces of sequences: long ones cut, and the checks of what is packed and what was read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish_packing._checks import MAX_TOKENS, IntArray, as_integers, check_count, shown

TooLong = Literal["error", "skip", "truncate", "split"]
TOO_LONG: tuple[str, ...] = get_args(TooLong)


def check_choice(value: str, choices: Sequence[str], name: str) -> None:
    """ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {shown(value)}; choose one"
        )


@dataclass(frozen=True)
class Pieces:
    """Sequences as they are packed: whole, cut or left out; and the units that stay together."""

    lengths: IntArray  # [M], like the next two: see `Packing`
    sequences: IntArray
    starts: IntArray
    skipped: IntArray
    truncated: IntArray
    num_lost_tokens: int
    unit_of: IntArray  # [M], unit of each piece
    unit_tokens: IntArray  # [U]
    unit_sizes: IntArray  # [U], pieces; 1 where their number does not matter
    fitting: IntArray  # units that go into bins


def cut_to_fit(
    given: IntArray,
    capacity: int,
    max_sequences_per_bin: int | None,
    too_long: TooLong,
    units: ArrayLike | None,
) -> Pieces:
    """Pieces that fit a bin, of sequences of `given` [N] tokens; the rules are `pack`'s."""
    unit_of, tokens, sizes = group_units(given, units)
    num = len(given)
    sequences, starts = np.arange(num), np.zeros(num, np.int64)
    none = np.zeros(0, np.int64)
    if too_long in ("error", "skip"):
        max_sequences = max_sequences_per_bin or max(num, 1)
        too_big = (tokens > capacity) | (sizes > max_sequences)
        if too_long == "error":
            limits = (capacity, max_sequences)
            _check_units_fit(too_big, tokens, sizes, unit_of, *limits, units is not None)
        skipped = np.flatnonzero(too_big[unit_of])
        lost = int(given[skipped].sum())
        fitting = np.flatnonzero(~too_big)
        if max_sequences_per_bin is None:
            sizes = np.ones_like(sizes)
        return Pieces(
            given, sequences, starts, skipped, none, lost, unit_of, tokens, sizes, fitting
        )

    _check_single(sizes, unit_of, too_long)
    truncated, lost = none, 0
    if too_long == "truncate":
        truncated = np.flatnonzero(given > capacity)
        lost = int((given[truncated] - capacity).sum())
        lengths = np.minimum(given, capacity)
    else:
        lengths, sequences, starts = _split_long(given, capacity)
    units_are_pieces = np.arange(len(lengths))
    return Pieces(
        lengths=lengths,
        sequences=sequences,
        starts=starts,
        skipped=none,
        truncated=truncated,
        num_lost_tokens=lost,
        unit_of=units_are_pieces,
        unit_tokens=lengths,
        unit_sizes=np.ones_like(lengths),
        fitting=units_are_pieces,
    )


def group_units(lengths: IntArray, units: ArrayLike | None) -> tuple[IntArray, IntArray, IntArray]:
    """Unit of each sequence, 0 to U - 1 [N], and tokens [U] and sequences [U] of each unit.

    Units are numbered by their first sequence, so that `next_fit` keeps the order.
    """
    if units is None:
        return np.arange(len(lengths)), lengths, np.ones(len(lengths), np.int64)
    ids = as_integers(units, "units")
    if len(ids) != len(lengths):
        raise ValueError(
            f"units must have one entry per sequence, {len(lengths)}, got {len(ids)}; give a "
            f"sequence that stands alone an id of its own"
        )
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    unit_of = rank[inverse]
    tokens = np.zeros(len(first), np.int64)
    np.add.at(tokens, unit_of, lengths)
    return unit_of, tokens, np.bincount(unit_of, minlength=len(first))


def _split_long(given: IntArray, capacity: int) -> tuple[IntArray, IntArray, IntArray]:
    """Lengths, sequences and starts of the pieces: the heads, then what continues long ones."""
    extra = np.maximum(-(-given // capacity) - 1, 0)  # pieces after the head
    continued = np.repeat(np.arange(len(given)), extra)
    nth = np.arange(len(continued)) - np.repeat(np.cumsum(extra) - extra, extra) + 1
    sequences = np.concatenate([np.arange(len(given)), continued])
    starts = np.concatenate([np.zeros(len(given), np.int64), nth * capacity])
    return np.minimum(given[sequences] - starts, capacity), sequences, starts


def _check_single(sizes: IntArray, unit_of: IntArray, too_long: str) -> None:
    """ValueError where units hold several sequences, which cannot be cut and stay together."""
    several = np.flatnonzero(sizes > 1)
    if several.size:
        index = int(np.flatnonzero(unit_of == several[0])[0])
        raise ValueError(
            f"too_long must be error or skip where units hold several sequences, got {too_long!r} "
            f"and a unit of {sizes[several[0]]} that begins at index {index}; choose skip (of the "
            f"whole unit), or cut the sequences first"
        )


def _check_units_fit(
    too_big: NDArray[np.bool_],
    tokens: IntArray,
    sizes: IntArray,
    unit_of: IntArray,
    capacity: int,
    max_sequences: int,
    has_units: bool,
) -> None:
    """ValueError naming the first sequence or unit that no bin can hold."""
    if not too_big.any():
        return
    unit = int(np.argmax(too_big))
    index = int(np.flatnonzero(unit_of == unit)[0])
    if tokens[unit] <= capacity:
        raise ValueError(
            f"every unit must have at most max_sequences_per_bin = {max_sequences} sequences, got "
            f"{sizes[unit]} in the unit that begins at index {index}; raise max_sequences_per_bin, "
            f"drop the unit or choose too_long skip"
        )
    several = has_units and sizes[unit] > 1
    what = f"the unit of {sizes[unit]} sequences that begins" if several else "the sequence"
    remedy = "too_long skip" if several else "too_long"
    raise ValueError(
        f"every sequence must fit a bin of capacity {capacity}, got {tokens[unit]} tokens for "
        f"{what} at index {index}; raise the capacity, drop it or choose {remedy}"
    )


def check_sort_keys(tokens: IntArray, sizes: IntArray) -> None:
    """ValueError where `_heuristics.classes_of`, which sorts by tokens x sizes, would overflow."""
    largest = int(tokens.max(initial=0)) * int(sizes.max(initial=1))
    if largest > 2**62:
        raise ValueError(
            f"the tokens of the largest unit times the sequences of the largest must be at most "
            f"2**62, got {largest}; divide the units"
        )


def check_pieces(
    lengths: IntArray,
    sequences: IntArray,
    starts: IntArray,
    skipped: IntArray,
    truncated: IntArray,
) -> None:
    """ValueError unless the pieces [M] of a packing that was read make up its sequences."""
    num_pieces, num_sequences = len(lengths), int(sequences.max(initial=-1)) + 1
    dropped = np.concatenate([skipped, truncated])
    continued = sequences[num_sequences:]
    is_sound = (
        len(sequences) == len(starts) == num_pieces >= num_sequences
        and np.array_equal(sequences[:num_sequences], np.arange(num_sequences))
        and bool(((continued >= 0) & (np.diff(continued, prepend=0) >= 0)).all())
        and len(np.unique(dropped)) == len(dropped)
        and bool(((dropped >= 0) & (dropped < num_sequences)).all())
        and not np.isin(continued, dropped).any()
    )
    if is_sound:  # each piece begins where the one before it in its sequence ends
        order = np.argsort(sequences, kind="stable")
        ends = (starts + lengths)[order]
        is_head = np.diff(sequences[order], prepend=-1) > 0
        is_sound = np.array_equal(starts[order], np.where(is_head, 0, np.roll(ends, 1)))
    if not is_sound:
        raise ValueError(
            f"the pieces of a packing must make up its sequences, got {num_pieces} pieces of "
            f"{num_sequences} sequences with some missing, doubled or out of order; pack again"
        )


def check_lost(
    num_lost_tokens: Any, lengths: IntArray, skipped: IntArray, truncated: IntArray, capacity: int
) -> int:
    """The same; ValueError unless so many tokens can be lost with these sequences of a packing."""
    for array, name in ((skipped, "skipped"), (truncated, "truncated")):
        if not (np.diff(array) > 0).all():
            raise ValueError(f"{name} must ascend, got {shown(array.tolist())}; pack again")
    short = truncated[lengths[truncated] != capacity]
    if short.size:
        raise ValueError(
            f"a truncated sequence must have kept {capacity} tokens, the capacity, got "
            f"{lengths[short[0]]} of sequence {short[0]}; pack again"
        )
    # A skipped sequence loses the tokens that its length says, a truncated one at least one more.
    least = int(lengths[skipped].sum()) + len(truncated)
    most = MAX_TOKENS if len(truncated) else least
    return check_count(num_lost_tokens, least, most, "num_lost_tokens", "pack again")
