"""Numbers of the log-probs where a plain way to compute them goes wrong."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from burnish_losses import (
    _fused,
    divergence_from_hidden,
    logprobs_from_hidden,
    logprobs_from_logits,
    topk_logprobs_from_logits,
)
from burnish_losses.support import support_threshold
from torch import Tensor

INF = math.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{"top_k": 21}, {"top_p": 0.5}, {"top_k": 30, "top_p": 0.6}])
def test_tied_tokens_stay_inside_when_fewer_rows_are_made_again(options: dict[str, Any]) -> None:
    """The logits' gradient sums to 0 over the support set; a token that left it would lack."""
    hidden, weight = randn(64, 256), randn(2000, 256, seed=1) / 4
    weight[1000:] = weight[:1000]
    bias, labels = torch.zeros(2000, requires_grad=True), torch.arange(64)
    logprobs = logprobs_from_hidden(hidden, weight, labels, bias=bias, **options)
    for row in range(64):
        (gradient,) = torch.autograd.grad(logprobs[row], bias, retain_graph=True)
        assert abs(float(gradient.sum())) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_set_of_tied_logits_does_not_hang_on_rounding(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0], [-1.0, -2.0, -2.0, -9.0, -INF]], dtype=dtype)
    eps, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(0)
    for top_k, top_p in ((2, None), (None, 0.6)):
        threshold = support_threshold(logits, top_k, top_p)
        inside = logits >= threshold
        assert inside.sum(-1).tolist() == [4, 3]
        for _ in range(8):
            noise = 2 * torch.rand(5, dtype=dtype, generator=generator) - 1
            rounded = logits * (1 + 2 * eps * noise)
            assert ((rounded >= threshold) == inside).all()
            # Tied up to rounding is tied, in the forward pass as well.
            assert ((rounded >= support_threshold(rounded, top_k, top_p)) == inside).all()


@pytest.mark.parametrize("options", [{"top_p": 1.0}, {"top_k": 50}, {"top_k": 9, "top_p": 1.0}])
def test_a_support_of_everything_is_none(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With top-p the last two tokens would be lost: those above them are 1 up to rounding.
    logits = torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -40.0, -41.0]])
    labels = torch.tensor([0])
    plain = logprobs_from_logits(logits, labels, with_entropy=True)
    logits.requires_grad_()
    monkeypatch.setattr(
        "burnish_losses._chunks.support_threshold", lambda *_: pytest.fail("looked for a support")
    )
    logprob, entropy = logprobs_from_logits(logits, labels, with_entropy=True, **options)
    assert (logprob, entropy) == plain
    logprob.sum().backward()
    assert (logits.grad != 0).all()


def test_softcap_leaves_what_is_excluded_excluded() -> None:
    logits = torch.tensor([[1.0, 0.0, -INF, 2.0]]).double().requires_grad_()
    labels = torch.tensor([0])
    result = logprobs_from_logits(logits, labels, softcap=1.5, with_entropy=True)
    finite = logits.detach()[:, [0, 1, 3]].requires_grad_()
    expected = logprobs_from_logits(finite, labels, softcap=1.5, with_entropy=True)
    torch.testing.assert_close(result, expected)
    (gradient,) = torch.autograd.grad(result[0].sum() + result[1].sum(), logits)
    (wanted,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), finite)
    torch.testing.assert_close(gradient[:, [0, 1, 3]], wanted)
    assert gradient[0, 2] == 0
    logprobs, ids = topk_logprobs_from_logits(logits, 4, softcap=1.5)
    assert logprobs[0, 3] == -INF
    assert ids[0, 3] == 2
    torch.testing.assert_close(logprobs[0].exp().sum(), torch.tensor(1.0).double())


def score(hidden: Tensor, weight: Tensor) -> Tensor:
    return logprobs_from_hidden(hidden, weight, torch.arange(8), temperature=0.7)


def frozen_score(hidden: Tensor, weight: Tensor) -> Tensor:
    return score(hidden, weight.detach()) + 0 * weight.sum()


def diverge(hidden: Tensor, weight: Tensor) -> Tensor:
    teacher = randn(8, 32, seed=2), randn(100, 32, seed=3)
    return divergence_from_hidden(hidden, weight, *teacher, torch.ones(8).bool(), chunk_tokens=3)


@pytest.mark.parametrize("function", [score, frozen_score, diverge])
def test_autocast_changes_neither_value_nor_gradient(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    def run(forward: bool, backward: bool) -> tuple[Tensor, ...]:
        hidden = randn(8, 64).requires_grad_()
        weight = randn(100, 64, seed=1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            loss = function(hidden, weight).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            loss.backward()
        return loss.detach(), hidden.grad, weight.grad

    plain = run(False, False)
    for where in ((True, False), (True, True)):
        for mine, expected in zip(run(*where), plain, strict=True):
            assert torch.equal(mine, expected)


def test_both_heads_have_the_dtype_of_their_states() -> None:
    mask, states = torch.ones(8).bool(), (randn(8, 4), randn(5, 4), randn(8, 4), randn(5, 4))
    for which in (0, 2):
        mixed = [x.bfloat16() if i == which else x for i, x in enumerate(states)]
        with pytest.raises(ValueError, match="hidden, weight and bias must share a dtype"):
            divergence_from_hidden(*mixed, mask)
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, and an integer"):
        divergence_from_hidden(*states, mask, chunk_tokens=2.5)  # type: ignore[arg-type]


def test_chunks_are_cut_alike_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the largest shard: see `test_vocab_parallel`, where ranks would wait for ever."""
    from burnish_losses.vocab_parallel import Shard

    rows: list[int] = []
    head_logits = _fused.head_logits

    def counted(states: Tensor, *others: Any) -> Tensor:
        rows.append(len(states))
        return head_logits(states, *others)

    monkeypatch.setattr(_fused, "head_logits", counted)
    monkeypatch.setattr("burnish_losses._chunks.CHUNK_BYTES", 4 * 20)
    monkeypatch.setattr(
        "burnish_losses.logprobs.shard_of", lambda num_rows, *_: Shard(0, num_rows + 10, 10)
    )
    logprobs_from_hidden(randn(4, 3), randn(5, 3), torch.arange(4))
    assert rows == [2, 2]  # not 4 at once, as its own 5 rows would allow
