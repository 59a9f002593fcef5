"""Soft-cap, mask, several labels a token, differentiable entropy, frozen heads, compilation."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish_losses import (
    logprobs_from_hidden,
    logprobs_from_logits,
    topk_logprobs_from_hidden,
    topk_logprobs_from_logits,
)
from torch import Tensor

M, D, V = 7, 4, 11


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def labels_of(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(5))


def reference(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs [M, K] and entropy [M] by plain autograd."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(-1, labels), -(scores.exp() * scores).sum(-1)


def test_softcap_comes_before_the_temperature_by_hand() -> None:
    # Logits 2 tanh(1/2), 0 over temperature 1/2: difference 4 tanh(1/2).
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    expected = -math.log1p(math.exp(-4 * math.tanh(0.5)))
    for logprobs in (
        logprobs_from_logits(logits, torch.tensor([0]), softcap=2.0, temperature=0.5),
        logprobs_from_hidden(
            logits, torch.eye(2).double(), torch.tensor([0]), softcap=2.0, temperature=0.5
        ),
    ):
        assert logprobs.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("chunk_tokens", [1, 3, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_values_and_gradients_equal_the_plain_reference(
    chunk_tokens: int | None, softcap: float | None, num_labels: int
) -> None:
    settings = {"temperature": 0.7, "softcap": softcap}
    labels, upstream = labels_of(M, num_labels), randn(M, num_labels, seed=8)
    labels[0] = 2  # the same label several times
    results = []
    for fused in (True, False):
        inputs = [
            values.requires_grad_() for values in (randn(M, D), randn(V, D, seed=1), randn(V))
        ]
        hidden, weight, bias = inputs
        if fused:
            logprobs, entropy = logprobs_from_hidden(
                hidden,
                weight,
                labels,
                bias=bias,
                with_entropy=True,
                chunk_tokens=chunk_tokens,
                **settings,
            )
        else:
            logprobs, entropy = reference(hidden @ weight.T + bias, labels, **settings)
        ((upstream * logprobs).sum() + (upstream[:, 0] * entropy.square()).sum()).backward()
        results.append((logprobs, entropy, *(values.grad for values in inputs)))
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


def test_gradcheck_of_all_options_from_hidden_and_from_logits() -> None:
    labels, mask = labels_of(M, 2), torch.arange(M) != 3
    options: dict[str, Any] = {
        "temperature": 0.7,
        "softcap": 2.0,
        "top_k": 6,
        "top_p": 0.9,
        "mask": mask,
        "chunk_tokens": 3,
    }

    def of_hidden(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_from_hidden(hidden, weight, labels, bias=bias, with_entropy=True, **options)

    def of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_from_logits(logits, labels, with_entropy=True, **options)

    inputs = [values.requires_grad_() for values in (randn(M, D), randn(V, D, seed=1), randn(V))]
    assert torch.autograd.gradcheck(of_hidden, inputs)
    assert torch.autograd.gradcheck(of_logits, [randn(M, V, seed=2).requires_grad_()])


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8, "temperature": 1.7}])
def test_a_frozen_head_gives_the_gradient_of_a_trained_one(options: dict[str, Any]) -> None:
    labels, upstream = labels_of(M), randn(M)
    upstream[2] = 0
    gradients = []
    for trained in (True, False):
        hidden = randn(M, D, seed=3).requires_grad_()
        weight, bias = randn(V, D, seed=1).requires_grad_(trained), randn(V)
        logprobs = logprobs_from_hidden(
            hidden, weight, labels, bias=bias, chunk_tokens=3, **options
        )
        (upstream * logprobs).sum().backward()
        gradients.append(hidden.grad)
        assert (weight.grad is not None) == trained
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-14)
    assert (gradients[1][2] == 0).all()


def test_gradcheck_of_a_frozen_head() -> None:
    weight, labels, mask = randn(V, D, seed=1), labels_of(M), torch.arange(M) != 3
    assert torch.autograd.gradcheck(
        lambda hidden: logprobs_from_hidden(
            hidden, weight, labels, mask=mask, temperature=0.7, chunk_tokens=2
        ),
        randn(M, D).requires_grad_(),
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_rows_outside_the_mask_are_0_whatever_they_hold(frozen: bool) -> None:
    mask = torch.arange(M) % 2 == 0
    hidden, labels = randn(M, D), labels_of(M)
    clean = logprobs_from_hidden(hidden, randn(V, D, seed=1), labels)
    hidden[~mask], labels[~mask] = torch.nan, -100
    hidden.requires_grad_()
    weight = randn(V, D, seed=1).requires_grad_(not frozen)
    logprobs = logprobs_from_hidden(hidden, weight, labels, mask=mask, chunk_tokens=2)
    torch.testing.assert_close(logprobs, torch.where(mask, clean, 0.0))
    logprobs.sum().backward()  # with a gradient at the masked rows too
    assert (hidden.grad[~mask] == 0).all()
    assert (hidden.grad[mask] != 0).all()
    assert frozen or weight.grad.isfinite().all()


def test_nan_of_a_token_without_gradient_is_harmless_under_a_frozen_head() -> None:
    hidden = randn(M, D)
    hidden[2] = torch.nan
    hidden.requires_grad_()
    logprobs = logprobs_from_hidden(hidden, randn(V, D, seed=1), labels_of(M))
    assert logprobs[2].isnan()
    torch.where(torch.arange(M) == 2, 0.0, logprobs).sum().backward()
    assert (hidden.grad[2] == 0).all()
    assert (hidden.grad[3:] != 0).all()


@pytest.mark.parametrize("frozen", [True, False])
def test_all_masked_is_a_0_that_is_part_of_the_graph(frozen: bool) -> None:
    hidden = torch.full((M, D), torch.nan).requires_grad_()
    weight = torch.randn(V, D).requires_grad_(not frozen)
    mask = torch.zeros(M, dtype=torch.bool)
    logprobs = logprobs_from_hidden(hidden, weight, labels_of(M), mask=mask)
    logprobs.sum().backward()
    assert (logprobs == 0).all()
    assert (hidden.grad == 0).all()


def test_masked_rows_of_logits_are_0_and_other_nan_rows_without_gradient_harmless() -> None:
    logits, labels = randn(2, M, V), labels_of(2, M)
    mask = torch.ones(2, M, dtype=torch.bool)
    mask[1, 3], labels[1, 3] = False, -100
    logits[1, 3] = logits[0, 0] = torch.nan
    logits.requires_grad_()
    logprobs = logprobs_from_logits(logits, labels, mask=mask)
    assert logprobs[1, 3] == 0
    assert logprobs[0, 0].isnan()
    torch.where(logprobs.isnan(), 0.0, logprobs).sum().backward()
    assert (logits.grad[1, 3] == 0).all()
    assert (logits.grad[0, 0] == 0).all()
    assert (logits.grad[1, 2] != 0).all()


def test_a_mask_skips_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from burnish_losses import _fused

    rows = []
    head_logits = _fused.head_logits

    def counted(states: Tensor, *others: Any) -> Tensor:
        rows.append(len(states))
        return head_logits(states, *others)

    monkeypatch.setattr(_fused, "head_logits", counted)
    hidden, weight = randn(M, D).requires_grad_(), randn(V, D).requires_grad_()
    mask = torch.arange(M) < 3
    logprobs_from_hidden(hidden, weight, labels_of(M), mask=mask)[:2].sum().backward()
    assert rows == [3, 2]  # what the mask asks for, then what has a gradient


def test_no_tokens_work_with_every_option() -> None:
    hidden, weight = randn(0, D).requires_grad_(), randn(V, D).requires_grad_()
    options: dict[str, Any] = {"top_k": 3, "top_p": 0.5, "softcap": 3.0}
    logprobs, entropy = logprobs_from_hidden(
        hidden, weight, labels_of(0, 2), with_entropy=True, **options
    )
    assert logprobs.shape == (0, 2)
    (logprobs.sum() + entropy.sum()).backward()
    assert (weight.grad == 0).all()
    logits = randn(0, V).requires_grad_()
    logprobs_from_logits(logits, labels_of(0), **options).sum().backward()
    assert logits.grad.shape == (0, V)
    frozen = logprobs_from_hidden(hidden, weight.detach(), labels_of(0))
    frozen.sum().backward()
    assert topk_logprobs_from_hidden(hidden, weight, 3)[0].shape == (0, 3)


def test_bfloat16_is_summed_in_float32() -> None:
    """Half as far from float64 as its own rounding allows; a bfloat16 sum would be far off."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=generator).bfloat16()
    weight = torch.randn(V, 8, generator=generator).bfloat16()
    labels = torch.zeros(300, dtype=torch.int64)
    exact = weight.double().requires_grad_()
    logprobs_from_hidden(hidden.double(), exact, labels, chunk_tokens=1).sum().backward()
    weight.requires_grad_()
    logprobs = logprobs_from_hidden(hidden, weight, labels, chunk_tokens=1)
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    error = (weight.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < 0.004  # bfloat16's epsilon is 0.0078; 300 sums rounded to it err by 0.05


def test_topk_are_the_largest_of_the_full_distribution_in_order() -> None:
    hidden, weight, bias = randn(M, D), randn(V, D, seed=1), randn(V)
    scores = (2.0 * torch.tanh((hidden @ weight.T + bias) / 2.0) / 0.7).log_softmax(-1)
    expected = scores.topk(4)
    options: dict[str, Any] = {"temperature": 0.7, "softcap": 2.0, "chunk_tokens": 3}
    for logprobs, ids in (
        topk_logprobs_from_hidden(hidden, weight, 4, bias=bias, **options),
        topk_logprobs_from_logits(hidden @ weight.T + bias, 4, **options),
    ):
        torch.testing.assert_close(logprobs, expected.values)
        assert (ids == expected.indices).all()
        # What the student then is asked for: the same numbers.
        student = logprobs_from_hidden(hidden, weight, ids, bias=bias, **options)
        torch.testing.assert_close(student, logprobs)


def test_topk_needs_no_gradient_and_keeps_leading_dimensions() -> None:
    logits = randn(2, 3, V).requires_grad_()
    logprobs, ids = topk_logprobs_from_logits(logits, 2)
    assert logprobs.shape == ids.shape == (2, 3, 2)
    assert not logprobs.requires_grad
    with pytest.raises(ValueError, match="k must be from 1 to the vocabulary's size 11, got 12"):
        topk_logprobs_from_logits(logits, 12)
    with pytest.raises(ValueError, match="k must be at least 1, and an integer"):
        topk_logprobs_from_logits(logits, 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
        ({"softcap": math.nan}, "softcap must be positive and finite, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, and an integer, got 0"),
        ({"top_k": 2.5}, "top_k must be at least 1, and an integer, got 2.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": math.nan}, "top_p must be in"),
        ({"mask": torch.ones(M)}, "mask must be bool"),
        ({"mask": torch.ones(3).bool()}, r"mask must be \(7,\) as the tokens, got \(3,\)"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"chunk_tokens": 2.5}, "chunk_tokens must be at least 1, and an integer, got 2.5"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logprobs_from_hidden(randn(M, D), randn(V, D), labels_of(M), **change)
    with pytest.raises(ValueError, match=message):
        logprobs_from_logits(randn(M, V), labels_of(M), **change)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("frozen", [True, False])
def test_compiled_gives_the_same_numbers(frozen: bool) -> None:
    labels, mask = labels_of(M), torch.arange(M) != 3

    def loss(hidden: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        fused = logprobs_from_hidden(hidden * 2, weight, labels, mask=mask, chunk_tokens=3)
        plain, entropy = logprobs_from_logits(
            logits.exp(), labels, with_entropy=True, top_k=5, softcap=2.0
        )
        return (fused.sin() + plain * entropy).sum()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [
            values.requires_grad_() for values in (randn(M, D), randn(V, D, seed=1), randn(M, V))
        ]
        inputs[1].requires_grad_(not frozen)
        value = function(*inputs)
        value.backward()
        return [value.detach(), *(x.grad for x in inputs if x.grad is not None)]

    torch._dynamo.reset()
    torch.testing.assert_close(gradients(torch.compile(loss)), gradients(loss))
