"""Columns of a batch, met with errors that say what is missing, and selected before use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

# Names of the field: none of them is a misspelling of another.
KNOWN_COLUMNS = {
    "advantages",
    "chosen",
    "cu_seqlens",
    "desirable",
    "entropies",
    "labels",
    "logprobs",
    "margins",
    "nll_mask",
    "old_logprobs",
    "old_values",
    "pair_ids",
    "reference_logprobs",
    "reference_values",
    "returns",
    "rewards",
    "sampled_logprobs",
    "student_logprobs",
    "teacher_logprobs",
    "token_ids",
    "token_mask",
    "token_weights",
    "values",
}
CU_SEQLENS_CURE = "build cu_seqlens = cat([0, lengths.cumsum(0)]) from these very columns"


def check_tensors(shape: str, **values: object) -> None:
    """ValueError unless each is a tensor; `shape` is what it should have, for the message."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} must be a tensor {shape}, got {type(value).__name__}; {_cure(name, value)}"
            )


def check_tokens(**columns: Tensor) -> None:
    """ValueError unless all are tensors of the same shape [T]."""
    check_tensors("[T]", **columns)
    for values in columns.values():
        if values.dim() != 1:
            raise ValueError(
                f"token columns must be [T], got {tuple(values.shape)}; flatten the rows, "
                "cu_seqlens = arange(B + 1) * T, and leave padding untrained."
            )
    shapes = [tuple(values.shape) for values in columns.values()]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{' and '.join(columns)} must all be [T] of the same tokens, got {shapes}; "
            "to_tokens(values, cu_seqlens) gives values of sequences to their tokens."
        )


def check_mask(mask: Tensor, name: str = "token_mask") -> None:
    """ValueError unless the mask selects: numbers would weigh, or be counted by their sum."""
    check_tensors("of bool", **{name: mask})
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, got {mask.dtype}; convert with mask != 0.")


def check_integers(shape: str, **values: Tensor) -> None:
    """ValueError unless each is a tensor of integers."""
    check_tensors(shape, **values)
    for name, value in values.items():
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{name} must be integers, got {value.dtype}; convert them.")


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int | None = None) -> int:
    """The number of tokens, found with one wait for the device.

    ValueError unless they are integers [N+1] that start at 0, never fall, and end at num_tokens.
    """
    check_integers("[N+1]", cu_seqlens=cu_seqlens)
    if cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be [N+1], got {tuple(cu_seqlens.shape)}; {CU_SEQLENS_CURE}."
        )
    falls = (cu_seqlens.diff() < 0).any().view(1)
    *ends, falling = torch.cat([cu_seqlens[:1].long(), cu_seqlens[-1:].long(), falls]).tolist()
    wanted = "" if num_tokens is None else f", {num_tokens}"
    if not ends or ends[0] != 0 or num_tokens not in (None, ends[1]):
        raise ValueError(
            f"cu_seqlens must start at 0 and end at the number of tokens{wanted}, got "
            f"{ends} as its ends; {CU_SEQLENS_CURE}."
        )
    if falling:
        raise ValueError(
            f"cu_seqlens must never fall, got {cu_seqlens.tolist()}; {CU_SEQLENS_CURE}."
        )
    return int(ends[1])


def column(batch: Mapping[str, Tensor], name: str, like: Tensor | None = None) -> Tensor:
    """The column of that name, of the shape of `like` if given; ValueError otherwise."""
    if name not in batch:
        raise ValueError(f"The batch must have the column {name}, got {sorted(batch)}; add it.")
    values = batch[name]
    check_tensors("aligned with the others", **{name: values})
    if like is not None and values.shape != like.shape:
        raise ValueError(
            f"Column {name} must have the shape {tuple(like.shape)} of what it is aligned with, "
            f"got {tuple(values.shape)}; {_alignment(batch, values)}."
        )
    return values


def trained_mask(batch: Mapping[str, Tensor], like: Tensor | None = None) -> Tensor:
    """The column token_mask [T], bool and aligned with `like`; ValueError otherwise."""
    if like is not None:
        check_tokens(values=like)
    mask = column(batch, "token_mask", like)
    check_mask(mask)
    check_tokens(token_mask=mask)
    return mask


def widened(values: Tensor) -> Tensor:
    """In float32 or wider: a sum of ones stops at 256 in bfloat16 and at 2048 in float16."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def select(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *required: str,
    optional: Iterable[str] = (),
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What every loss over tokens starts from; a NaN at an untrained token ends here.

    Args:
        logprobs: [T], or other values of tokens that carry gradients.
        batch: columns, with token_mask.
        required, optional: names of further columns [T].

    Returns:
        token_mask [T]; logprobs [T], 0 where not trained, in float32 if their dtype is narrower;
        the named columns that are there, in the same dtype and 0 where not trained. Of them only
        entropies keep their gradient: a forgotten no_grad must not train on what is given.

    Raises:
        ValueError: a required column is missing, an optional one is misspelt, one is no tensor or
            of another shape, the mask is not bool.
    """
    check_tensors("[T]", logprobs=logprobs)
    mask = trained_mask(batch, like=logprobs)
    optional = [name for name in optional if name not in required]
    check_spelling(batch, optional)
    selected = widened(torch.where(mask, logprobs, 0.0))
    columns: dict[str, Tensor] = {}
    for name in [*required, *(name for name in optional if name in batch)]:
        values = column(batch, name, like=logprobs)
        values = values if name == "entropies" else values.detach()
        columns[name] = torch.where(mask, values, 0.0).to(selected.dtype)
    return mask, selected, columns


def check_spelling(batch: Mapping[str, Tensor], optional: Iterable[str]) -> None:
    """ValueError if an optional column seems to be there under a slightly other name.

    It would be left out in silence: a missing one that is required is an error of its own.
    """
    strange = {_spelt_out(name): name for name in batch if name not in KNOWN_COLUMNS}
    for name in optional:
        near = [] if name in batch else get_close_matches(name, strange, n=1, cutoff=0.9)
        if near:
            raise ValueError(
                f"The optional column {name} must be named so, got {strange[near[0]]!r}, which "
                "nothing reads; rename it, or leave it out of the batch."
            )


def _spelt_out(name: str) -> str:
    """ref_per_token_logps and ref_log_prob, as others have them, as reference_logprobs."""
    name = re.sub("^ref_", "reference_", name.lower().replace("_per_token", ""))
    return re.sub("log_?p(rob)?s?$", "logprobs", name)


def _cure(name: str, value: object) -> str:
    if isinstance(value, torch.nn.Module):
        return "pass its weight, such as linear.weight, and its bias as bias."
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, list | tuple) and items and isinstance(items[0], str):
        return (
            f"number the strings: index = {{x: i for i, x in enumerate(dict.fromkeys({name}))}}; "
            f"torch.tensor([index[x] for x in {name}])."
        )
    return f"torch.tensor({name}) makes one."


def _alignment(batch: Mapping[str, Tensor], values: Tensor) -> str:
    cu_seqlens = batch.get("cu_seqlens")
    if isinstance(cu_seqlens, Tensor) and values.shape == (len(cu_seqlens) - 1,):
        return (
            "it seems to be of sequences, where tokens are needed: to_tokens(values, cu_seqlens), "
            "which is values.repeat_interleave(cu_seqlens.diff())"
        )
    return (
        "index t is about token t in every token column, index n about sequence n in the others, "
        "and to_tokens(values, cu_seqlens) makes the first of the second"
    )
