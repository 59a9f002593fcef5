"""The autograd functions that run `_chunks` over logits and over hidden states, chunk by chunk.

Shape legend: N rows, of which M are scored, K labels each; D hidden size; V vocabulary or a rank's
part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish_losses._chunks import (
    Scores,
    Scoring,
    chunk_gradient_,
    chunk_scores,
    softmax_dtype,
    subtract_labels_,
)
from burnish_losses.vocab_parallel import all_sum

Buffers = tuple[Tensor, Tensor]


class LogitsLogprobs(torch.autograd.Function):
    """Log-probs [N, K] and entropy [N] of logits [N, V]: no second [N, V] but the gradient's."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        positions: Tensor,
        scoring: Scoring,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        results = new_results(labels, with_entropy, scoring, softmax_dtype(logits))
        for rows in chunks_of(positions, chunk_tokens):
            chunk = _wide_rows(logits, rows)
            store(results, rows, chunk_scores(chunk, labels[rows], scoring, with_entropy)[0])
        ctx.save_for_backward(logits, labels, positions, *results[1:])
        ctx.settings = scoring, chunk_tokens
        ctx.set_materialize_grads(False)
        return results.logprobs, None if results.entropy is None else results.entropy.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        logits, labels, positions, *saved = ctx.saved_tensors
        scoring, chunk_tokens = ctx.settings
        results = Scores(labels, *saved)
        grads = _grads(results, grad_logprobs, grad_entropy)
        grad_logits = torch.zeros_like(logits)
        for rows in chunks_of(_trained(positions, *grads), chunk_tokens):
            chunk = _wide_rows(logits, rows)
            grad_logits[rows] = gradient_of(chunk, labels, results, grads, rows, scoring).to(
                logits.dtype
            )
        return grad_logits, None, None, None, None, None


class HiddenLogprobs(torch.autograd.Function):
    """Log-probs [N, K] and entropy [N] of hidden [N, D]; makes the logits again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        positions: Tensor,
        scoring: Scoring,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        results = new_results(labels, with_entropy, scoring, softmax_dtype(hidden))
        buffers = head_buffers(min(chunk_tokens, len(positions)), weight)
        for rows in chunks_of(positions, chunk_tokens):
            logits = head_logits(hidden[rows], weight, bias, buffers)
            store(results, rows, chunk_scores(logits, labels[rows], scoring, with_entropy)[0])
        ctx.save_for_backward(hidden, weight, bias, labels, positions, *results[1:])
        ctx.settings = scoring, chunk_tokens
        ctx.set_materialize_grads(False)
        return results.logprobs, None if results.entropy is None else results.entropy.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, labels, positions, *saved = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scoring, chunk_tokens = ctx.settings
        results = Scores(labels, *saved)
        grads, dtype = _grads(results, grad_logprobs, grad_entropy), softmax_dtype(hidden)
        # Summed over ranks or chunks, so kept in the softmax's dtype: bfloat16 loses the small.
        hidden_dtype = hidden.dtype if scoring.group is None else dtype
        grad_hidden = torch.zeros_like(hidden, dtype=hidden_dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        trained = _trained(positions, *grads)
        buffers = head_buffers(min(chunk_tokens, len(trained)), weight)
        # A backward pass within autocast would round these products to its dtype.
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks_of(trained, chunk_tokens):
                states = hidden[rows]
                logits = head_logits(states, weight, bias, buffers)
                grad_logits = gradient_of(logits, labels, results, grads, rows, scoring)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                grad_logits = narrow(grad_logits, buffers)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad_logits @ weight).to(hidden_dtype)
                if grad_weight is not None:
                    _add_product(grad_weight, grad_logits.T, states)
        return (
            None if grad_hidden is None else all_sum(grad_hidden, scoring.group).to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *[None] * 5,
        )


class FrozenHeadLogprobs(torch.autograd.Function):
    """Log-probs [N, 1] of hidden [N, D] under a head that is not trained.

    The gradient of a row of hidden is then a vector times the gradient of its log-prob, and the
    vector, W[label] - p @ W, is made in the forward pass, where p is at hand: two products of the
    head's size in all instead of three.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        positions: Tensor,
        scoring: Scoring,
        chunk_tokens: int,
    ) -> Tensor:
        results = new_results(labels, False, scoring, softmax_dtype(hidden))
        buffers = head_buffers(min(chunk_tokens, len(positions)), weight)
        directions = hidden.new_empty(len(positions), hidden.shape[1])
        chunks = (chunks_of(all_rows, chunk_tokens) for all_rows in (positions, directions))
        for rows, direction in zip(*chunks, strict=True):
            logits = head_logits(hidden[rows], weight, bias, buffers)
            scores, weight_sum = chunk_scores(logits, labels[rows], scoring, False)
            store(results, rows, scores)
            probs = logits.div_(weight_sum)
            residual = narrow(subtract_labels_(probs, labels[rows], scoring), buffers)
            torch.mm(residual, weight, out=direction)
        ctx.save_for_backward(directions, positions)
        ctx.settings = scoring, hidden.shape
        return results.logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor) -> Any:
        directions, positions = ctx.saved_tensors
        scoring, shape = ctx.settings
        grad = grad_logprobs[positions]
        # A token without gradient may hold a NaN, which 0 times it would be too.
        of_rows = torch.where(grad != 0, directions * (-grad / scoring.temperature), 0.0)
        grad_hidden = of_rows.new_zeros(shape).index_copy_(0, positions, of_rows)
        return all_sum(grad_hidden, scoring.group).to(directions.dtype), *[None] * 6


