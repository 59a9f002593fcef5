"""The arguments of a plan: which values go together, and which sequences make a global batch."""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from burnish_packing._checks import IntArray, as_integers, check_positive, check_total, shown
from burnish_packing._pieces import check_choice
from burnish_packing.layout import round_up

Mode = Literal["packed", "padded", "fixed"]
Order = Literal["as_given", "largest_first"]


def check_names(mode: str, order: str, cost: Any) -> None:
    check_choice(mode, get_args(Mode), "mode")
    check_choice(order, get_args(Order), "order")
    if not callable(cost):
        raise ValueError(
            f"cost must be a function of lengths, got {shown(cost)}; pass token_cost, "
            f"flops_cost(...) or a function of your own"
        )


def checked_numbers(
    max_tokens: int | None,
    num_ranks: int,
    mode: str,
    micro_batch_size: int | None,
    pad_multiple: int,
    sequence_multiple: int,
) -> tuple[int | None, int, int | None, int, int]:
    """All but the mode, as plain integers: those of numpy wrap around, or make floats of int64."""
    if (mode == "fixed") != (micro_batch_size is not None):
        raise ValueError(
            f"micro_batch_size must be given in mode fixed and only there, got {micro_batch_size} "
            f"in mode {mode}; in the other modes max_tokens decides"
        )
    if mode != "fixed" and max_tokens is None:
        raise ValueError(f"max_tokens must be given in mode {mode}, got None; pass the budget")
    return (
        None if max_tokens is None else check_positive(max_tokens, "max_tokens"),
        check_positive(num_ranks, "num_ranks"),
        None if micro_batch_size is None else check_positive(micro_batch_size, "micro_batch_size"),
        check_positive(pad_multiple, "pad_multiple"),
        check_positive(sequence_multiple, "sequence_multiple"),
    )


def checked_grouping(
    mode: str,
    units: ArrayLike | None,
    prefix_ids: ArrayLike | None,
    sequence_multiple: int,
    global_batch_size: int | None,
    drop_last: bool,
) -> int | None:
    """global_batch_size as a plain integer; ValueError for what does not go together."""
    if prefix_ids is not None and mode != "packed":
        raise ValueError(
            f"prefix_ids must come with mode packed, got mode {mode}; choose mode packed or leave "
            f"out prefix_ids and prefix_lengths"
        )
    if prefix_ids is not None and units is not None:
        raise ValueError(
            "prefix_ids must come without units, got both; leave out units (a group of one prefix "
            "stays together as far as it fits) or the prefixes"
        )
    if sequence_multiple > 1 and mode != "packed":
        raise ValueError(
            f"sequence_multiple must come with mode packed, got {sequence_multiple} in mode "
            f"{mode}; use pad_multiple, which fills up the rows"
        )
    if sequence_multiple > 1 and prefix_ids is not None:
        raise ValueError(
            f"sequence_multiple must be 1 with prefix_ids, whose sequences share positions, got "
            f"{sequence_multiple}; leave out one of them"
        )
    if global_batch_size is not None:
        return check_positive(global_batch_size, "global_batch_size")
    if drop_last:
        raise ValueError("drop_last must come with global_batch_size, got None; pass its size")
    return None


def check_lengths(
    lengths: IntArray, max_tokens: int | None, pad_multiple: int, sequence_multiple: int
) -> None:
    """ValueError naming the first sequence that no micro-batch can hold, or for too many tokens."""
    if (lengths < 1).any():
        i = int(np.flatnonzero(lengths < 1)[0])
        raise ValueError(
            f"every sequence must have at least one token, got length {lengths[i]} at index {i}; "
            f"leave it out of the plan"
        )
    padded = round_up(round_up(lengths, sequence_multiple), pad_multiple)
    check_total(padded, "padded lengths")
    most = int(padded.max(initial=0)) * len(padded)  # more than the positions of any shape
    if most > 2**62:
        raise ValueError(
            f"the number of sequences times the longest one must be at most 2**62, got {most}; "
            f"plan fewer sequences at a time, or cut the longest"
        )
    if max_tokens is not None and (padded > max_tokens).any():
        i = int(np.flatnonzero(padded > max_tokens)[0])
        multiples = f"pad_multiple {pad_multiple}"
        if sequence_multiple > 1:
            multiples = f"sequence_multiple {sequence_multiple}, {multiples}"
        raise ValueError(
            f"every sequence must fit max_tokens = {max_tokens}, got length {lengths[i]}, padded "
            f"{padded[i]} ({multiples}), at index {i}; raise max_tokens or drop it"
        )


def count_kept(num_sequences: int, global_batch_size: int | None, drop_last: bool) -> int:
    """Sequences without those of the last global batch, if it is short and to be dropped."""
    if not drop_last or global_batch_size is None:
        return num_sequences
    return num_sequences - num_sequences % global_batch_size


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
