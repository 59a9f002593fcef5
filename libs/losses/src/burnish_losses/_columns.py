"""Columns of a batch, met with errors that say what is missing, and selected before use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def column(batch: Mapping[str, Tensor], name: str, like: Tensor | None = None) -> Tensor:
    """The column of that name, of the shape of `like` if given; ValueError otherwise."""
    if name not in batch:
        raise ValueError(f"The batch must have the column {name}, got {sorted(batch)}; add it.")
    if like is not None and batch[name].shape != like.shape:
        raise ValueError(
            f"Column {name} must have the shape {tuple(like.shape)} of what it is aligned with, "
            f"got {tuple(batch[name].shape)}; index t is about token t in every token column, "
            "index n about sequence n in the others."
        )
    return batch[name]


def check_mask(mask: Tensor, name: str = "token_mask") -> None:
    """ValueError unless the mask selects: numbers would weigh, or be counted by their sum."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, got {mask.dtype}; convert with mask != 0.")


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
        token_mask [T]; logprobs [T], 0 where not trained; the named columns that are there, in the
        dtype of logprobs and 0 where not trained.

    Raises:
        ValueError: a required column is missing, one is of another shape, the mask is not bool.
    """
    mask = column(batch, "token_mask", like=logprobs)
    check_mask(mask)
    names = [*required, *(name for name in optional if name in batch and name not in required)]
    columns = {
        name: torch.where(mask, column(batch, name, like=logprobs), 0.0).to(logprobs.dtype)
        for name in names
    }
    return mask, torch.where(mask, logprobs, 0.0), columns
