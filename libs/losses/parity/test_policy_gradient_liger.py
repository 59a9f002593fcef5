"""Losses and gradients equal those of Liger's fused GRPO, from hidden states, on a CPU.

Liger gets rows of hidden states and token ids; this library the tokens of one sequence after
another. Liger compiles only for speed: here it does not. It computes in float32, hence the
tolerances.
"""

from functools import partial
from typing import Any

import pytest
import torch
from burnish_losses import (
    cispo_loss,
    count,
    dapo_loss,
    dr_grpo_loss,
    finalize,
    grpo_loss,
    gspo_loss,
    kl_k3,
    logprobs_from_hidden,
    policy_gradient_loss,
    ppo_loss,
    sapo_loss,
    sequence_mean,
    sequence_ratio,
    sequence_sum,
    total,
)
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from torch import Tensor

NUM_SEQUENCES, LENGTH, HIDDEN, VOCABULARY, TEMPERATURE = 4, 6, 5, 11, 0.7
Columns = dict[str, Tensor]


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_rows() -> dict[str, Tensor]:
    """Rows [N, L]: trained lengths 4, 6, 1, 3; padding of zeros."""
    generator = torch.Generator().manual_seed(2)
    shape = (NUM_SEQUENCES, LENGTH)
    rows = {
        "hidden": randn(0, *shape, HIDDEN).requires_grad_(),
        "head": randn(1, VOCABULARY, HIDDEN).requires_grad_(),
        "labels": torch.randint(VOCABULARY, shape, generator=generator),
        "mask": torch.arange(LENGTH) < torch.tensor([[4], [6], [1], [3]]),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5]),
    }
    with torch.no_grad():
        logprobs = logprobs_from_hidden(
            rows["hidden"].flatten(0, 1),
            rows["head"],
            rows["labels"].flatten(),
            temperature=TEMPERATURE,
        ).view(shape)
    for seed, name in ((3, "old"), (4, "reference")):
        rows[name] = torch.where(rows["mask"], logprobs + 0.5 * randn(seed, *shape), 0.0)
    rows["weights"] = randn(5, *shape).exp()
    return rows


def packed(rows: dict[str, Tensor]) -> tuple[Tensor, Columns]:
    mask = rows["mask"]
    logprobs = logprobs_from_hidden(
        rows["hidden"][mask], rows["head"], rows["labels"][mask], temperature=TEMPERATURE
    )
    batch = {
        "token_mask": torch.ones(len(logprobs)).bool(),
        "advantages": rows["advantages"].repeat_interleave(mask.sum(1)),
        "old_logprobs": rows["old"][mask],
        "reference_logprobs": rows["reference"][mask],
        "sampled_logprobs": rows["old"][mask],
        "cu_seqlens": torch.cat([torch.zeros(1).long(), mask.sum(1).cumsum(0)]).int(),
    }
    return logprobs, batch


def liger(rows: dict[str, Tensor], **settings: Any) -> tuple[Tensor, list[Tensor]]:
    weighted = settings.pop("weighted", False)
    defaults = {"beta": 0.0, "temperature": TEMPERATURE, "max_completion_length": 10}
    loss_fn = LigerFusedLinearGRPOLoss(
        compiled=False, use_ref_model=bool(settings.get("beta")), **(defaults | settings)
    )
    return loss_fn(
        rows["hidden"],
        rows["head"],
        rows["labels"],
        rows["mask"].long(),
        rows["advantages"],
        ref_per_token_logps=rows["reference"],
        old_per_token_logps=rows["old"],
        vllm_is_ratio=rows["weights"] if weighted else None,
    )


WIDE = {"clip_low": 0.2, "clip_high": 0.2}
OBJECTIVES: dict[str, tuple[dict[str, Any], Any]] = {
    "grpo": ({"loss_type": "grpo"}, partial(grpo_loss, aggregate=sequence_mean)),
    "bnpo": ({"loss_type": "bnpo"}, grpo_loss),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, dapo_loss),
    "dr_grpo": ({"loss_type": "dr_grpo"}, partial(dr_grpo_loss, num_tokens=10)),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        partial(gspo_loss, **WIDE),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, partial(cispo_loss, clip_high=0.2)),
    "sapo": ({"loss_type": "sapo"}, sapo_loss),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        partial(policy_gradient_loss, ratio=sequence_ratio, aggregate=sequence_sum),
    ),
    "delta": ({"loss_type": "dapo", "delta": 1.3}, partial(ppo_loss, dual_clip=1.3)),
}


# Name, beta, KL corrected off-policy, weights of tokens. With a ratio of sequences the corrected KL
# differs, as TRL's does: see test_policy_gradient.py. Liger's luspo is right only where all tokens
# of a sequence have one value: it takes the mean over a row's padding as well.
CASES = [
    (name, beta, corrected, weighted)
    for name in OBJECTIVES
    for beta, corrected in ((0.0, False), (0.3, False), (0.3, True))
    for weighted in (False, True)
    if not (name == "gspo" and corrected) and not (name == "luspo" and (beta or weighted))
]


@pytest.mark.parametrize(("name", "beta", "corrected", "weighted"), CASES)
def test_objectives_equal_ligers(name: str, beta: float, corrected: bool, weighted: bool) -> None:
    settings, objective = OBJECTIVES[name]
    rows = make_rows()
    parameters = [rows["hidden"], rows["head"]]
    settings = settings | {"beta": beta, "use_bias_correction_kl": corrected, "weighted": weighted}
    expected, metrics = liger(rows, **settings)
    logprobs, batch = packed(rows)
    parts: dict[str, Any] = {"kl_coefficient": beta} | ({} if corrected else {"kl": kl_k3})
    if weighted:
        parts["importance"] = lambda *_: rows["weights"][rows["mask"]]
    output = objective(logprobs, batch, **parts)
    loss = total(output.terms, count(batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(loss, parameters)
    expected_gradients = torch.autograd.grad(expected, parameters)
    assert max(float(gradient.abs().max()) for gradient in expected_gradients) > 1e-3
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)
    if name in ("grpo", "bnpo", "dapo", "dr_grpo"):
        ours = finalize(output.metrics, count(batch))["policy/clip_fraction"]
        assert ours == pytest.approx(metrics[-1].item())
        assert ours > 0
