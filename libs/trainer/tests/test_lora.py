"""Adapters: merged for everybody else, kept apart in training and in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import TorchPolicy
from burnish_trainer.loading import load_model
from burnish_trainer.lora import adapter_layers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 12}
SLOTS = [(0, 1), (2, 3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True)
    LlamaForCausalLM(config).save_pretrained(folder)
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


def sum_of_scores(scores: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    return LossOutput((Term((scores - 1).square().sum(), "sequences"),), {})


def lora_policy(checkpoint: str, **kwargs: Any) -> TorchPolicy:
    return TorchPolicy(checkpoint, **{"learning_rate": 1e-2, "lora": LORA, **kwargs})


def trained(checkpoint: str, steps: int = 3, **kwargs: Any) -> TorchPolicy:
    policy = lora_policy(checkpoint, **kwargs)
    for _ in range(steps):
        policy.train_step(a_batch(), SLOTS, weighted_nll)
    return policy


def weights(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


def parameters(policy: TorchPolicy) -> Iterator[tuple[str, Tensor]]:
    yield from policy._model.named_parameters()


def peft_model(checkpoint: str, folder: Path) -> peft.PeftModel:
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    return peft.PeftModel.from_pretrained(base, folder / "adapter")


@pytest.mark.parametrize("extra", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_merged_weights_are_those_of_peft(
    checkpoint: str, tmp_path: Path, extra: dict[str, Any]
) -> None:
    policy = trained(checkpoint, lora={**LORA, **extra})
    policy.save(tmp_path / "step_000003", {})
    merged = peft_model(checkpoint, tmp_path / "step_000003").double().merge_and_unload()
    expected = dict(merged.named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters())
    got = weights(policy)
    assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in base.items()}
    for name, tensor in got.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-7)
    changed = {name for name in got if not torch.equal(got[name], base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000003" / "model")
    for name, tensor in whole.named_parameters():
        assert torch.equal(tensor, got[name]), name


def test_only_adapters_move(checkpoint: str) -> None:
    policy = lora_policy(checkpoint, optimizer_args={"weight_decay": 0.5})
    before = {name: tensor.detach().clone() for name, tensor in parameters(policy)}
    for _ in range(2):
        policy.train_step(a_batch(), SLOTS, weighted_nll)
    moved = {name for name, tensor in parameters(policy) if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == 2 * 7 * 2  # A and B of seven linear layers in two layers


def test_peft_reads_the_adapter(checkpoint: str, tmp_path: Path) -> None:
    policy, batch = trained(checkpoint), a_batch()
    policy.save(tmp_path / "step_000003", {})
    model = peft_model(checkpoint, tmp_path / "step_000003")
    got = policy.logprobs(batch, SLOTS)
    base = policy_logprobs(AutoModelForCausalLM.from_pretrained(checkpoint), batch)
    np.testing.assert_allclose(got, policy_logprobs(model, batch), atol=1e-5)
    assert np.abs(got - base).max() > 1e-2  # or an adapter that is not there would pass


def policy_logprobs(model: Any, batch: RaggedBatch) -> np.ndarray:
    """Sequence by sequence, from the model's own logits."""
    rows = []
    for ids, mask in zip(batch.sequences("token_ids"), batch.sequences("token_mask"), strict=True):
        with torch.no_grad():
            scores = model.eval()(input_ids=torch.tensor(ids)[None]).logits[0].log_softmax(-1)
        row = scores[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
        rows.append(np.where(mask, np.concatenate([[0], row]), 0))
    return np.concatenate(rows)


def test_resumed_run_equals_uninterrupted_one_bit_for_bit(checkpoint: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "lora": {**LORA, "lora_dropout": 0.3},
        "schedule": "burnish_trainer.schedules.cosine",
        "schedule_args": {"num_steps": 6, "warmup_steps": 3},
    }
    whole = lora_policy(checkpoint, **settings)
    metrics = [whole.train_step(a_batch(), SLOTS, weighted_nll) for _ in range(4)]
    trained(checkpoint, 2, **settings).save(tmp_path / "step_000002", {"step": 2})
    second = lora_policy(checkpoint, **settings)
    assert second.load(tmp_path / "step_000002")["step"] == 2
    assert [second.train_step(a_batch(), SLOTS, weighted_nll) for _ in range(2)] == metrics[2:]
    resumed = dict(parameters(second))
    for name, tensor in parameters(whole):
        assert torch.equal(tensor, resumed[name]), name
    no_dropout = trained(checkpoint, 2, **{**settings, "lora": LORA})
    assert no_dropout.train_step(a_batch(), SLOTS, weighted_nll) != metrics[2]


def test_the_reference_is_the_model_without_adapters(checkpoint: str) -> None:
    batch = a_batch()
    base = TorchPolicy(checkpoint, learning_rate=None).logprobs(batch, SLOTS)
    policy = lora_policy(checkpoint, reference=True, frozen=["*.layers.0.*"])
    flags = {name: tensor.requires_grad for name, tensor in parameters(policy)}
    assert sum(flags.values()) == 14  # those of layer 1
    for step in range(3):
        np.testing.assert_array_equal(policy.reference_logprobs(batch, SLOTS), base)
        assert {name: tensor.requires_grad for name, tensor in parameters(policy)} == flags
        distance = np.abs(policy.logprobs(batch, SLOTS) - base).max()
        assert distance == 0 if step == 0 else distance > 1e-3
        policy.train_step(batch, SLOTS, weighted_nll)
    other = lora_policy(checkpoint, frozen=["*.layers.0.*"])
    for _ in range(3):
        other.train_step(batch, SLOTS, weighted_nll)
    for (name, a), (_, b) in zip(policy.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(a, b), name


def _rank_main(rank: int, checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    shard, slots = shard_batch(a_batch(), [[(0, 1)], [(2, 3)]])[rank]
    policy = sgd_lora(checkpoint)
    before = policy.reference_logprobs(shard, slots)
    metrics = [policy.train_step(shard, slots, weighted_nll) for _ in range(3)]
    assert (policy.reference_logprobs(shard, slots) == before).all()
    merged = weights(policy)
    policy.save(Path(folder) / "step_000003", {})
    if rank == 0:
        torch.save((metrics, merged), Path(folder) / "result.pt")
    torch.distributed.destroy_process_group()


def sgd_lora(checkpoint: str) -> TorchPolicy:
    return lora_policy(checkpoint, learning_rate=0.1, optimizer="torch.optim.SGD", reference=True)


def test_two_ranks_equal_one(checkpoint: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(_rank_main, (checkpoint, str(tmp_path)), nprocs=2)
    metrics, merged = torch.load(tmp_path / "result.pt", weights_only=False)
    one = sgd_lora(checkpoint)
    start = weights(one)
    for got in metrics:
        expected = one.train_step(a_batch(), [(0, 1, 2, 3)], weighted_nll)
        assert got == pytest.approx(expected, rel=1e-5)
    largest = 0.0
    for name, tensor in weights(one).items():
        moved = (tensor - start[name]).abs().max()
        rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (merged[name] - tensor).abs().max() <= 1e-5 * moved + rounding, name
        largest = max(largest, float(moved))
    assert largest > 1e-3
    one.load(tmp_path / "step_000003")
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, merged[name]), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_dora": True}, "plain low-rank adapters, got use_dora"),
        ({"bias": "all"}, "plain low-rank adapters, got bias"),
        ({"init_lora_weights": "pissa"}, "plain low-rank adapters, got init_lora_weights"),
        ({"modules_to_save": ["embed_tokens"]}, "plain low-rank adapters, got modules_to_save"),
        ({"rnk": 4}, "arguments of peft.LoraConfig.*rnk"),
        ({"target_modules": ["embed_tokens"]}, r"must target linear layers, got \['model.embed"),
        ({"target_modules": ["query"]}, "must fit the model.*query"),
        ({"target_modules": ["lm_head"]}, "layers of the decoder, got the head"),
    ],
)
def test_other_adapters_are_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        lora_policy(str(tmp_path), lora=arguments)


def test_an_adapter_of_another_rank_is_not_resumed_from(checkpoint: str, tmp_path: Path) -> None:
    trained(checkpoint, 1, lora={"r": 4, "target_modules": ["q_proj"]}).save(
        tmp_path / "step_000001", {}
    )
    with pytest.raises(ValueError, match=r"differ in lora\.lora_alpha: 8 there, 12 here"):
        lora_policy(checkpoint).load(tmp_path / "step_000001")


@pytest.mark.parametrize("head", ["language", "value", "reward"])
def test_all_linear_layers_are_those_of_the_decoder(checkpoint: str, head: str) -> None:
    model = load_model(Path(checkpoint), head=head, lora=LORA)
    names = [name for name, _ in adapter_layers(model)]
    assert len(names) == 14
    assert all(name.startswith("model.layers.") for name in names)
    scores = [p.requires_grad for name, p in model.named_parameters() if name.startswith("score.")]
    assert scores == {"language": [], "value": [True, True], "reward": [True]}[head]


def test_adapters_under_a_reward_head_resume_with_it(checkpoint: str, tmp_path: Path) -> None:
    policy = lora_policy(checkpoint, head="reward")
    before = weights(policy)
    for _ in range(2):
        policy.train_step(a_batch(), SLOTS, sum_of_scores)
    assert not torch.equal(weights(policy)["score.weight"], before["score.weight"])
    policy.save(tmp_path / "step_000002", {})
    resumed = lora_policy(checkpoint, head="reward", seed=1)
    resumed.load(tmp_path / "step_000002")
    np.testing.assert_array_equal(resumed.scores(a_batch(), SLOTS), policy.scores(a_batch(), SLOTS))
    assert resumed.train_step(a_batch(), SLOTS, sum_of_scores) == policy.train_step(
        a_batch(), SLOTS, sum_of_scores
    )
    for (name, a), (_, b) in zip(policy.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_a_policy_that_only_scores_loads_an_adapter(checkpoint: str, tmp_path: Path) -> None:
    policy = trained(checkpoint)
    policy.save(tmp_path / "step_000003", {})
    scorer = lora_policy(checkpoint, learning_rate=None)
    scorer.load(tmp_path / "step_000003")
    np.testing.assert_array_equal(
        scorer.logprobs(a_batch(), SLOTS), policy.logprobs(a_batch(), SLOTS)
    )


def test_gradient_checkpointing_reaches_the_adapters(checkpoint: str) -> None:
    plain = lora_policy(checkpoint).train_step(a_batch(), SLOTS, weighted_nll)
    got = lora_policy(checkpoint, gradient_checkpointing=True).train_step(
        a_batch(), SLOTS, weighted_nll
    )
    assert got == pytest.approx(plain, rel=1e-6)
    assert got["train/grad_norm"] > 0
