"""What is frozen stays, bit for bit; a pattern that freezes nothing is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import TorchPolicy
from burnish_trainer.freezing import freeze
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


FROZEN = ["model.embed_tokens.*", "*.layers.0.*"]


def is_frozen(name: str) -> bool:
    return name == "model.embed_tokens.weight" or name.startswith("model.layers.0.")


def frozen_policy(checkpoint: str) -> TorchPolicy:
    return TorchPolicy(
        checkpoint, learning_rate=1e-2, optimizer_args={"weight_decay": 0.5}, frozen=FROZEN
    )


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


def test_frozen_weights_stay_and_all_others_move(checkpoint: str) -> None:
    policy = frozen_policy(checkpoint)
    before = weights(policy)
    for _ in range(3):
        policy.train_step(a_batch(), SLOTS, weighted_nll)
    assert moved(before, weights(policy)) == {name for name in before if not is_frozen(name)}
    assert sum(map(is_frozen, before)) == 10


def test_the_gradient_norm_is_that_of_the_trained_weights(checkpoint: str) -> None:
    whole = TorchPolicy(checkpoint, learning_rate=1e-2)
    everything = whole.train_step(a_batch(), SLOTS, weighted_nll)["train/grad_norm"]
    part = frozen_policy(checkpoint).train_step(a_batch(), SLOTS, weighted_nll)["train/grad_norm"]
    assert 0 < part < 0.99 * everything


def test_a_run_with_frozen_weights_resumes_bit_for_bit(checkpoint: str, tmp_path: Path) -> None:
    whole = frozen_policy(checkpoint)
    for _ in range(2):
        whole.train_step(a_batch(), SLOTS, weighted_nll)
    whole.save(tmp_path / "step_000002", {})
    resumed = frozen_policy(checkpoint)
    resumed.load(tmp_path / "step_000002")
    for policy in (whole, resumed):
        policy.train_step(a_batch(), SLOTS, weighted_nll)
    assert not moved(weights(whole), weights(resumed))


def _rank_main(rank: int, checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    shard, slots = shard_batch(a_batch(), [[(0, 1)], [(2, 3)]])[rank]
    policy = sgd_policy(checkpoint)
    metrics = [policy.train_step(shard, slots, weighted_nll) for _ in range(3)]
    after = weights(policy)
    if rank == 0:
        torch.save((metrics, after), Path(folder) / "result.pt")
    torch.distributed.destroy_process_group()


def sgd_policy(checkpoint: str) -> TorchPolicy:
    return TorchPolicy(checkpoint, learning_rate=0.1, optimizer="torch.optim.SGD", frozen=FROZEN)


def test_two_ranks_equal_one(checkpoint: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(_rank_main, (checkpoint, str(tmp_path)), nprocs=2)
    metrics, got = torch.load(tmp_path / "result.pt", weights_only=False)
    one = sgd_policy(checkpoint)
    before = weights(one)
    for metric in metrics:
        expected = one.train_step(a_batch(), [(0, 1, 2, 3)], weighted_nll)
        assert metric == pytest.approx(expected, rel=1e-5)
    for name, tensor in weights(one).items():
        distance = (tensor - before[name]).abs().max()
        assert (distance == 0) == is_frozen(name), name
        rounding = 0 if is_frozen(name) else 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (got[name] - tensor).abs().max() <= 1e-5 * distance + rounding, name


def test_a_pattern_that_matches_nothing_names_examples(checkpoint: str) -> None:
    with pytest.raises(ValueError, match=r"'embed_token\*', which matches none of 21; .*model\."):
        TorchPolicy(checkpoint, learning_rate=1e-2, frozen=[*FROZEN, "embed_token*"])


def test_freezing_everything_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match=r"some parameters must be trained, got all frozen"):
        TorchPolicy(checkpoint, learning_rate=1e-2, frozen=["model.*", "lm_head.*"])


def test_a_tied_weight_is_frozen_by_either_name() -> None:
    for pattern in ("lm_head.*", "*embed_tokens*"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
        freeze(model, [pattern])
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        assert [name for name, trained in flags.items() if not trained] == [
            "model.embed_tokens.weight"
        ]
