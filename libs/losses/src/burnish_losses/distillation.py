"""Distillation: how far a student's distribution over the vocabulary is from a teacher's.

A divergence is a function of two tensors of log-probs [..., V], the student's and the teacher's,
that gives [...]. It is applied to the tokens that are trained, from logits, from hidden states
without ever holding [T, V], or from the teacher's top K; `distillation_loss` makes the resulting
[T] a loss. No factor temperature^2 is applied: give it to the term if you want it.

Where the student itself draws the tokens, `on_policy_distillation_advantages` needs no more of the
teacher than the log-probs of the drawn tokens.

Shape legend: T packed tokens, M trained ones, D hidden size, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish_losses._chunks import softmax_dtype
from burnish_losses._columns import check_mask, check_tensors, check_tokens, select
from burnish_losses._settings import check_count, check_positive
from burnish_losses.aggregate import Aggregate, token_mean
from burnish_losses.logprobs import check_head
from burnish_losses.reduce import LossOutput, Metric

# (student's log-probs [..., V], teacher's [..., V]) -> [...], nats.
Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(teacher || student), the sum over tokens v of teacher(v) log(teacher(v) / student(v)).

    Hinton et al. 2015 up to the teacher's entropy: covers all that the teacher does. A token that
    only the student excludes (-inf) makes it infinite.
    """
    return _kl(teacher_logprobs, student_logprobs)


def reverse_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """KL(student || teacher), as in MiniLLM (Gu et al. 2024): avoids what the teacher does not do.

    A token that only the teacher excludes (-inf) makes it infinite.
    """
    return _kl(student_logprobs, teacher_logprobs)


def jensen_shannon(beta: float = 0.5) -> Divergence:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.

    The generalised divergence of GKD (Agarwal et al. 2024, eq. 1); never infinite, at most log 2.
    It tends to 0 itself as beta goes to 0 or 1. For beta = 0 this is `forward_kl`, the limit of
    JSD / beta, and for beta = 1 `reverse_kl`, that of JSD / (1 - beta): the value jumps there.

    Raises:
        ValueError: a beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}; 0 is forward KL and 1 reverse KL.")
    if beta in (0, 1):
        return reverse_kl if beta else forward_kl

    def divergence(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
        # logaddexp has no derivative where both are -inf. What stands there counts in neither KL.
        neither = (student_logprobs == -torch.inf) & (teacher_logprobs == -torch.inf)
        mixture = torch.logaddexp(
            torch.where(neither, 0.0, teacher_logprobs) + math.log(beta),
            student_logprobs + math.log1p(-beta),
        )
        to_teacher, to_student = _kl(teacher_logprobs, mixture), _kl(student_logprobs, mixture)
        return beta * to_teacher + (1 - beta) * to_student

    return divergence


def divergence_from_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    token_mask: Tensor,
    *,
    divergence: Divergence = forward_kl,
    temperature: float = 1.0,
) -> Tensor:
    """The divergence of softmax(student / temperature) and softmax(teacher / temperature).

    Args:
        student_logits, teacher_logits: [T, V], floating point; the second gets no gradient.
        token_mask: [T] bool. What the logits hold elsewhere, NaN included, does not matter.
        divergence: `forward_kl`, `reverse_kl`, `jensen_shannon(beta)`, or another.
        temperature: > 0.

    Returns:
        [T], float32 (float64 for float64 logits), 0 at untrained tokens.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool, a temperature not positive.
    """
    check_positive(temperature=temperature)
    _check_rows(student_logits, teacher_logits, token_mask)
    student = _logprobs(student_logits[token_mask], temperature)
    teacher = _logprobs(teacher_logits.detach()[token_mask], temperature)
    return _at_trained(divergence(student, teacher), token_mask)


