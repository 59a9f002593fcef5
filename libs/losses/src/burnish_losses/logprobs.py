"""Log-probs of given tokens, from logits or straight from hidden states.

Both functions return the log-probs of the *processed* distribution, which is what a sampler with
the same settings draws from: with the same weights and settings in engine and trainer, the
importance ratio is 1. From logits to distribution, in the order vLLM's sampler has:

1. `softcap`: c tanh(logits / c), as Gemma 2's own head does; None for a model without.
2. `temperature`: divides.
3. `top_k`: the largest K are left, and what is tied with the last of them.
4. `top_p`: of these, a token is left if those above it have less than top_p together.

What is left is renormalised. The labels of a row always count as left, so that a token which
rounding, or another policy, has put outside its support set has a small log-prob and never -inf.

With a process group, each rank gives its own part of the vocabulary: `vocab_parallel`.

Shape legend: M tokens, K labels of each, D hidden size, V vocabulary (a rank's part of it).
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from burnish_losses._chunks import Scoring, rows_per_chunk
from burnish_losses._columns import check_mask, check_tensors
from burnish_losses._fused import FrozenHeadLogprobs, HiddenLogprobs, LogitsLogprobs
from burnish_losses._settings import check_count
from burnish_losses.support import check_support
from burnish_losses.vocab_parallel import Shard, shard_of


@overload
def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    with_entropy: Literal[False] = ...,
    group: ProcessGroup | None = ...,
    chunk_tokens: int | None = ...,
) -> Tensor: ...


@overload
def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    with_entropy: Literal[True],
    group: ProcessGroup | None = ...,
    chunk_tokens: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    with_entropy: bool = False,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Natural log of the probability of each label.

    Row t of the logits must be the model's output that predicts labels[t]: nothing is shifted
    here. A causal model predicts token t at position t-1, so that for log-probs aligned to tokens
    the logits of a pack go in as `logits.roll(1, 0)` with labels = token_ids, and the first token
    of every sequence, whose row is then another sequence's, stays out of the mask.

    Args:
        logits: [..., V], floating point. `-inf` excludes a token; a label's own must not be.
        labels: [...] or [..., K], int64 in [0, V) of the whole vocabulary.
        mask: [...] bool; where it is False the result is 0, and what the logits or the label are
            does not matter. A NaN row that is not masked spreads to no other row.
        temperature: > 0; the logits are divided by it.
        softcap, top_k, top_p: see the module; None for none.
        with_entropy: also return the entropy [...] of each distribution, in nats.
        group: of the ranks that hold the other parts of the vocabulary.
        chunk_tokens: rows worked on at once; by default as many as fit 512 MiB.

    Returns:
        [...] or [..., K], float32 (float64 for float64 logits); with entropy, both as a pair. Both
        are differentiable, once.

    Raises:
        ValueError: shapes that do not match, settings out of range; on a CPU or with a group also
            labels outside the vocabulary, which on a GPU fail an assertion of the device.
    """
    check_settings(temperature, softcap, top_k, top_p, chunk_tokens)
    check_tensors("[..., V]", logits=logits)
    check_labels(labels)
    tokens = logits.shape[:-1]
    if labels.shape != tokens and labels.shape[:-1] != tokens:
        raise ValueError(
            f"logits must be [..., V] with labels [...] or [..., K], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}; select the scored positions of both alike."
        )
    flat = logits.reshape(tokens.numel(), logits.shape[-1])
    flat_labels = labels.reshape(len(flat), labels.shape[-1] if labels.dim() > len(tokens) else 1)
    positions = _positions(mask, tokens, flat)
    shard = shard_of(flat.shape[1], group, flat.device)
    _check_labels(flat_labels, positions, shard, group)
    scoring = _scoring(temperature, softcap, top_k, top_p, group, shard)
    rows = rows_per_chunk(chunk_tokens, shard.largest, flat)
    logprobs, entropy = LogitsLogprobs.apply(
        flat, flat_labels, positions, scoring, rows, with_entropy
    )
    logprobs = logprobs.view(labels.shape)
    return (logprobs, entropy.view(tokens)) if with_entropy else logprobs


@overload
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    with_entropy: Literal[False] = ...,
    group: ProcessGroup | None = ...,
    chunk_tokens: int | None = ...,
) -> Tensor: ...


