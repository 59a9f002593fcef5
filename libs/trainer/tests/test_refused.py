"""Bad input: a sentence that says what must hold, on every rank, and nothing has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import NonFiniteGradientError, TorchPolicy
from burnish_trainer.checkpoint import delete_old_checkpoints
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 12}
ONE = [(0, 1)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), seed=0)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("other"), seed=1)


def make_checkpoint(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def a_batch(**columns: Any) -> RaggedBatch:
    ids = np.arange(1, 10)
    mask = np.array([False, True, True, True, True, False, True, True, True])
    batch = RaggedBatch(np.array([5, 4]), {"token_ids": ids, "token_mask": mask})
    kept = {n: c for n, c in {**batch.token_columns, **columns}.items() if c is not None}
    return replace(batch, token_columns=kept)


def nll(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    return LossOutput((Term(-masked_sum(logprobs, columns["token_mask"]), "tokens"),), {})


def weights(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy._model.named_parameters()}


def optimizer_state(policy: TorchPolicy) -> list[Any]:
    return [
        tensor.clone()
        for o in policy._optimizers
        for s in o.state.values()
        for tensor in s.values()
    ]


def same(a: TorchPolicy, b: TorchPolicy) -> bool:
    one, two = weights(a), weights(b)
    equal = all(torch.equal(one[name], two[name]) for name in one | two)
    states = [optimizer_state(a), optimizer_state(b)]
    return equal and len(states[0]) == len(states[1]) and all(map(torch.equal, *states))


TOO_LONG = RaggedBatch(
    np.array([17, 4]),
    {"token_ids": np.ones(21, dtype=np.int64), "token_mask": np.ones(21, dtype=bool)},
)
EMPTY_ROW = replace(a_batch(), lengths=np.array([9, 0]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"token_ids": [1]}, r"must be a burnish_distributed\.RaggedBatch, got dict"),
        (a_batch(token_ids=None), "must have the token column token_ids"),
        (a_batch(token_mask=None), "must have the token column token_mask"),
        (a_batch(token_ids=np.full(9, 1.5)), r"must be integers \[T\], got float64"),
        (a_batch(token_ids=np.full(9, 97)), r"must be in \[0, 97\), got 97 in sequence 0"),
        (a_batch(token_ids=np.array([*range(8), -1])), r"got -1 in sequence 1"),
        (a_batch(token_mask=np.full(9, 0.5)), r"must be bool \[T\], got float64"),
        (a_batch(entropies=np.zeros(9)), r"name of its own, got \['entropies'\]"),
        (
            replace(a_batch(), sequence_columns={"token_mask": np.zeros(2)}),
            r"got \['token_mask'\] as token and as sequence column",
        ),
        (TOO_LONG, "at most 16 tokens long .* got 17 in sequence 0"),
        (EMPTY_ROW, "must hold a token, got none in 1"),
    ],
)
def test_a_batch_is_checked_before_anything_is_computed(
    checkpoint: str, batch: Any, message: str
) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    before = weights(policy)
    for call in (
        lambda: policy.train_step(batch, ONE, nll),
        lambda: policy.evaluate(batch, ONE, nll),
        lambda: policy.logprobs(batch, ONE),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert all(torch.equal(before[n], t) for n, t in weights(policy).items())
    assert policy.num_steps == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "no/such/folder"}, "folder of a checkpoint with config.json, got no/such"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number of at least 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a finite"),
        ({"on_nonfinite": "ignore"}, "must be stop or skip, got 'ignore'"),
        ({"frozen": "*.layers.0.*"}, r"must be a list of globs"),
        ({"lora": True}, r"arguments of peft\.LoraConfig, got True"),
        ({"lora": {**LORA, "inference_mode": True}}, "got inference_mode"),
        ({"dtype": "float16"}, "must be one of float32, bfloat16, got 'float16'"),
        ({"device": "gpu"}, "must be cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "meta"}, "must be cpu, or cuda where there is a GPU, got 'meta'"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"reference": True, "learning_rate": None}, "its own reference"),
        (
            {"schedule": "burnish_trainer.schedules.cosine", "schedule_args": {"num_steps": 0}},
            "num_steps must be at least 1, got 0",
        ),
        ({"schedule_args": {"warmup_steps": -3}}, "warmup_steps must be at least 0, got -3"),
        ({"schedule": "math.log", "schedule_args": {}}, "schedule_args must be those of math.log"),
        ({"schedule": "operator.neg"}, None),
    ],
)
def test_arguments_are_checked(
    checkpoint: str, arguments: dict[str, Any], message: str | None
) -> None:
    build = lambda: TorchPolicy(**{"model": checkpoint, "learning_rate": 0.1, **arguments})  # noqa: E731
    if message is None:  # -0.0 in step 0; the first negative factor is noticed in its step
        policy = build()
        policy.train_step(a_batch(), ONE, nll)
        with pytest.raises(ValueError, match=r"factor of at least 0, got -1\.0 from operator"):
            policy.train_step(a_batch(), ONE, nll)
        return
    with pytest.raises(ValueError, match=message):
        build()


def test_a_loss_that_is_no_sum_is_told_what_to_return(checkpoint: str) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"must return a .*LossOutput, got Tensor"):
        policy.train_step(a_batch(), ONE, lambda logprobs, _: -logprobs.mean())  # type: ignore[arg-type,return-value]


def test_a_loss_of_nan_with_a_finite_gradient_is_no_step(checkpoint: str) -> None:
    def constant_nan(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
        return LossOutput((Term(logprobs.sum() + float("nan"), "tokens"),), {})

    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    before = weights(policy)
    with pytest.raises(
        NonFiniteGradientError, match=r"loss and gradients must be finite.*loss nan"
    ):
        policy.train_step(a_batch(), ONE, constant_nan)
    assert all(torch.equal(before[n], t) for n, t in weights(policy).items())


def _rank_main(rank: int, checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    good, bad = a_batch(), a_batch(token_ids=np.full(9, 97))
    told = []
    for batch, plan in ((good if rank else bad, ONE), (good, ONE if rank else [(0,), (1,)])):
        try:
            policy.train_step(batch, plan, nll)
        except ValueError as error:
            told.append(str(error))
    saved = Path(folder) / "step_1"
    policy.train_step(good, ONE, nll)
    policy.save(saved, {})
    elsewhere = saved if rank else Path(folder) / "nowhere"
    try:
        policy.load(elsewhere)
    except ValueError as error:
        told.append(str(error))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(told))
    policy.train_step(good, ONE, nll)
    torch.distributed.destroy_process_group()


def test_what_one_rank_is_given_wrong_all_ranks_refuse(checkpoint: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(_rank_main, (checkpoint, str(tmp_path)), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert "got 97 in sequence 0" in first[0]
    assert second[0] == f"{first[0]} (on rank 0)"
    assert first[1] == second[1]
    assert "equally many micro-batches, got [2, 1]" in first[1]
    assert "must hold state.json" in first[2]
    assert second[2] == f"{first[2]} (on rank 0)"


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torch.optim.Muon"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_saving_before_the_first_step_changes_nothing(
    checkpoint: str, tmp_path: Path, optimizer: str, lora: Any
) -> None:
    plain, saved = (
        TorchPolicy(checkpoint, learning_rate=0.1, optimizer=optimizer, lora=lora) for _ in range(2)
    )
    saved.save(tmp_path / "step_0", {})
    assert not optimizer_state(saved)
    resumed = TorchPolicy(checkpoint, learning_rate=0.1, optimizer=optimizer, lora=lora)
    resumed.train_step(a_batch(), ONE, nll)
    resumed.load(tmp_path / "step_0")  # of before its step
    for policy in (plain, saved, resumed):
        policy.train_step(a_batch(), ONE, nll)
    assert same(plain, saved)
    assert same(plain, resumed)


def test_a_policy_built_otherwise_is_refused_and_unchanged(
    checkpoint: str, other_checkpoint: str, tmp_path: Path
) -> None:
    def build(model: str = checkpoint, **arguments: Any) -> TorchPolicy:
        return TorchPolicy(model, **{"learning_rate": 0.1, **arguments})

    def saved(name: str, **arguments: Any) -> Path:
        policy = build(**arguments)
        policy.train_step(a_batch(), ONE, nll)
        policy.save(tmp_path / name, {})
        return tmp_path / name

    full = saved("full", reference=True)
    adapters = saved("lora", lora=LORA)
    for path, arguments, named in [
        (full, {"optimizer_args": {"weight_decay": 0.5}}, "optimizer_args: {} there"),
        (full, {"optimizer": "torch.optim.SGD"}, "optimizer: torch.optim.AdamW there"),
        (full, {"frozen": ["*.layers.0.*"]}, "frozen: "),
        (full, {"lora": LORA}, "lora: False there"),
        (full, {"head": "value"}, "head: language there, value here"),
        (full, {"reference": True, "model": other_checkpoint}, "base: "),
        (adapters, {}, "lora: True there, False here"),
        (adapters, {"lora": {**LORA, "lora_alpha": 24}}, "lora.lora_alpha: 12 there, 24 here"),
        (adapters, {"lora": {**LORA, "use_rslora": True}}, "lora.use_rslora: False"),
        (adapters, {"lora": LORA, "model": other_checkpoint}, "base: "),
        (adapters, {"lora": LORA, "model": str(adapters / "model")}, "base: "),
    ]:
        policy, untouched = build(**arguments), build(**arguments)
        with pytest.raises(ValueError, match=f"differ in .*{named}"):
            policy.load(path)
        assert same(policy, untouched), named
        assert policy.num_steps == 0
    scorer = build(learning_rate=None)
    scorer.load(adapters)  # merged
    own = dict(build(model=str(adapters / "model"), learning_rate=None).named_weights())
    assert all(torch.equal(own[name], tensor) for name, tensor in scorer.named_weights())


def _break(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BROKEN: dict[str, Callable[[Path], Any]] = {
    "state.json": lambda p: _break(p / "state.json"),
    "model": lambda p: _break(p / "model" / "model.safetensors"),
    "optimizer": lambda p: [_break(f) for f in (p / "optimizer").glob("*.distcp")],
    "optimizer/": lambda p: (p / "optimizer" / ".metadata").unlink(),
    "optimizer folder": lambda p: shutil.rmtree(p / "optimizer"),
    "distcp": lambda p: [f.unlink() for f in (p / "optimizer").glob("*.distcp")],
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_broken_checkpoint_is_an_error_and_changes_nothing(
    checkpoint: str, tmp_path: Path, what: str, stepped: bool
) -> None:
    policy, untouched = (TorchPolicy(checkpoint, learning_rate=0.1) for _ in range(2))
    for built in (policy, untouched) if stepped else ():
        built.train_step(a_batch(), ONE, nll)
    other = TorchPolicy(checkpoint, learning_rate=0.05)
    other.train_step(a_batch(), ONE, nll)
    other.save(str(tmp_path / "step_1"), {})
    BROKEN[what](tmp_path / "step_1")
    with pytest.raises(ValueError, match=r"use another checkpoint|fetch or write it again"):
        policy.load(str(tmp_path / "step_1"))
    assert same(policy, untouched)


def test_an_optimizer_of_other_entries_is_refused(checkpoint: str, tmp_path: Path) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    policy.train_step(a_batch(), ONE, nll)
    policy.save(tmp_path / "step_1", {})
    (tmp_path / "step_1" / "policy.json").unlink()  # as burnish-trainer 0.1 wrote them
    momentum = {"optimizer": "torch.optim.SGD", "optimizer_args": {"momentum": 0.9}}
    for arguments in (momentum, {"frozen": ["*.layers.0.*"]}):
        other, untouched = (TorchPolicy(checkpoint, learning_rate=0.1, **arguments) for _ in "ab")
        with pytest.raises(ValueError, match="kind and the trained parameters"):
            other.load(tmp_path / "step_1")
        assert same(other, untouched)


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(
    checkpoint: str, tmp_path: Path
) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"state must be JSON values.*NumPy"):
        policy.save(tmp_path / "step_1", {"step": np.int64(1)})
    assert not list(tmp_path.iterdir())


def test_the_checkpoint_a_policy_was_built_from_is_kept(checkpoint: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        shutil.copytree(checkpoint, tmp_path / f"step_{step}" / "model")
        (tmp_path / f"step_{step}" / "state.json").write_text("{}")
    delete_old_checkpoints(tmp_path, keep=1, source=tmp_path / "step_1" / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_3"]
