"""Top-k and top-p support sets, against the sampler's own way and by hand."""

import math
from typing import Any

import pytest
import torch
from burnish_losses import logprobs_from_hidden, logprobs_from_logits
from burnish_losses import support as support_module
from burnish_losses.support import support_threshold
from torch import Tensor

# Probabilities 0.5, 0.2, 0.15, 0.1, 0.05 of five tokens.
PROBS = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]], dtype=torch.float64)


def vllm_top_k_top_p(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """As vLLM's `apply_top_k_top_p_pytorch` describes itself: ascending sort, -inf outside."""
    values, ids = logits.sort(-1)
    if top_k is not None:
        edge = values[:, -min(top_k, values.shape[1])].unsqueeze(-1)
        values = values.masked_fill(values < edge, -torch.inf)
    if top_p is not None:
        dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[:, -1] = False
        values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, values)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        # Of the first three, 0.85 together: 0.5 is 0.59 of them, 0.7 is 0.82.
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
        ({"top_k": 3, "top_p": 0.83}, [0, 1, 2]),
        # At temperature 1/2 the weights are 0.25, 0.04, 0.0225, 0.01, 0.0025: 0.77 is the first.
        ({"top_p": 0.69, "temperature": 0.5}, [0]),
    ],
)
def test_renormalised_over_the_support_by_hand(options: dict[str, Any], kept: list[int]) -> None:
    weights = PROBS[0] ** (1 / options.get("temperature", 1.0))
    for label in kept:
        logprob = logprobs_from_logits(PROBS.log(), torch.tensor([label]), **options)
        assert logprob.item() == pytest.approx(float((weights[label] / weights[kept].sum()).log()))


def test_a_label_outside_the_support_counts_as_inside() -> None:
    # Top-1 keeps 0.5; the label adds its 0.1: log(0.1 / 0.6).
    logits = PROBS.log().requires_grad_()
    logprob = logprobs_from_logits(logits, torch.tensor([3]), top_k=1)
    assert logprob.item() == pytest.approx(math.log(1 / 6))
    logprob.sum().backward()
    expected = torch.tensor([[-5 / 6, 0, 0, 5 / 6, 0]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_all_labels_of_a_row_count_as_inside() -> None:
    # 0.5, 0.1 and 0.05 are left.
    logprobs = logprobs_from_logits(PROBS.log(), torch.tensor([[3, 4]]), top_k=1)
    expected = torch.tensor([[0.1 / 0.65, 0.05 / 0.65]], dtype=torch.float64).log()
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("num_candidates", [2, 1024])
@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.97}, {"top_k": 20, "top_p": 0.7}]
)
def test_equals_the_samplers_distribution(
    options: dict[str, Any], num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support_module, "NUCLEUS", num_candidates)
    logits = 2 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).double()
    sampled_from = vllm_top_k_top_p(logits, options.get("top_k"), options.get("top_p"))
    inside = sampled_from > -torch.inf
    assert not inside.all()
    labels = sampled_from.argmax(-1)
    expected = sampled_from.log_softmax(-1)
    logprobs, entropy = logprobs_from_logits(logits, labels, with_entropy=True, **options)
    torch.testing.assert_close(logprobs, expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    terms = torch.where(inside, expected.exp() * expected, 0.0)
    torch.testing.assert_close(entropy, -terms.sum(-1))
    threshold = support_threshold(logits, options.get("top_k"), options.get("top_p"))
    assert ((logits >= threshold) == inside).all()
    fused = logprobs_from_hidden(logits, torch.eye(50).double(), labels, **options, chunk_tokens=7)
    torch.testing.assert_close(fused, logprobs)


def test_tokens_tied_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).double()
    for options in ({"top_k": 2}, {"top_k": 2, "top_p": 0.99}):
        logprob = logprobs_from_logits(logits, torch.tensor([0]), **options)
        assert logprob.item() == pytest.approx(-math.log1p(3 / math.e))


def test_the_set_does_not_hang_on_rounding() -> None:
    """Logits made again may differ in the last bit; the set is that of the first time."""
    logits = torch.randn(30, 40, generator=torch.Generator().manual_seed(2))
    threshold = support_threshold(logits, 7, None)
    for factor in (1 - 2e-7, 1 + 2e-7):
        assert ((logits * factor >= threshold).sum(-1) == 7).all()


def test_excluded_tokens_stay_excluded() -> None:
    logits = torch.tensor([[1.0, 0.0, -torch.inf, -torch.inf]]).requires_grad_()
    for options in ({"top_k": 3}, {"top_p": 1.0}):
        logprob, entropy = logprobs_from_logits(
            logits, torch.tensor([0]), with_entropy=True, **options
        )
        assert logprob.item() == pytest.approx(-math.log1p(math.exp(-1)))
        (gradient,) = torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
        assert gradient.isfinite().all()
