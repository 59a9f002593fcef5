"""The arguments of a plan: which values go together, and which sequences make a global batch."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import IntArray, as_integers, check_positive
from burnish_packing.layout import round_up

Mode = Literal["packed", "padded", "fixed"]
Order = Literal["as_given", "largest_first"]


def check_names(mode: str, order: str) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be packed, padded or fixed, got {mode!r}; choose one")
    if order not in get_args(Order):
        raise ValueError(f"order must be as_given or largest_first, got {order!r}; choose one")


def check_numbers(
    max_tokens: int | None,
    num_ranks: int,
    mode: str,
    micro_batch_size: int | None,
    pad_multiple: int,
    sequence_multiple: int,
) -> None:
    if (mode == "fixed") != (micro_batch_size is not None):
        raise ValueError(
            f"micro_batch_size must be given in mode fixed and only there, got {micro_batch_size} "
            f"in mode {mode}; in the other modes max_tokens decides"
        )
    if mode != "fixed" and max_tokens is None:
        raise ValueError(f"max_tokens must be given in mode {mode}, got None; pass the budget")
    check_positive(num_ranks, "num_ranks")
    check_positive(pad_multiple, "pad_multiple")
    check_positive(sequence_multiple, "sequence_multiple")
    if max_tokens is not None:
        check_positive(max_tokens, "max_tokens")
    if micro_batch_size is not None:
        check_positive(micro_batch_size, "micro_batch_size")


def check_grouping(
    mode: str,
    units: ArrayLike | None,
    prefix_ids: ArrayLike | None,
    sequence_multiple: int,
    global_batch_size: int | None,
    drop_last: bool,
) -> None:
    if prefix_ids is not None and (mode != "packed" or units is not None):
        raise ValueError(
            f"prefix_ids must come with mode packed and without units, got mode {mode}; leave out "
            f"units (a group stays together as far as it fits) or prefix_ids"
        )
    if sequence_multiple > 1 and (mode != "packed" or prefix_ids is not None):
        raise ValueError(
            f"sequence_multiple must come with mode packed and without prefix_ids, got "
            f"{sequence_multiple} in mode {mode}; use pad_multiple for rows, or leave out prefixes"
        )
    if global_batch_size is not None:
        check_positive(global_batch_size, "global_batch_size")
    elif drop_last:
        raise ValueError("drop_last must come with global_batch_size, got None; pass its size")


def check_lengths(
    lengths: IntArray, max_tokens: int | None, pad_multiple: int, sequence_multiple: int
) -> None:
    """ValueError naming the first sequence that no micro-batch can hold."""
    padded = round_up(round_up(lengths, sequence_multiple), pad_multiple)
    if max_tokens is not None and (padded > max_tokens).any():
        i = int(np.flatnonzero(padded > max_tokens)[0])
        multiples = f"pad_multiple {pad_multiple}"
        if sequence_multiple > 1:
            multiples = f"sequence_multiple {sequence_multiple}, {multiples}"
        raise ValueError(
            f"every sequence must fit max_tokens = {max_tokens}, got length {lengths[i]}, padded "
            f"{padded[i]} ({multiples}), at index {i}; raise max_tokens or drop it"
        )


def blocks(num_sequences: int, global_batch_size: int | None) -> list[tuple[int, int]]:
    """[start, end) of the sequences of each global batch; the last one may be short."""
    size = global_batch_size or max(num_sequences, 1)
    starts = range(0, num_sequences, size)
    return [(start, min(start + size, num_sequences)) for start in starts]


def as_units(units: ArrayLike, num_sequences: int, global_batch_size: int | None) -> IntArray:
    """int64 [N]; ValueError unless each unit lies in one global batch."""
    ids = as_integers(units, "units")
    if len(ids) != num_sequences:
        raise ValueError(
            f"units must have one entry per sequence, {num_sequences}, got {len(ids)}; give a "
            f"sequence that stands alone an id of its own"
        )
    if global_batch_size is None:
        return ids
    _, first, unit_of = np.unique(ids, return_index=True, return_inverse=True)
    outside = np.arange(len(ids)) // global_batch_size != (first // global_batch_size)[unit_of]
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"every unit must lie in one global batch of {global_batch_size} sequences, got unit "
            f"{ids[i]} with sequences {np.flatnonzero(ids == ids[i]).tolist()}; put its sequences "
            f"next to each other, or choose a global_batch_size that is a multiple of unit sizes"
        )
    return ids


def to_fit(
    lengths: IntArray,
    max_tokens: int | None,
    mode: str,
    pad_multiple: int,
    sequence_multiple: int,
) -> tuple[IntArray, int | None]:
    """Positions of each sequence [N], and the limit that what runs together must fit."""
    if mode != "packed":
        return round_up(lengths, pad_multiple), max_tokens
    limit = None if max_tokens is None else max_tokens // pad_multiple * pad_multiple
    return round_up(lengths, sequence_multiple), limit
