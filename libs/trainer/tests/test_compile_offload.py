"""Less memory or more speed, and the same step."""

from __future__ import annotations

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


def run(policy: TorchPolicy, steps: int = 3) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    metrics = [policy.train_step(a_batch(), SLOTS, weighted_nll) for _ in range(steps)]
    return metrics, weights(policy)


def sgd_policy(checkpoint: str, **settings: Any) -> TorchPolicy:
    return TorchPolicy(checkpoint, learning_rate=0.1, optimizer="torch.optim.SGD", **settings)


def assert_equal_run(
    got: tuple[list[dict[str, float]], dict[str, Tensor]],
    expected: tuple[list[dict[str, float]], dict[str, Tensor]],
    start: Mapping[str, Tensor],
) -> None:
    for one, other in zip(got[0], expected[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert list(got[1]) == list(expected[1])
    for name, tensor in expected[1].items():
        moved = (tensor - start[name]).abs().max()
        rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (got[1][name] - tensor).abs().max() <= 1e-5 * moved + rounding, name
        assert moved > 10 * rounding, name


def test_recomputed_activations_give_the_same_step(checkpoint: str) -> None:
    calls: list[str] = []
    plain, again = sgd_policy(checkpoint), sgd_policy(checkpoint, gradient_checkpointing=True)
    start, expected = weights(plain), run(plain)
    mlp = again._model.get_submodule("model.model.layers.0.mlp")
    mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    assert_equal_run(run(again), expected, start)
    assert len(calls) == 2 * 3 * len(SLOTS)  # forward, and once more in the backward pass


def test_recomputed_dropout_is_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, attention_dropout=0.5)).save_pretrained(tmp_path)
    plain = sgd_policy(str(tmp_path))
    start, expected = weights(plain), run(plain)
    assert_equal_run(run(sgd_policy(str(tmp_path), gradient_checkpointing=True)), expected, start)
    with pytest.raises(AssertionError):
        assert_equal_run(
            run(sgd_policy(str(tmp_path), gradient_checkpointing=True, seed=1)), expected, start
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by dynamo itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_compiled_layers_give_the_same_step(checkpoint: str) -> None:
    plain, compiled = sgd_policy(checkpoint), sgd_policy(checkpoint, compile=True)
    start, expected = weights(plain), run(plain)
    children = dict(compiled._model.get_submodule("model.model.layers.0").named_children())
    assert {n for n, m in children.items() if m._compiled_call_impl is not None} == {
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
    }
    assert_equal_run(run(compiled), expected, start)


def test_a_policy_that_was_offloaded_goes_on(checkpoint: str) -> None:
    plain, moved = (TorchPolicy(checkpoint, learning_rate=1e-2) for _ in range(2))
    metrics, before = run(plain)
    got, after = run(moved)
    assert got == metrics
    moved.offload()
    moved.onload()
    for name, tensor in moved.named_weights():
        assert torch.equal(tensor, before[name]), name
    (got, after), (metrics, expected) = run(moved), run(plain)
    assert got == metrics
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
        assert not torch.equal(before[name], tensor), name


def test_cpu_offload_without_a_gpu_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="cpu_offload needs a GPU and a process group, got"):
        TorchPolicy(checkpoint, learning_rate=1e-2, device="cpu", cpu_offload=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloading_frees_the_gpu(checkpoint: str) -> None:
    plain, moved = (TorchPolicy(checkpoint, learning_rate=1e-2) for _ in range(2))
    run(plain)
    run(moved)
    resident = torch.cuda.memory_allocated()
    size = sum(p.nbytes for p in moved._model.parameters())
    moved.offload()
    assert torch.cuda.memory_allocated() <= resident - 3 * size  # weights and two moments
    assert all(not p.is_cuda for p in moved._model.parameters())
    moved.onload()
    assert all(p.is_cuda for p in moved._model.parameters())
    (got, after), (metrics, expected) = run(moved), run(plain)
    assert got == pytest.approx(metrics, rel=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5)
