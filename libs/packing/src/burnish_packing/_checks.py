"""What a caller holds (list, tuple, array, CPU tensor, JSON) becomes checked int64 arrays."""

import json
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

# Of every count, and of all tokens together: what is computed from them stays within int64, and
# float64, in which costs are balanced, holds each such number exactly.
MAX_TOKENS = 2**53
_MAX_INT64 = 2**63 - 1
_MAX_SHOWN = 80  # characters of a value in an error


def shown(value: object) -> str:
    """A value as an error names it: its `repr`, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = "an integer of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def read_only(array: IntArray) -> IntArray:
    """The same values, as a view that nobody can make writable."""
    owner = array if array.flags.owndata else array.copy()
    owner.flags.writeable = False
    return owner.view()


def as_integers(values: ArrayLike, name: str) -> IntArray:
    """A new read-only int64 array [N]; ValueError when `values` is not 1-D or not of integers."""
    array = _as_array(values, name)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be one-dimensional, got shape {array.shape}; pass a list of integers"
        )
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got dtype {array.dtype}; convert them first")
    if array.size and array.dtype.kind == "u":
        _check_int64(array.tolist() if int(array.max()) > _MAX_INT64 else [], name)
    return read_only(array.astype(np.int64))


def as_lengths(lengths: ArrayLike) -> IntArray:
    """Sequence lengths in tokens, int64 [N].

    Raises:
        ValueError: naming the first negative one, or they sum to more than MAX_TOKENS.
    """
    array = as_integers(lengths, "lengths")
    negative = np.flatnonzero(array < 0)
    if negative.size:
        i = int(negative[0])
        raise ValueError(f"lengths must be >= 0, got lengths[{i}] = {array[i]}; drop that sequence")
    check_total(array, "lengths")
    return array


def check_total(num_tokens: IntArray, name: str) -> None:
    """ValueError when tokens [N] >= 0 sum to more than MAX_TOKENS."""
    if int(num_tokens.max(initial=0)) * len(num_tokens) > MAX_TOKENS:
        total = sum(num_tokens.tolist())
        if total > MAX_TOKENS:
            raise ValueError(
                f"{name} must sum to at most {MAX_TOKENS} (2**53) tokens, got {total}; correct "
                f"them, or take fewer sequences at a time"
            )


def check_positive(value: int, name: str) -> int:
    """The same as an int; ValueError unless it is an integer from 1 to MAX_TOKENS."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(
            f"{name} must be an integer >= 1, got {shown(value)}; pass a positive integer"
        )
    if value > MAX_TOKENS:
        raise ValueError(
            f"{name} must be at most {MAX_TOKENS} (2**53), got {shown(value)}; pass a smaller one"
        )
    return int(value)


def _as_array(values: Any, name: str) -> NDArray:
    """The array of `values`; ValueError for what numpy would read as something else than it is."""
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(
            f"{name} must be without a mask, got a masked array; pass its compressed(), which "
            f"leaves out what is masked"
        )
    has_array = hasattr(values, "__array__")
    is_list = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    is_list = is_list and not has_array and not isinstance(values, Mapping | str | bytes)
    if not has_array and not is_list and not isinstance(values, int | float | complex):
        what = "pass one integer for each sequence"
        if isinstance(values, Mapping):
            what = "pass list(...) of its values"
        elif isinstance(values, Iterable) and not isinstance(values, str | bytes):
            what = "pass list(...) of it"
        raise ValueError(
            f"{name} must be a list or an array of integers, got {type(values).__name__}; {what}"
        )
    if is_list:
        _check_items(values, name)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # each library of tensors has its own
        about = [str(getattr(values, a)) for a in ("dtype", "device") if hasattr(values, a)]
        raise ValueError(
            f"{name} must be integers that numpy can read, got "
            f"{', '.join([type(values).__name__, *about])}; pass integers on the CPU"
        ) from error
    if array.dtype == object and array.ndim == 1:
        _check_items(array.tolist(), name)
    return array


def _check_items(values: Sequence[Any], name: str) -> None:
    """ValueError naming the first item of a list that is no integer, or too large a one."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        if values and (max(values) > _MAX_INT64 or min(values) < -_MAX_INT64):
            _check_int64(values, name)
        return
    for i, value in enumerate(values):
        if isinstance(value, str | bytes):
            continue
        if isinstance(value, Sized) and getattr(value, "ndim", None) != 0:
            wanted = "numbers of tokens" if name == "lengths" else "integers"
            what = "[len(row) for row in rows]" if name == "lengths" else "one integer for each"
            raise ValueError(f"{name} must be {wanted}, got sequences; pass {what}")
        if value is None or isinstance(value, bool | np.bool_ | Mapping):
            raise ValueError(
                f"{name} must be integers, got {name}[{i}] = {shown(value)}; convert them first"
            )


def _check_int64(values: Sequence[int], name: str) -> None:
    """ValueError naming the first integer that int64 does not hold."""
    for i, value in enumerate(values):
        if not -_MAX_INT64 <= value <= _MAX_INT64:
            raise ValueError(
                f"{name} must be integers of 64 bits with a sign, got {name}[{i}] = "
                f"{shown(value)}; pass smaller ones"
            )


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
        ValueError: it is not JSON, schema_version is not `version`, one of `names` is missing, or
            there are others than these and `optional`.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"a {what} must be read from JSON, got {error}; pass what to_json wrote"
        ) from error
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


def check_fits(num_tokens: Sequence[int], limit: int, name: str, remedy: str) -> None:
    """ValueError unless every bin or micro-batch that was read holds `limit` at most."""
    if max(num_tokens, default=0) > limit:
        raise ValueError(
            f"everything that is put together must fit {name} = {limit}, got {max(num_tokens)} "
            f"tokens; {remedy}"
        )


def check_partition(indices: IntArray, num_sequences: int, name: str, remedy: str) -> None:
    """ValueError unless `indices` holds each of 0, ..., num_sequences - 1 exactly once."""
    if len(indices) != num_sequences or not np.array_equal(
        np.sort(indices), np.arange(num_sequences)
    ):
        raise ValueError(
            f"{name} must hold each of {num_sequences} sequences once, got {len(indices)} indices "
            f"with some lost, doubled or out of range; {remedy}"
        )


def check_count(value: Any, low: int, high: int, name: str, remedy: str) -> int:
    """The same; ValueError unless it is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(
            f"{name} must be an integer from {low} to {high}, got {shown(value)}; {remedy}"
        )
    return value


def split_lists(value: Any, name: str, remedy: str) -> tuple[IntArray, list[int]]:
    """A list of lists of integers that was read, as one array and the length of each list."""
    if not isinstance(value, list) or not all(isinstance(part, list) for part in value):
        raise ValueError(f"{name} must be a list of lists, got {shown(value)}; {remedy}")
    return as_integers([i for part in value for i in part], name), [len(part) for part in value]