@overload
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    temperature: float = ...,
    softcap: float | None = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    with_entropy: Literal[True],
    group: ProcessGroup | None = ...,
    chunk_tokens: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    with_entropy: bool = False,
    group: ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`logprobs_from_logits(hidden @ weight.T + bias, labels)` without ever holding [M, V].

    Row t of hidden is the state that predicts labels[t], as in `logprobs_from_logits`: of a causal
    model over a pack, `hidden.roll(1, 0)` with labels = token_ids and no first token in the mask.

    The logits are made `chunk_tokens` rows at a time, in the inputs' dtype as a model's own head
    makes them, and again in the backward pass. A token outside the mask costs nothing, one whose
    results receive no gradient costs nothing in the backward pass, and a NaN in its hidden state
    does not spread.

    Where neither weight nor bias is trained, and one label a token is all that is asked, the
    forward pass makes the gradient's direction as well and the backward pass is nearly free. Tokens
    that will get no gradient should then be left out by the mask.

    Args:
        hidden: [M, D], floating point. M may be 0; the result is then still part of the graph.
        weight: [V, D], the head's weight, same dtype; with a group, this rank's rows.
        labels: [M] or [M, K], int64 in [0, V) of the whole vocabulary.
        bias: [V] or None, same dtype; with a group, this rank's part.
        mask: [M] bool; where it is False the result is 0, whatever hidden and labels are.
        temperature: > 0; the logits are divided by it.
        softcap, top_k, top_p: see the module; None for none.
        with_entropy: also return the entropy [M] of each token's distribution, in nats.
        group: of the ranks that hold the other parts of the vocabulary.
        chunk_tokens: rows of logits held at once; by default as many as fit 512 MiB. Softcap and
            the entropy hold them twice.

    Returns:
        log-probs [M] or [M, K], float32 (float64 for float64 inputs); with entropy, both as a pair.
        Both are differentiable, once.

    Raises:
        ValueError: shapes or dtypes that do not match, settings out of range; on a CPU or with a
            group also labels outside the vocabulary.
    """
    check_settings(temperature, softcap, top_k, top_p, chunk_tokens)
    check_head(hidden, weight, bias)
    check_labels(labels)
    if labels.shape[:1] != hidden.shape[:1] or labels.dim() > 2:
        raise ValueError(
            f"hidden [M, D], weight [V, D] and labels [M] or [M, K] must agree, got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}."
        )
    columns = labels.unsqueeze(-1) if labels.dim() == 1 else labels
    positions = _positions(mask, labels.shape[:1], hidden)
    shard = shard_of(len(weight), group, weight.device)
    _check_labels(columns, positions, shard, group)
    scoring = _scoring(temperature, softcap, top_k, top_p, group, shard)
    chunk = rows_per_chunk(chunk_tokens, shard.largest, weight)
    inputs = hidden, weight, bias, columns, positions, scoring, chunk
    head_is_frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    asks_for_one = columns.shape[1] == 1 and not with_entropy and softcap is None
    if torch.is_grad_enabled() and hidden.requires_grad and head_is_frozen and asks_for_one:
        of_frozen: Tensor = FrozenHeadLogprobs.apply(*inputs)
        return of_frozen.view(labels.shape)
    logprobs, entropy = HiddenLogprobs.apply(*inputs, with_entropy)
    logprobs = logprobs.view(labels.shape)
    return (logprobs, entropy) if with_entropy else logprobs


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """ValueError unless the head fits the hidden states."""
    check_tensors("[M, D]", hidden=hidden)
    check_tensors("[V, D]", weight=weight)
    if bias is not None:
        check_tensors("[V]", bias=bias)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dim() != 2:
            raise ValueError(
                f"{name} must have 2 dimensions, got {tuple(tensor.shape)}; flatten it."
            )
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [M, D] and weight [V, D] must agree in D, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = [{len(weight)}], got {tuple(bias.shape)}.")
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        raise ValueError(f"hidden, weight and bias must share a dtype, got {dtypes}; cast them.")


def check_labels(labels: Tensor) -> None:
    """ValueError unless they are token ids; see `_check_labels` for their range."""
    check_tensors("[M] or [M, K]", labels=labels)
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}; convert with labels.long().")


def _positions(mask: Tensor | None, shape: Any, like: Tensor) -> Tensor:
    """The rows to score, int64 [M]."""
    if mask is None:
        return torch.arange(len(like), device=like.device)
    check_mask(mask, "mask")
    if mask.shape != shape:
        raise ValueError(f"mask must be {tuple(shape)} as the tokens, got {tuple(mask.shape)}.")
    return mask.reshape(-1).nonzero().squeeze(-1)


def _scoring(
    temperature: float,
    softcap: float | None,
    top_k: int | None,
    top_p: float | None,
    group: ProcessGroup | None,
    shard: Shard,
) -> Scoring:
    """A top-k of the whole vocabulary and a top-p of 1 are none, as in vLLM's sampler."""
    top_k = None if top_k is not None and top_k >= shard.total else top_k
    top_p = None if top_p == 1 else top_p
    return Scoring(temperature, softcap, top_k, top_p, group, shard.start)


def _check_labels(
    labels: Tensor, positions: Tensor, shard: Shard, group: ProcessGroup | None
) -> None:
    """ValueError for one outside the vocabulary: a rank alone cannot tell one that none holds.

    Without a group a GPU tells it by itself, and is not waited for.
    """
    if group is None and labels.device.type != "cpu":
        return
    scored = labels[positions]
    if scored.numel() and not 0 <= int(scored.min()) <= int(scored.max()) < shard.total:
        raise ValueError(
            f"labels must be in [0, {shard.total}), the whole vocabulary, got "
            f"{int(scored.min())} to {int(scored.max())}; mask what is not scored, such as by "
            "mask=labels != -100."
        )


def check_settings(
    temperature: float,
    softcap: float | None,
    top_k: int | None,
    top_p: float | None,
    chunk_tokens: int | None,
) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature must be positive and finite, got {temperature}; "
            "for greedy completions score at temperature 1.0."
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}; None for none.")
    check_support(top_k, top_p)
    if chunk_tokens is not None:
        check_count(chunk_tokens=chunk_tokens)
