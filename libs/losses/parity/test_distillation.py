"""Divergences and gradients equal those of TRL's GKDTrainer on the same logits.

TRL gets rows and labels of -100 where nothing is trained; this library a mask.
"""

import warnings

import pytest
import torch
from burnish_losses import (
    count,
    distillation_loss,
    divergence_from_logits,
    jensen_shannon,
    total,
)

with warnings.catch_warnings():  # theirs: TRL also imports vLLM where it is installed
    warnings.simplefilter("ignore")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

NUM_SEQUENCES, LENGTH, VOCABULARY = 3, 5, 9


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_generalised_jensen_shannon(beta: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SEQUENCES, LENGTH, VOCABULARY)
    student, teacher = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    mask = torch.arange(LENGTH) < torch.tensor([[2], [5], [3]])
    theirs = GKDTrainer.generalized_jsd_loss(
        student,
        teacher,
        labels=torch.where(mask, 1, -100),
        beta=beta,
        temperature=temperature,
        num_items_in_batch=int(mask.sum()),
    )
    batch = {
        "token_mask": mask.flatten(),
        "cu_seqlens": torch.arange(NUM_SEQUENCES + 1) * LENGTH,
    }
    divergences = divergence_from_logits(
        student.flatten(0, 1),
        teacher.flatten(0, 1),
        batch["token_mask"],
        divergence=jensen_shannon(beta),
        temperature=temperature,
    )
    ours = total(distillation_loss(divergences, batch).terms, count(batch))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(ours, student),
        torch.autograd.grad(theirs, student),
        rtol=1e-10,
        atol=1e-14,
    )
