"""A gradient that is NaN or infinite: who did it is named, and nothing has changed."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import NonFiniteGradientError, TorchPolicy
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


def with_nan(batch: RaggedBatch, sequence: int, value: float = math.nan) -> RaggedBatch:
    """The batch with one advantage, of the last token of a sequence, spoilt."""
    advantages = batch.token_columns["advantages"].copy()
    advantages[batch.offsets[sequence + 1] - 1] = value
    return batch.with_token_column("advantages", advantages)


def numbered(batch: RaggedBatch) -> RaggedBatch:
    ids = np.array([40, 41, 42, 43])
    return RaggedBatch(batch.lengths, batch.token_columns, {"sequence_ids": ids})


def root_of_nothing(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    """sqrt has an infinite slope at 0; only the sequence with an advantage of 7 gets there."""
    nll = weighted_nll(logprobs, columns).terms[0].sum
    root = ((logprobs - logprobs) * (columns["advantages"] == 7)).sum().sqrt()
    if not (columns["advantages"] == 7).any():
        return LossOutput((Term(nll, "tokens"),), {})
    return LossOutput((Term(nll + root, "tokens"),), {})


def state_of(policy: TorchPolicy) -> str:
    """sha256 of every weight and of the optimizers' state."""
    digest = hashlib.sha256()
    for name, tensor in policy._model.named_parameters():
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    for optimizer in policy._optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                digest.update(name.encode() + torch.as_tensor(value).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_micro_batch_its_sequences_and_the_column_are_named(
    checkpoint: str, value: float
) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=1e-2)
    policy.train_step(a_batch(), SLOTS, weighted_nll)
    before = state_of(policy)
    with pytest.raises(NonFiniteGradientError) as error:
        policy.train_step(with_nan(a_batch(), 2, value), SLOTS, weighted_nll)
    assert "step 1 from micro-batch 1 of rank 0 (sequences 2, 3; loss" in str(error.value)
    assert "columns with NaN or infinity: advantages)" in str(error.value)
    assert "micro-batch 0" not in str(error.value)
    assert state_of(policy) == before
    metrics = policy.train_step(a_batch(), SLOTS, weighted_nll)
    assert metrics["train/skipped"] == 0
    assert state_of(policy) != before


def test_numbers_of_sequences_are_those_of_their_column(checkpoint: str) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=1e-2)
    with pytest.raises(NonFiniteGradientError, match=r"micro-batch 0 .*\(sequences 40, 41; "):
        policy.train_step(numbered(with_nan(a_batch(), 1)), SLOTS, weighted_nll)


def test_both_of_two_culprits_are_named(checkpoint: str) -> None:
    batch = with_nan(with_nan(a_batch(), 0), 3)
    with pytest.raises(NonFiniteGradientError) as error:
        TorchPolicy(checkpoint, learning_rate=1e-2).train_step(
            batch, [(0,), (1, 2), (3,)], weighted_nll
        )
    assert re.findall(r"micro-batch (\d)", str(error.value)) == ["0", "2"]


def test_a_finite_loss_with_an_infinite_gradient_is_named(checkpoint: str) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=1e-2)
    before = state_of(policy)
    message = r"from micro-batch 1 of rank 0 \(sequences 2, 3; loss -?\d\S*, gradient norm nan\)"
    with pytest.raises(NonFiniteGradientError, match=message):
        policy.train_step(with_nan(a_batch(), 3, 7.0), SLOTS, root_of_nothing)
    assert state_of(policy) == before
    policy.train_step(a_batch(), SLOTS, root_of_nothing)
    assert state_of(policy) != before


def test_a_skipped_step_changes_nothing_and_is_counted(checkpoint: str) -> None:
    policy, other = (
        TorchPolicy(checkpoint, learning_rate=1e-2, on_nonfinite="skip") for _ in range(2)
    )
    for each in (policy, other):
        each.train_step(a_batch(), SLOTS, weighted_nll)
    before = state_of(policy)
    with pytest.warns(UserWarning, match=r"step skipped: .*step 1 from micro-batch 1 of rank 0"):
        metrics = policy.train_step(with_nan(a_batch(), 2), SLOTS, weighted_nll)
    assert metrics["train/skipped"] == policy.num_skipped_steps == 1
    assert not math.isfinite(metrics["train/grad_norm"])
    assert state_of(policy) == before
    got, expected = (each.train_step(a_batch(), SLOTS, weighted_nll) for each in (policy, other))
    assert got == expected
    assert got["train/skipped"] == 0
    assert policy.num_steps == other.num_steps + 1 == 3
    assert state_of(policy) == state_of(other) != before


def test_another_way_to_go_on_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="on_nonfinite must be stop or skip, got 'ignore'"):
        TorchPolicy(checkpoint, learning_rate=1e-2, on_nonfinite="ignore")


def _rank_main(rank: int, checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    bad = numbered(with_nan(a_batch(), 3))
    shard, slots = shard_batch(bad, [[(0,), (1,)], [(2,), (3,)]])[rank]
    policy = TorchPolicy(checkpoint, learning_rate=1e-2)
    before = weights(policy)
    told = ""
    try:
        policy.train_step(shard, slots, weighted_nll)
    except NonFiniteGradientError as error:
        told = str(error)
    unchanged = all(torch.equal(t, before[n]) for n, t in weights(policy).items())
    good, slots = shard_batch(a_batch(), [[(0,), (1,)], [(2,), (3,)]])[rank]
    norm = policy.train_step(good, slots, weighted_nll)["train/grad_norm"]
    torch.save((told, unchanged, norm), Path(folder) / f"result{rank}.pt")
    torch.distributed.destroy_process_group()


def test_the_rank_is_named_and_all_ranks_stop(checkpoint: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(_rank_main, (checkpoint, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"result{rank}.pt") for rank in range(2)]
    for told, unchanged, norm in results:
        assert "from micro-batch 1 of rank 1 (sequences 43; loss nan" in told
        assert "of rank 0" not in told
        assert unchanged
        assert math.isfinite(norm)
