"""Divergences from hidden states: the numbers of those from logits, without their memory."""

import math
from typing import Any

import pytest
import torch
from burnish_losses import (
    divergence_from_hidden,
    divergence_from_logits,
    forward_kl,
    jensen_shannon,
    reverse_kl,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MASK = torch.tensor([True, False, True, True, True, False, True])


def models(num_tokens: int = 7, vocabulary: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and head of a student of width 4 and of a teacher of width 6."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, 4), (vocabulary, 4), (num_tokens, 6), (vocabulary, 6))
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), tensors[2], tensors[3]


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl, jensen_shannon(0.3)])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
def test_equals_that_from_logits(divergence: Any, chunk_tokens: int) -> None:
    hidden, head, teacher_hidden, teacher_head = models()
    settings = {"divergence": divergence, "temperature": 1.7}
    values = divergence_from_hidden(
        hidden, head, teacher_hidden, teacher_head, MASK, chunk_tokens=chunk_tokens, **settings
    )
    plain = divergence_from_logits(
        hidden @ head.T, teacher_hidden @ teacher_head.T, MASK, **settings
    )
    torch.testing.assert_close(values, plain)
    weights = torch.arange(7.0, dtype=torch.float64)  # one token has no gradient
    gradients = torch.autograd.grad((weights * values).sum(), (hidden, head))
    expected = torch.autograd.grad((weights * plain).sum(), (hidden, head))
    torch.testing.assert_close(gradients, expected)


def test_gradcheck() -> None:
    hidden, head, teacher_hidden, teacher_head = models()

    def values(hidden: Tensor, head: Tensor) -> Tensor:
        return divergence_from_hidden(
            hidden, head, teacher_hidden, teacher_head, MASK, chunk_tokens=2
        )

    assert torch.autograd.gradcheck(values, (hidden, head))


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, head, teacher_hidden, teacher_head = models()
    teacher_head.requires_grad_()
    head = head.detach()
    divergence_from_hidden(hidden, head, teacher_hidden, teacher_head, MASK).sum().backward()
    assert (hidden.grad[MASK] != 0).any()
    assert (hidden.grad[~MASK] == 0).all()
    assert head.grad is None
    assert teacher_head.grad is None


def test_masked_nan_reaches_nothing() -> None:
    hidden, head, teacher_hidden, teacher_head = models()
    inputs = (hidden, head, teacher_hidden, teacher_head)
    expected = torch.autograd.grad(divergence_from_hidden(*inputs, MASK).sum(), (hidden, head))
    with torch.no_grad():
        hidden[1], teacher_hidden[5] = math.nan, math.nan
    values = divergence_from_hidden(*inputs, MASK)
    assert values.isfinite().all()
    torch.testing.assert_close(torch.autograd.grad(values.sum(), (hidden, head)), expected)


def test_a_token_without_a_gradient_costs_nothing_in_the_backward_pass() -> None:
    rows = []

    def counting(student: Tensor, teacher: Tensor) -> Tensor:
        rows.append(len(student))
        return forward_kl(student, teacher)

    values = divergence_from_hidden(*models(), MASK, divergence=counting, chunk_tokens=2)
    assert rows == [2, 2, 1]  # five of the seven are trained
    rows.clear()
    (values[0] + values[6]).backward()
    assert rows == [2]


def test_bfloat16_heads_give_float32() -> None:
    hidden, head, teacher_hidden, teacher_head = (t.detach().bfloat16() for t in models())
    hidden.requires_grad_()
    values = divergence_from_hidden(
        hidden, head, teacher_hidden.float(), teacher_head.float(), MASK
    )
    assert values.dtype == torch.float32
    values.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation makes."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


def test_tokens_times_vocabulary_is_never_held() -> None:
    inputs = models(num_tokens=64, vocabulary=50)
    mask = torch.ones(64).bool()
    with LargestTensor() as chunked:
        divergence_from_hidden(*inputs, mask, chunk_tokens=8).sum().backward()
    assert chunked.num_elements == 8 * 50
    with LargestTensor() as plain:
        logits = inputs[0] @ inputs[1].T, inputs[2] @ inputs[3].T
        divergence_from_logits(*logits, mask).sum().backward()
    assert plain.num_elements == 64 * 50


def test_shapes_are_checked() -> None:
    hidden, head, teacher_hidden, teacher_head = models()
    with pytest.raises(ValueError, match="cut padding off the larger head"):
        divergence_from_hidden(hidden, head, teacher_hidden, teacher_head[:10], MASK)
    with pytest.raises(ValueError, match="heads"):
        divergence_from_hidden(hidden, head, teacher_hidden[:, :5], teacher_head, MASK)
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        divergence_from_hidden(hidden, head, teacher_hidden, teacher_head, MASK, chunk_tokens=0)