def chunks_of(rows: Tensor, chunk_tokens: int) -> tuple[Tensor, ...]:
    """At most that many rows each, as even as can be: a small last product is a slow one."""
    return rows.tensor_split(-(-len(rows) // chunk_tokens)) if len(rows) else ()


def new_results(labels: Tensor, with_entropy: bool, scoring: Scoring, dtype: torch.dtype) -> Scores:
    """Zeros [N, K] and [N, 1] to `store` chunks in."""

    def column() -> Tensor:
        return torch.zeros(len(labels), 1, dtype=dtype, device=labels.device)

    return Scores(
        torch.zeros(labels.shape, dtype=dtype, device=labels.device),
        column(),
        column() if scoring.has_support else None,
        column() if with_entropy else None,
    )


def store(results: Scores, rows: Tensor, scores: Scores) -> None:
    for whole, part in zip(results, scores, strict=True):
        if whole is not None and part is not None:
            whole[rows] = part


def gradient_of(
    logits: Tensor,
    labels: Tensor,
    results: Scores,
    grads: tuple[Tensor, Tensor | None],
    rows: Tensor,
    scoring: Scoring,
) -> Tensor:
    """The logits' gradient of some rows, in their place, from what is held of all rows."""

    def at(whole: Tensor | None) -> Tensor | None:
        return None if whole is None else whole[rows]

    logprobs, log_sum = results.logprobs[rows], results.log_sum[rows]
    scores = Scores(logprobs, log_sum, at(results.threshold), at(results.entropy))
    grad_logprobs, grad_entropy = grads[0][rows], at(grads[1])
    return chunk_gradient_(logits, labels[rows], scores, grad_logprobs, grad_entropy, scoring)


def head_buffers(num_rows: int, weight: Tensor) -> Buffers:
    """Logits of a chunk in the head's dtype and in the softmax's: one tensor if they are one."""
    narrow = weight.new_empty(num_rows, len(weight))
    same = weight.dtype == softmax_dtype(weight)
    return narrow, narrow if same else narrow.new_empty(narrow.shape, dtype=torch.float32)


def head_logits(states: Tensor, weight: Tensor, bias: Tensor | None, buffers: Buffers) -> Tensor:
    """[m, V] in the softmax's dtype, rounded to the head's as a model's own logits are."""
    narrow, wide = (buffer[: len(states)] for buffer in buffers)
    if bias is None:
        torch.mm(states, weight.T, out=narrow)
    else:
        torch.addmm(bias, states, weight.T, out=narrow)
    return narrow if buffers[0] is buffers[1] else wide.copy_(narrow)


def narrow(values: Tensor, buffers: Buffers) -> Tensor:
    """In the head's dtype, for a product with it."""
    return values if buffers[0] is buffers[1] else buffers[0][: len(values)].copy_(values)


def _wide_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """A copy of some rows in the softmax's dtype."""
    return logits[rows].to(softmax_dtype(logits))


def _grads(
    results: Scores, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """[N, K] and [N, 1]; no gradient of log-probs is one of zeros."""
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(results.logprobs, dtype=results.log_sum.dtype)
    return grad_logprobs, None if grad_entropy is None else grad_entropy.unsqueeze(-1)


def _trained(positions: Tensor, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """The scored positions that receive a gradient: the others cost nothing, and spread no NaN."""
    trained = (grad_logprobs[positions] != 0).any(-1)
    if grad_entropy is not None:
        trained |= (grad_entropy[positions] != 0).any(-1)
    return positions[trained]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)  # no second [V, D]
    else:
        total += left @ right
