"""Scoring and evaluation change nothing; dropout is in training alone, and depends on its step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burnish_distributed import RaggedBatch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import TorchPolicy
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.1,
}
SLOTS = [(0, 1), (2, 3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder)
    return str(folder)


def a_batch() -> RaggedBatch:
    generator = np.random.default_rng(0)
    return RaggedBatch.from_rows(
        [
            {
                "token_ids": generator.integers(0, 97, length),
                "token_mask": np.arange(length) >= 3,
                "advantages": generator.normal(size=length).astype("f4"),
            }
            for length in (7, 12, 5, 9)
        ]
    )


def weighted_nll(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    total = masked_sum(-logprobs * columns["advantages"], columns["token_mask"])
    return LossOutput((Term(total, "tokens"),), {})


def weights(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with dropout, in the attention."""
    folder = tmp_path_factory.mktemp("dropping")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.5)).save_pretrained(folder)
    return str(folder)


def hashes(policy: TorchPolicy) -> dict[str, str]:
    """sha256 of every weight, gradient and tensor of the optimizers' state."""
    tensors = {f"weight/{name}": tensor for name, tensor in policy.named_weights()}
    tensors |= {f"parameter/{name}": p.detach() for name, p in policy._model.named_parameters()}
    for i, optimizer in enumerate(policy._optimizers):
        for j, state in enumerate(optimizer.state.values()):
            tensors |= {f"state/{i}/{j}/{n}": torch.as_tensor(v) for n, v in state.items()}
    found = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in tensors.items()}
    gradients = [n for n, p in policy._model.named_parameters() if p.grad is not None]
    return found | {f"gradient/{name}": "there" for name in gradients}


LORA: dict[str, Any] = {"lora": {"r": 4, "lora_dropout": 0.5}}


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_scoring_and_evaluation_change_nothing(checkpoint: str, settings: dict[str, Any]) -> None:
    policy, batch = (
        TorchPolicy(checkpoint, learning_rate=1e-2, reference=True, **settings),
        a_batch(),
    )
    policy.train_step(batch, SLOTS, weighted_nll)
    before = hashes(policy)
    assert sum(name.startswith("state/") for name in before) >= 3 * 20
    policy.evaluate(batch, SLOTS, weighted_nll, with_entropy=True)
    assert hashes(policy) == before
    policy.logprobs(batch, SLOTS)
    policy.reference_logprobs(batch, SLOTS)
    policy.topk_logprobs(batch, SLOTS, 3)
    assert hashes(policy) == before
    assert policy.num_steps == 1
    policy.train_step(batch, SLOTS, weighted_nll)
    changed = {name for name, value in hashes(policy).items() if value != before[name]}
    assert any(name.startswith("weight/") for name in changed)
    assert any(name.startswith("state/") for name in changed)


def test_evaluation_gives_the_loss_of_the_step(checkpoint: str) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=1e-2)
    for _ in range(2):
        seen = policy.evaluate(a_batch(), [(0, 1, 2, 3)], weighted_nll, layout="padded")
        trained = policy.train_step(a_batch(), SLOTS, weighted_nll)
        for name in ("loss", "num_tokens", "num_sequences"):
            assert seen[f"validation/{name}"] == pytest.approx(trained[f"train/{name}"], rel=1e-6)
    later = policy.evaluate(a_batch(), SLOTS, weighted_nll)
    assert later["validation/loss"] < seen["validation/loss"] - 1e-3


def test_evaluation_drops_nothing(dropping: str) -> None:
    policy = TorchPolicy(dropping, learning_rate=1e-2)
    first, second = (policy.evaluate(a_batch(), SLOTS, weighted_nll) for _ in range(2))
    assert first == second
    loss = policy.train_step(a_batch(), SLOTS, weighted_nll)["train/loss"]
    assert abs(loss - first["validation/loss"]) > 1e-3  # training does


def test_dropout_depends_on_seed_and_step_alone(dropping: str) -> None:
    def losses(seed: int, *, noise: bool = False) -> list[float]:
        policy = TorchPolicy(dropping, learning_rate=1e-30, seed=seed)
        found = []
        for _ in range(3):
            if noise:
                torch.rand(7)
                policy.evaluate(a_batch(), SLOTS, weighted_nll)
            found.append(policy.train_step(a_batch(), SLOTS, weighted_nll)["train/loss"])
        return found

    expected = losses(0)
    assert losses(0, noise=True) == expected
    assert losses(1) != expected
    assert len(set(expected)) == 3  # the weights stay; only the step differs


def test_resumed_dropout_goes_on(dropping: str, tmp_path: Path) -> None:
    whole = TorchPolicy(dropping, learning_rate=1e-2)
    metrics = [whole.train_step(a_batch(), SLOTS, weighted_nll) for _ in range(2)]
    whole.save(tmp_path / "step_000002", {})
    resumed = TorchPolicy(dropping, learning_rate=1e-2)
    resumed.load(tmp_path / "step_000002")
    metrics = [p.train_step(a_batch(), SLOTS, weighted_nll) for p in (whole, resumed)]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_the_global_random_state_is_left_alone(dropping: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    policy = TorchPolicy(dropping, learning_rate=1e-2, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    policy.train_step(a_batch(), SLOTS, weighted_nll)
    assert torch.equal(torch.get_rng_state(), before)
    policy.evaluate(a_batch(), SLOTS, weighted_nll)
    policy.logprobs(a_batch(), SLOTS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_policy_without_a_learning_rate_only_scores(checkpoint: str, tmp_path: Path) -> None:
    scorer = TorchPolicy(checkpoint, learning_rate=None)
    trainer = TorchPolicy(checkpoint, learning_rate=1e-2)
    with pytest.raises(ValueError, match="training needs a policy built with a learning_rate"):
        scorer.train_step(a_batch(), SLOTS, weighted_nll)
    expected = trainer.logprobs(a_batch(), SLOTS)
    np.testing.assert_array_equal(scorer.logprobs(a_batch(), SLOTS), expected)
    assert "validation/loss" in scorer.evaluate(a_batch(), SLOTS, weighted_nll)
    trainer.train_step(a_batch(), SLOTS, weighted_nll)
    trainer.save(tmp_path / "step_000001", {"step": 1})
    assert scorer.load(tmp_path / "step_000001")["step"] == 1
    moved = trainer.logprobs(a_batch(), SLOTS)
    np.testing.assert_array_equal(scorer.logprobs(a_batch(), SLOTS), moved)
    assert np.abs(moved - expected).max() > 1e-3


def test_a_reference_that_was_not_kept_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="need a policy built with reference=True"):
        TorchPolicy(checkpoint, learning_rate=1e-2).reference_logprobs(a_batch(), SLOTS)


def test_the_reference_is_swapped_in_and_out_bit_for_bit(checkpoint: str) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=1e-2, reference=True, frozen=["*.layers.0.*"])
    first = policy.logprobs(a_batch(), SLOTS)
    policy.train_step(a_batch(), SLOTS, weighted_nll)
    reference = policy._reference
    assert reference is not None
    trained = {n for n, p in policy._model.named_parameters() if p.requires_grad}
    assert reference._kept.keys() == trained
    assert len(trained) == 12
    before = hashes(policy)
    np.testing.assert_array_equal(policy.reference_logprobs(a_batch(), SLOTS), first)
    assert hashes(policy) == before
    with pytest.raises(ZeroDivisionError), reference.swapped_in():
        1 / (hashes(policy) == before)  # it is not, and the way out restores after an error, too
    assert hashes(policy) == before
