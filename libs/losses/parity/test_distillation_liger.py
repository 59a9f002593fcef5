"""Divergences and gradients equal those of Liger's fused Jensen-Shannon loss, on a CPU.

Liger compiles only for speed: here it does not.
"""

import pytest
import torch
from burnish_losses import (
    count,
    distillation_loss,
    divergence_from_hidden,
    jensen_shannon,
    total,
)
from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

NUM_TOKENS, HIDDEN, TEACHER_HIDDEN, VOCABULARY = 13, 4, 6, 11


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_fused_jensen_shannon(beta: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_TOKENS, HIDDEN), (VOCABULARY, HIDDEN))
    hidden, head = (torch.randn(*s, generator=generator).requires_grad_() for s in shapes)
    shapes = ((NUM_TOKENS, TEACHER_HIDDEN), (VOCABULARY, TEACHER_HIDDEN))
    teacher = tuple(torch.randn(*s, generator=generator) for s in shapes)
    mask = torch.arange(NUM_TOKENS) % 3 > 0
    liger = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=beta,
        temperature=temperature,
        compiled=False,
        chunk_size=4,
    )
    theirs = liger(hidden, head, *teacher, torch.where(mask, 1, -100))
    batch = {"token_mask": mask, "cu_seqlens": torch.tensor([0, NUM_TOKENS])}
    divergences = divergence_from_hidden(
        hidden,
        head,
        *teacher,
        mask,
        divergence=jensen_shannon(beta),
        temperature=temperature,
        chunk_tokens=4,
    )
    ours = total(distillation_loss(divergences, batch).terms, count(batch))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(ours, (hidden, head)),
        torch.autograd.grad(theirs, (hidden, head)),
        rtol=1e-4,
        atol=1e-6,
    )
