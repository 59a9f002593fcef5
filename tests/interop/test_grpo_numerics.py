"""A GRPO step through all libraries equals one written out with a plain transformers forward."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from burnish_distributed import RaggedBatch, shard_batch
from burnish_losses.advantages import group_relative_advantages
from burnish_losses.policy_gradient import grpo_loss
from burnish_packing import plan_micro_batches
from burnish_trainer import TorchPolicy
from transformers import LlamaConfig, LlamaForCausalLM

TEMPERATURE, CLIP, KL, LEARNING_RATE = 0.8, 0.2, 0.1, 0.1
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def recorded_batch() -> RaggedBatch:
    """Two groups of three completions, with the log-probs of an older policy and a reference."""
    generator = np.random.default_rng(1)
    advantages = group_relative_advantages(REWARDS, GROUPS).tolist()
    prompts = [generator.integers(0, 97, 9), generator.integers(0, 97, 5)]
    rows = []
    for i, length in enumerate([4, 7, 2, 6, 3, 5]):
        prompt = prompts[int(GROUPS[i])]
        total = len(prompt) + length
        rows.append(
            {
                "token_ids": np.concatenate([prompt, generator.integers(0, 97, length)]),
                "token_mask": np.arange(total) >= len(prompt),
                "advantages": np.full(total, advantages[i], dtype=np.float32),
                "old_logprobs": generator.normal(-4.6, 0.3, total).astype(np.float32),
                "reference_logprobs": generator.normal(-4.6, 0.3, total).astype(np.float32),
            }
        )
    columns = {"prefix_ids": GROUPS.numpy(), "prefix_lengths": np.array([9, 9, 9, 5, 5, 5])}
    return RaggedBatch.from_rows(rows, columns)


def written_out_step(checkpoint: Path, batch: RaggedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """min(r A, clip(r) A) and the penalty r * k3, token by token, mean over all tokens."""
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    names = ("token_ids", "token_mask", "advantages", "old_logprobs", "reference_logprobs")
    losses = []
    for ids, mask, advantages, old, reference in zip(
        *(batch.sequences(name) for name in names), strict=True
    ):
        scores = (model(torch.tensor(ids)[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        for t in np.flatnonzero(mask):
            logprob, advantage = scores[t - 1, ids[t]], float(advantages[t])
            ratio = torch.exp(logprob - float(old[t]))
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gap = float(reference[t]) - logprob
            penalty = ratio * (gap.exp() - gap - 1)
            losses.append(-torch.minimum(ratio * advantage, clipped * advantage) + KL * penalty)
    loss = torch.stack(losses).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    return float(loss.detach()), {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["packed", "shared-prefix", "padded"])
@pytest.mark.parametrize("max_tokens", [17, 32, 200])
def test_a_step_equals_the_written_out_one(checkpoint: Path, mode: str, max_tokens: int) -> None:
    batch = recorded_batch()
    loss, weights = written_out_step(checkpoint, batch)
    start = dict(LlamaForCausalLM.from_pretrained(checkpoint).named_parameters())

    if mode != "shared-prefix":
        batch = RaggedBatch(batch.lengths, batch.token_columns)
    plan = plan_micro_batches(
        batch.lengths,
        max_tokens=max_tokens,
        mode="padded" if mode == "padded" else "packed",
        prefix_ids=batch.sequence_columns.get("prefix_ids"),
        prefix_lengths=batch.sequence_columns.get("prefix_lengths"),
    )
    ((shard, micro_batches),) = shard_batch(batch, plan.ranks)
    policy = TorchPolicy(
        str(checkpoint),
        learning_rate=LEARNING_RATE,
        optimizer="torch.optim.SGD",
        max_grad_norm=1e9,
    )
    loss_fn = partial(grpo_loss, clip_low=CLIP, clip_high=CLIP, kl_coefficient=KL)
    metrics = policy.train_step(
        shard, micro_batches, loss_fn, layout=plan.mode, temperature=TEMPERATURE
    )

    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
    for name, tensor in policy.named_weights():
        moved = (weights[name] - start[name]).abs().max()
        rounding = torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (tensor - weights[name]).abs().max() <= 1e-5 * moved + rounding, name


def test_a_smaller_budget_makes_more_micro_batches() -> None:
    """So that the cases above do differ."""
    lengths = recorded_batch().lengths
    counts = [plan_micro_batches(lengths, max_tokens=m).num_micro_batches for m in (17, 32, 200)]
    assert counts[0] > counts[1] > counts[2] == 1
