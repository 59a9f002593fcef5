"""Index arrays of sequences that lie one after another."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burnish_packing._checks import IntArray, as_lengths

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
