"""The support of a sampler: the tokens that top-k and top-p leave to be drawn.

As vLLM's sampler applies them: temperature, then top-k, then top-p of what top-k left. A set is
described by a threshold on the logits of each row; tokens tied at the edge are all kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish_losses.vocab_parallel import all_columns, all_sum

NUCLEUS = 1024  # candidates that top-p alone looks at before it sorts the vocabulary
SORTED_ROWS = 16  # at once: a sort holds values and int64 indices
TIE_EPS = 16  # roundings, relative to the largest logit, that tied logits may be apart


def check_support(top_k: int | None, top_p: float | None) -> None:
    """ValueError unless each is None or a setting that keeps at least one token."""
    if top_k is not None and not (isinstance(top_k, int) and top_k >= 1):
        raise ValueError(
            f"top_k must be at least 1, and an integer, got {top_k}; None keeps all tokens."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}; None keeps all tokens.")


def support_threshold(
    logits: Tensor,
    top_k: int | None,
    top_p: float | None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The number that the logits of each row must reach to be in its support set, [m, 1].

    Logits that are made again, rounded another way, give the same set: the threshold lies half-way
    between the smallest logit inside and the largest outside, or, where the two are tied up to
    rounding, so far below both that all of them are inside.

    Args:
        logits: [m, V] over the temperature, or the rank's columns of them.
        top_k: >= 1, the number of largest logits kept, or None.
        top_p: in (0, 1] or None: of what top-k left, a token is kept if those above it have less
            than this probability together; the smallest set that reaches top_p.
        group: holds the other columns.
    """
    if top_k is not None:
        return _threshold(logits, top_k, top_p, group, top_k + 1)
    parts = [_threshold(rows, None, top_p, group, NUCLEUS) for rows in logits.split(SORTED_ROWS)]
    return torch.cat(parts)


def _threshold(
    logits: Tensor,
    top_k: int | None,
    top_p: float | None,
    group: ProcessGroup | None,
    num_candidates: int,
) -> Tensor:
    """Looks only at the largest logits; at all of them where top-p needs more than that."""
    candidates = _largest(logits, num_candidates, group)
    kept = candidates if top_k is None else candidates[:, :top_k]
    last = torch.full_like(kept[:, :1], kept.shape[1] - 1, dtype=torch.int64)
    if top_p is not None:
        highest, edge = kept[:, :1], -torch.inf if top_k is None else kept[:, -1:]
        # Of all that top-k left, with what is tied at its edge.
        weights = torch.where(logits >= edge, (logits - highest).exp(), 0.0)
        probs = (kept - highest).exp() / all_sum(weights.sum(-1, keepdim=True), group)
        above = probs.cumsum(-1) - probs
        above[:, 0] = 0.0  # the most probable token is always kept
        last = (above < top_p).sum(-1, keepdim=True) - 1
        if top_k is None and len(last) and int(last.max()) + 1 == num_candidates:
            return _threshold(logits, None, top_p, group, 2**62)
    inside = candidates.gather(-1, last)
    outside = torch.nn.functional.pad(candidates, (0, 1), value=-torch.inf).gather(-1, last + 1)
    scale = torch.maximum(candidates[:, :1].abs(), inside.abs())
    margin = TIE_EPS * torch.finfo(logits.dtype).eps * scale
    tied = inside - outside <= margin
    return torch.where(tied, inside - margin, (inside + outside) / 2)


def _largest(logits: Tensor, num_candidates: int, group: ProcessGroup | None) -> Tensor:
    """[m, num_candidates or all], the largest of all ranks, descending."""
    if num_candidates < logits.shape[1]:
        own = logits.topk(num_candidates).values
    else:
        own = logits.sort(-1, descending=True).values
    if group is None:
        return own
    every = all_columns(own, -torch.inf, group).sort(-1, descending=True).values
    return every[:, :num_candidates]
