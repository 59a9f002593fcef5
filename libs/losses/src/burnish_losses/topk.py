"""The most probable tokens of each position: what a teacher hands over for distillation.

Shape legend: M tokens, D hidden size, V vocabulary (a rank's part of it), K kept tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish_losses._chunks import Scoring, rows_per_chunk, scale_, softmax_dtype
from burnish_losses._columns import check_tensors
from burnish_losses._fused import chunks_of, head_buffers, head_logits
from burnish_losses._settings import check_count
from burnish_losses.logprobs import check_head, check_settings
from burnish_losses.vocab_parallel import all_columns, all_max, all_sum, shard_of


@torch.no_grad()
def topk_logprobs_from_logits(
    logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and ids of the K most probable tokens, the most probable first; no gradient.

    Args:
        logits: [..., V], floating point.
        k: in [1, V] of the whole vocabulary.
        temperature, softcap, group, chunk_tokens: as in `logprobs_from_logits`. The log-probs are
            those of the full distribution, not renormalised over the K.

    Returns:
        [..., K] float32 (float64 for float64 logits), and [..., K] int64.

    Raises:
        ValueError: settings out of range, a k that is larger than the vocabulary.
    """
    check_tensors("[..., V]", logits=logits)
    flat = logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])
    scoring, num_rows = _settings(k, temperature, softcap, group, chunk_tokens, flat.T)
    dtype = softmax_dtype(logits)
    values, ids = _new(len(flat), k, dtype, logits.device)
    rows = torch.arange(len(flat), device=logits.device)
    for chunk in chunks_of(rows, num_rows):
        values[chunk], ids[chunk] = _chunk_topk(flat[chunk].to(dtype), k, scoring)
    return values.view(*logits.shape[:-1], k), ids.view(*logits.shape[:-1], k)


@torch.no_grad()
def topk_logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`topk_logprobs_from_logits(hidden @ weight.T + bias, k)` without ever holding [M, V].

    Args:
        hidden: [M, D], floating point.
        weight: [V, D], same dtype; with a group, this rank's rows.
        k: in [1, V] of the whole vocabulary.
        bias: [V] or None, same dtype.
        temperature, softcap, group, chunk_tokens: as in `logprobs_from_hidden`.

    Returns:
        [M, K] float32 (float64 for float64 inputs), and [M, K] int64.

    Raises:
        ValueError: shapes or dtypes that do not match, settings out of range, a k that is larger
            than the vocabulary.
    """
    check_head(hidden, weight, bias)
    scoring, num_rows = _settings(k, temperature, softcap, group, chunk_tokens, weight)
    values, ids = _new(len(hidden), k, softmax_dtype(hidden), hidden.device)
    buffers = head_buffers(min(num_rows, len(hidden)), weight)
    for rows in chunks_of(torch.arange(len(hidden), device=hidden.device), num_rows):
        logits = head_logits(hidden[rows], weight, bias, buffers)
        values[rows], ids[rows] = _chunk_topk(logits, k, scoring)
    return values, ids


def _chunk_topk(logits: Tensor, k: int, scoring: Scoring) -> tuple[Tensor, Tensor]:
    group = scoring.group
    scale_(logits, scoring)
    values, ids = logits.topk(min(k, logits.shape[1]))
    largest = all_max(values[:, :1].clone(), group)
    weights = logits.sub_(largest).exp_().sum(-1, keepdim=True)
    log_sum = largest + all_sum(weights, group).log()
    if group is not None:
        every = all_columns(values, -torch.inf, group)
        every_id = all_columns(ids + scoring.vocab_start, 0, group)
        values, chosen = every.topk(k)
        ids = every_id.gather(-1, chosen)
    return values - log_sum, ids


def _settings(
    k: int,
    temperature: float,
    softcap: float | None,
    group: ProcessGroup | None,
    chunk_tokens: int | None,
    rows: Tensor,
) -> tuple[Scoring, int]:
    """How to score, and how many tokens at once; `rows` [V, ...] are the rank's of the head."""
    check_count(k=k)
    check_settings(temperature, softcap, None, None, chunk_tokens)
    shard = shard_of(len(rows), group, rows.device)
    if k > shard.total:
        raise ValueError(f"k must be from 1 to the vocabulary's size {shard.total}, got {k}.")
    scoring = Scoring(temperature, softcap, None, None, group, shard.start)
    return scoring, rows_per_chunk(chunk_tokens, shard.largest, rows)


def _new(num_rows: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(num_rows, k, dtype=dtype, device=device)
    return values, torch.empty(num_rows, k, dtype=torch.int64, device=device)
