"""Log-probs of given tokens, from logits or straight from hidden states.

Both functions return the log-probs of the *processed* distribution softmax(logits / temperature),
which is what a sampler at that temperature draws from: with the same weights and temperature in
engine and trainer, the importance ratio is 1.

Shape legend: M scored tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def logprobs_from_logits(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Natural log of the probability of each label.

    Args:
        logits: [..., V], floating point. `-inf` excludes a token; a label's own logit must not be.
        labels: [...], int64 in [0, V).
        temperature: > 0; the logits are divided by it.

    Returns:
        [...], float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that do not match, or a temperature that is not positive.

    A NaN row of logits gives that row NaN gradients, even where the loss masks its log-prob:
    pass only the positions that are scored.
    """
    _check_temperature(temperature)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must be [..., V] with labels [...], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}; select the scored positions of both alike."
        )
    logits = logits.to(_softmax_dtype(logits))
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


@overload
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = ...,
    chunk_tokens: int = ...,
    bias: Tensor | None = ...,
    with_entropy: Literal[False] = ...,
) -> Tensor: ...


@overload
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = ...,
    chunk_tokens: int = ...,
    bias: Tensor | None = ...,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    bias: Tensor | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`logprobs_from_logits(hidden @ weight.T + bias, labels)` without ever holding [M, V].

    The logits are made `chunk_tokens` rows at a time, in the inputs' dtype as a model's own head
    makes them, and again in the backward pass. A token whose log-prob receives no gradient costs
    nothing there, and a NaN in its hidden state does not spread.

    Args:
        hidden: [M, D], floating point. M may be 0; the result is then still part of the graph.
        weight: [V, D], the head's weight, same dtype.
        labels: [M], int64 in [0, V).
        temperature: > 0; the logits are divided by it.
        chunk_tokens: rows of logits held at once.
        bias: [V] or None, same dtype.
        with_entropy: also return the entropy of each token's distribution, without gradient.

    Returns:
        log-probs [M], float32 (float64 for float64 inputs); with entropy, both as a pair.

    Raises:
        ValueError: shapes or dtypes that do not match, a temperature or chunk that is not positive.
    """
    _check_temperature(temperature)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}.")
    num_tokens, hidden_size = _matrix_shape("hidden", hidden)
    vocabulary_size, weight_size = _matrix_shape("weight", weight)
    if hidden_size != weight_size or labels.shape != (num_tokens,):
        raise ValueError(
            f"hidden [M, D], weight [V, D] and labels [M] must agree, got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}."
        )
    if bias is not None and bias.shape != (vocabulary_size,):
        raise ValueError(f"bias must be [V] = [{vocabulary_size}], got {tuple(bias.shape)}.")
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1:
        raise ValueError(f"hidden, weight and bias must share a dtype, got {dtypes}; cast them.")
    logprobs, entropy = _HiddenLogprobs.apply(
        hidden, weight, bias, labels, temperature, chunk_tokens, with_entropy
    )
    return (logprobs, entropy) if with_entropy else logprobs


class _HiddenLogprobs(torch.autograd.Function):
    """Keeps only its inputs; makes the logits again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = hidden.new_empty(labels.shape, dtype=_softmax_dtype(hidden))
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for start in range(0, len(labels), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            scores = _logits(hidden[rows], weight, bias, temperature).log_softmax(-1)
            logprobs[rows] = scores.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:
                entropy[rows] = _entropy(scores)
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = grad_logprobs.dtype
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Summed over chunks, so kept in the softmax's dtype: bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        trained = grad_logprobs.nonzero().squeeze(-1)
        for rows in trained.split(ctx.chunk_tokens):
            states, grad = hidden[rows], grad_logprobs[rows].unsqueeze(-1) / ctx.temperature
            # d log p(label) / d logits = (onehot(label) - p) / temperature, made in place.
            grad_logits = _logits(states, weight, bias, ctx.temperature).softmax(-1).mul_(-grad)
            grad_logits.scatter_add_(-1, labels[rows].unsqueeze(-1), grad)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, states)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[rows, V] over temperature, in the softmax's dtype."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_softmax_dtype(hidden))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _entropy(scores: Tensor) -> Tensor:
    """-sum p log p over the last axis of log-probs; an excluded token (-inf) counts 0."""
    probs = scores.exp()
    return -torch.where(probs > 0, probs * scores, 0.0).sum(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _matrix_shape(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {tuple(tensor.shape)}; flatten it.")
    return tensor.shape[0], tensor.shape[1]


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; "
            "for greedy completions score at temperature 1.0."
        )
