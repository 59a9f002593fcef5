"""What a caller holds (list, tuple, array, CPU tensor, JSON) becomes checked int64 arrays."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


def as_integers(values: ArrayLike, name: str) -> IntArray:
    """A new read-only int64 array [N]; ValueError when `values` is not 1-D or not of integers."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}; flatten it")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}; convert them first")
    array = array.astype(np.int64)
    array.flags.writeable = False
    return array


def as_lengths(lengths: ArrayLike) -> IntArray:
    """Sequence lengths in tokens, int64 [N]; ValueError names the first negative one."""
    array = as_integers(lengths, "lengths")
    negative = np.flatnonzero(array < 0)
    if negative.size:
        i = int(negative[0])
        raise ValueError(f"lengths must be >= 0, got lengths[{i}] = {array[i]}; drop that sequence")
    return array


def check_positive(value: int, name: str) -> None:
    """ValueError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}; pass a positive integer")


def as_prefixes(
    lengths: IntArray, prefix_ids: ArrayLike | None, prefix_lengths: ArrayLike | None
) -> tuple[IntArray, IntArray]:
    """Checked shared prefixes: group of each sequence (-1: none) and its shared tokens (0: none).

    Args:
        lengths: int64 [N].
        prefix_ids: int [N], equal for sequences that begin with the same tokens, -1 for none.
        prefix_lengths: int [N], tokens they share; read where prefix_ids >= 0.

    Raises:
        ValueError: one of the two is missing, is not one entry per sequence, or is out of range.
    """
    if prefix_ids is None and prefix_lengths is None:
        return np.full(len(lengths), -1), np.zeros(len(lengths), np.int64)
    if prefix_ids is None or prefix_lengths is None:
        raise ValueError("prefix_ids and prefix_lengths must come together, got one; pass both")
    groups = as_integers(prefix_ids, "prefix_ids")
    shared = as_integers(prefix_lengths, "prefix_lengths")
    if not len(groups) == len(shared) == len(lengths):
        raise ValueError(
            f"prefix_ids and prefix_lengths must have one entry per sequence, {len(lengths)}, got "
            f"{len(groups)} and {len(shared)}; use -1 for a sequence without a shared prefix"
        )
    shared = np.where(groups >= 0, shared, 0)
    wrong = (groups < -1) | ((groups >= 0) & ((shared < 1) | (shared > lengths)))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"prefix_ids must be -1, or >= 0 with a prefix length from 1 to the sequence's length, "
            f"got id {groups[i]}, prefix length {shared[i]}, length {lengths[i]} at index {i}; "
            f"use id -1 for a sequence without a shared prefix"
        )
    order = np.argsort(groups, kind="stable")
    same_group = groups[order][1:] == groups[order][:-1]
    differing = np.flatnonzero(same_group & (shared[order][1:] != shared[order][:-1]))
    if differing.size:
        i = order[differing[0]]
        raise ValueError(
            f"sequences of one prefix id must share one prefix length, got {shared[i]} and others "
            f"in group {groups[i]}; make them equal"
        )
    return groups, shared


def load_versioned(
    text: str, version: int, what: str, names: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    """The JSON object in `text`, without its schema_version.

    Raises:
        ValueError: schema_version is not `version`, one of `names` is missing, or there are others
            than these and `optional`.
    """
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.get("schema_version") != version:
        found = fields.get("schema_version") if isinstance(fields, dict) else None
        raise ValueError(
            f"a {what} must have schema_version {version}, got {found}; write it again with "
            f"this version of burnish-packing"
        )
    del fields["schema_version"]
    missing = sorted(set(names) - fields.keys())
    unknown = sorted(fields.keys() - {*names, *optional})
    if missing or unknown:
        raise ValueError(
            f"a {what} must have the fields {sorted(names)}, got one with {missing} missing and "
            f"{unknown} unknown; write it again with this version of burnish-packing"
        )
    return fields


def check_fits(num_tokens: Sequence[int], limit: int, name: str) -> None:
    """ValueError unless every bin or micro-batch of a plan that was read holds `limit` at most."""
    if max(num_tokens, default=0) > limit:
        raise ValueError(
            f"everything that is put together must fit {name} = {limit}, got {max(num_tokens)} "
            f"tokens; plan again"
        )


def check_partition(indices: IntArray, num_sequences: int, name: str) -> None:
    """ValueError unless `indices` holds each of 0, ..., num_sequences - 1 exactly once."""
    if not np.array_equal(np.sort(indices), np.arange(num_sequences)):
        raise ValueError(
            f"{name} must hold each of {num_sequences} sequences once, got {len(indices)} indices "
            f"with some lost, doubled or out of range; plan again"
        )