def divergence_from_hidden(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    token_mask: Tensor,
    *,
    divergence: Divergence = forward_kl,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
) -> Tensor:
    """`divergence_from_logits` of `hidden @ weight.T` of both, without ever holding [T, V].

    The logits of both are made `chunk_tokens` trained tokens at a time, and again in the backward
    pass, where a token whose divergence receives no gradient costs nothing. Autocast is off for it:
    products are made in the dtype of what they are of.

    Args:
        student_hidden: [T, D], floating point.
        student_weight: [V, D], of the student's head, same dtype.
        teacher_hidden: [T, D'], of the teacher, which gets no gradient; D' may be another.
        teacher_weight: [V, D'], same dtype.
        token_mask, divergence, temperature: as in `divergence_from_logits`.
        chunk_tokens: rows of logits of each held at once.

    Returns:
        [T], float32 (float64 for a float64 student), 0 at untrained tokens.

    Raises:
        ValueError: shapes or dtypes that do not match, such as vocabularies padded differently; a
            mask that is not bool; a temperature or chunk that is not positive.
    """
    check_positive(temperature=temperature)
    check_count(chunk_tokens=chunk_tokens)
    check_tensors("[T, D]", student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    check_tensors("[V, D]", student_weight=student_weight, teacher_weight=teacher_weight)
    check_tokens(token_mask=token_mask)
    shapes = [tuple(t.shape) for t in (student_hidden, teacher_hidden)]
    heads = [tuple(t.shape) for t in (student_weight, teacher_weight)]
    wanted = [(len(token_mask), *head[1:]) for head in heads]
    if shapes != wanted or heads[0][0] != heads[1][0] or len(heads[0]) != 2:
        raise ValueError(
            f"hidden states must be [T, D] with heads [V, D] of one vocabulary and token_mask [T], "
            f"got {shapes}, {heads} and {tuple(token_mask.shape)}; cut padding off the larger head."
        )
    check_head(student_hidden, student_weight, None)
    check_head(teacher_hidden, teacher_weight, None)
    check_mask(token_mask)
    values: Tensor = _HiddenDivergence.apply(
        student_hidden[token_mask],
        student_weight,
        teacher_hidden.detach()[token_mask],
        teacher_weight.detach(),
        divergence,
        temperature,
        chunk_tokens,
    )
    return _at_trained(values, token_mask)


def renormalized(logprobs: Tensor) -> Tensor:
    """Log-probs [..., K] of some tokens as those of a distribution over these tokens alone.

    The divergence is then blind to how much either gives to all other tokens: it is neither an
    upper nor a lower bound of the full one, and 0 for a student that agrees only within the set.
    """
    return logprobs - logprobs.logsumexp(-1, keepdim=True)


def with_tail(logprobs: Tensor) -> Tensor:
    """Log-probs [..., K] of some tokens, and of all others as one: [..., K+1].

    The divergence is then at most the full one, less by what the two differ within the tail alone:
    for `forward_kl`, teacher(tail) KL(teacher | tail || student | tail). Its gradient makes the
    tail as likely as the teacher's and leaves the shares within it alone.
    """
    tokens = logprobs.logsumexp(-1, keepdim=True)
    # Rounding may take the sum to 1 or above, where nothing is left to take a logarithm of.
    tail = (-torch.expm1(tokens.clamp(max=-torch.finfo(logprobs.dtype).eps))).log()
    return torch.cat([logprobs, tail], -1)


def top_k_divergence(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    token_mask: Tensor,
    *,
    divergence: Divergence = forward_kl,
    support: Callable[[Tensor], Tensor] = with_tail,
) -> Tensor:
    """The divergence seen through the K tokens that were kept of the teacher's distribution.

    Args:
        student_logprobs: [T, K], full-softmax log-probs of the student at the teacher's top ids:
            `logprobs_from_hidden` with labels [T, K].
        teacher_logprobs: [T, K], the teacher's of the same ids at the same temperature.
        token_mask: [T] bool. What the log-probs hold elsewhere, NaN included, does not matter.
        divergence: as in `divergence_from_logits`.
        support: `with_tail` or `renormalized`, which say what each leaves out.

    Returns:
        [T], float32 (float64 for a float64 student), 0 at untrained tokens.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool.
    """
    _check_rows(student_logprobs, teacher_logprobs, token_mask)
    dtype = softmax_dtype(student_logprobs)
    student = support(student_logprobs[token_mask].to(dtype))
    teacher = support(teacher_logprobs.detach()[token_mask].to(dtype))
    return _at_trained(divergence(student, teacher), token_mask)


def on_policy_distillation_advantages(
    logprobs: Tensor, teacher_logprobs: Tensor, token_mask: Tensor
) -> Tensor:
    """-(logprob - teacher_logprob) of each drawn token: minus the k1 estimate of the reverse KL.

    K. Lu and Thinking Machines, "On-Policy Distillation" (2025). As the column `advantages` of a
    policy-gradient loss, its expected gradient at a token is that of `reverse_kl` there, with the
    tokens before it taken as given: no token is rewarded for what comes later (a discount of 0).
    For that, as in MiniLLM (Gu et al. 2024), sum it over the tokens ahead: `gae` with
    values of 0 and lam=1.0.

    Args:
        logprobs: [T], of the policy that drew the tokens, at the temperature they were drawn at.
        teacher_logprobs: [T], of the same tokens and, as a rule, at the same temperature.
        token_mask: [T] bool. What the log-probs hold elsewhere, NaN included, does not matter.

    Returns:
        [T], float64, detached, 0 at untrained tokens.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool.
    """
    check_tokens(logprobs=logprobs, teacher_logprobs=teacher_logprobs, token_mask=token_mask)
    check_mask(token_mask)
    advantages = teacher_logprobs.detach().double() - logprobs.detach().double()
    return torch.where(token_mask, advantages, 0.0)


def distillation_loss(
    divergences: Tensor, batch: Mapping[str, Tensor], *, aggregate: Aggregate = token_mean
) -> LossOutput:
    """A divergence at each token, as a loss.

    Args:
        divergences: [T], of this module or any other values that carry gradients.
        batch: columns: token_mask [T] bool, the one given to the divergence, and cu_seqlens.
        aggregate: which mean, of the module `aggregate`.

    Returns:
        One term in the unit of `aggregate`, and the metric loss/distillation.

    Raises:
        ValueError: a missing column, one of another shape, a mask that is not bool.
    """
    _, divergences, _ = select(divergences, batch)
    term = aggregate(divergences, batch)
    metric = Metric(term.weight * term.sum.detach(), term.unit, "mean")
    return LossOutput((term,), {"loss/distillation": metric})


class _HiddenDivergence(torch.autograd.Function):
    """[M]: keeps only its inputs; makes the logits again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        divergence: Divergence,
        temperature: float,
        chunk_tokens: int,
    ) -> Tensor:
        values = hidden.new_empty(len(hidden), dtype=softmax_dtype(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                teacher = _logprobs(teacher_hidden[rows] @ teacher_weight.T, temperature)
                student = _logprobs(hidden[rows] @ weight.T, temperature)
                values[rows] = divergence(student, teacher)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight)
        ctx.settings = divergence, temperature, chunk_tokens
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Any, ...]:
        hidden, weight, teacher_hidden, teacher_weight = ctx.saved_tensors
        divergence, temperature, chunk_tokens = ctx.settings
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Summed over chunks, so kept in the softmax's dtype: bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=grad_values.dtype) if needs_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in grad_values.nonzero().squeeze(-1).split(chunk_tokens):
                teacher = _logprobs(teacher_hidden[rows] @ teacher_weight.T, temperature)
                logits = (hidden[rows] @ weight.T).requires_grad_()
                with torch.enable_grad():
                    values = divergence(_logprobs(logits, temperature), teacher)
                (grad_logits,) = torch.autograd.grad(values, logits, grad_values[rows])
                if grad_hidden is not None:
                    grad_hidden[rows] = grad_logits @ weight
                if grad_weight is not None and grad_weight.dtype == weight.dtype:
                    grad_weight.addmm_(grad_logits.T, hidden[rows])  # no second [V, D]
                elif grad_weight is not None:
                    grad_weight += grad_logits.T @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """KL(p || q) of log-probs [..., V]; a token that p excludes (-inf) counts 0."""
    here = logprobs > -torch.inf
    difference = torch.where(here, logprobs - other_logprobs, 0.0)
    return (logprobs.exp() * difference).sum(-1)


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(softmax_dtype(logits))
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def _at_trained(values: Tensor, token_mask: Tensor) -> Tensor:
    """Values [M] of the trained tokens at their places in [T], 0 elsewhere."""
    zeros = values.new_zeros(token_mask.shape)
    return zeros.masked_scatter(token_mask, values)


def _check_rows(student: Tensor, teacher: Tensor, token_mask: Tensor) -> None:
    check_tensors("[T, V] or [T, K]", student=student, teacher=teacher)
    check_tokens(token_mask=token_mask)
    if student.shape != teacher.shape or student.shape[:-1] != token_mask.shape:
        raise ValueError(
            f"Student and teacher must have one shape [T, V] or [T, K] and token_mask [T], got "
            f"{tuple(student.shape)}, {tuple(teacher.shape)} and {tuple(token_mask.shape)}."
        )
    check_mask(token_mask)
