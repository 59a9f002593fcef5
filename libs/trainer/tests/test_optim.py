"""Optimizers and schedules by dotted path: one step by hand, splits, resume, rates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import TorchPolicy, schedules
from burnish_trainer.optim import build_optimizer, build_optimizers, schedule_factor
from burnish_trainer.parallelize import full_tensor, shard_parameters
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
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


class SignSGD(torch.optim.Optimizer):
    """A step of the rate against the gradient's sign, with a count beside it."""

    def __init__(self, params: Iterable[Tensor], lr: float, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", torch.zeros_like(p)) + 1
                    p.sub_(p.grad.sign() * group["lr"] * group["scale"])


def make_importable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The dotted path of `SignSGD`, from the root of the repository."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    return "libs.trainer.tests.test_optim.SignSGD"


def test_an_optimizer_of_ones_own_by_its_dotted_path(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "learning_rate": 2.0**-10,
        "optimizer": make_importable(monkeypatch),
        "optimizer_args": {"scale": 2.0},
    }
    policy = TorchPolicy(checkpoint, **settings)
    before = weights(policy)
    policy.train_step(a_batch(), SLOTS, weighted_nll)
    for name, tensor in weights(policy).items():
        steps = (tensor - before[name]).abs()
        assert ((steps == 0) | ((steps - 2.0**-9).abs() < 1e-6)).all(), name
    policy.save(tmp_path / "step_000001", {})
    resumed = TorchPolicy(checkpoint, **settings)
    resumed.load(tmp_path / "step_000001")
    counts = [state["count"].max().item() for state in resumed._optimizers[0].state.values()]
    assert set(counts) == {1.0}


MATRICES = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest(checkpoint: str) -> None:
    policy = TorchPolicy(
        checkpoint,
        learning_rate=1e-2,
        optimizer="torch.optim.Muon",
        optimizer_args={"weight_decay": 0.03},
    )
    names = {id(p): name for name, p in policy._model.model.named_parameters()}
    muon, adamw = policy._optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    of_muon, of_adamw = (
        {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in (muon, adamw)
    )
    assert of_muon == {name for name in names.values() if name.split(".")[-2] in MATRICES}
    assert of_adamw == set(names.values()) - of_muon
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < of_adamw
    assert [g["weight_decay"] for o in (muon, adamw) for g in o.param_groups] == [0.03, 0.03]


def newton_schulz(matrix: Tensor) -> Tensor:
    """Jordan's quintic iteration, written out: five steps in bfloat16."""
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def muon_model() -> tuple[LlamaForCausalLM, dict[str, Tensor]]:
    """A model and gradients of full rank: the iteration blows up what is rounding otherwise."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    return model, {name: torch.randn(p.shape) for name, p in model.named_parameters()}


def step_with(model: torch.nn.Module, gradients: Mapping[str, Tensor], **arguments: Any) -> None:
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    for optimizer in build_optimizers(
        model, optimizer="torch.optim.Muon", learning_rate=0.01, optimizer_args=arguments
    ):
        optimizer.step()


def test_a_step_of_muon_is_the_orthogonalized_gradient() -> None:
    name = "model.layers.0.mlp.down_proj.weight"  # [64, 96]
    model, gradients = muon_model()
    before = model.get_parameter(name).detach().clone()
    alone = torch.nn.Parameter(before.clone())
    alone.grad = gradients[name].clone()
    torch.optim.Muon([alone], lr=0.01, weight_decay=0.25, adjust_lr_fn="match_rms_adamw").step()
    step_with(model, gradients, weight_decay=0.25)
    after = model.get_parameter(name).detach()
    assert torch.equal(after, alone)
    # Nesterov's first step is a multiple of the gradient, which the orthogonalization forgets.
    step = 0.01 * 0.2 * math.sqrt(96) * newton_schulz(gradients[name])
    # The iteration is in bfloat16 and amplifies what its order of sums rounds off.
    assert (after - (before * (1 - 0.01 * 0.25) - step)).norm() < 0.05 * step.norm()


def test_two_optimizers_resume_bit_for_bit(checkpoint: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "optimizer": "torch.optim.Muon"}
    whole = TorchPolicy(checkpoint, **settings)
    for _ in range(2):
        whole.train_step(a_batch(), SLOTS, weighted_nll)
    whole.save(tmp_path / "step_000002", {})
    resumed = TorchPolicy(checkpoint, **settings)
    resumed.load(tmp_path / "step_000002")
    for _ in range(2):
        assert whole.train_step(a_batch(), SLOTS, weighted_nll) == resumed.train_step(
            a_batch(), SLOTS, weighted_nll
        )
    for (name, a), (_, b) in zip(whole.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(a, b), name


def _rank_main(rank: int, checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    model, gradients = muon_model()
    shard_parameters(model, device=torch.device("cpu"), compute_dtype=torch.float32)
    step_with(model, gradients)
    stepped = {name: full_tensor(p) for name, p in model.named_parameters()}
    shard, slots = shard_batch(a_batch(), [[(0, 1)], [(2, 3)]])[rank]
    policy = TorchPolicy(checkpoint, learning_rate=1e-2, optimizer="torch.optim.Muon")
    losses = [policy.train_step(shard, slots, weighted_nll)["train/loss"] for _ in range(3)]
    after = weights(policy)
    policy.save(Path(folder) / "step_000003", {})
    if rank == 0:
        torch.save((stepped, losses, after), Path(folder) / "result.pt")
    torch.distributed.destroy_process_group()


def test_muon_on_two_ranks_equals_one(checkpoint: str, tmp_path: Path) -> None:
    """To the rounding of the iteration's bfloat16: a shard orthogonalized alone is far off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(_rank_main, (checkpoint, str(tmp_path)), nprocs=2)
    stepped, losses, after = torch.load(tmp_path / "result.pt", weights_only=False)
    model, gradients = muon_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_with(model, gradients)
    for name, parameter in model.named_parameters():
        moved = (parameter - before[name]).norm()
        assert (stepped[name] - parameter).norm() <= 0.05 * moved, name
    gradient = gradients["model.layers.0.mlp.down_proj.weight"]
    halves = torch.cat([newton_schulz(half) for half in gradient.chunk(2)])
    whole = newton_schulz(gradient)
    assert (halves - whole).norm() > 0.2 * whole.norm()  # what the tolerance is to catch

    one = TorchPolicy(checkpoint, learning_rate=1e-2, optimizer="torch.optim.Muon")
    expected = [
        one.train_step(a_batch(), [(0, 1, 2, 3)], weighted_nll)["train/loss"] for _ in range(3)
    ]
    assert losses == pytest.approx(expected, rel=1e-2)
    assert expected[0] - expected[2] > 0.1
    one.load(tmp_path / "step_000003")
    for name, tensor in one.named_weights():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torch.optim.Muon"])
def test_misspelt_arguments_are_refused(checkpoint: str, optimizer: str) -> None:
    with pytest.raises(ValueError, match=re.compile(f"arguments of {optimizer}.*weight_decy")):
        TorchPolicy(
            checkpoint,
            learning_rate=1e-2,
            optimizer=optimizer,
            optimizer_args={"weight_decy": 0.1},
        )


@pytest.mark.parametrize("path", ["AdamW", "torch.optim.Adan", "no_such.module.Adam", "torch.e"])
def test_a_path_that_names_no_class_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be a dotted path, got .*AdamW"):
        build_optimizer([torch.nn.Parameter(torch.ones(1))], optimizer=path, learning_rate=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "burnish_trainer.schedules.cosin"}, "schedule must be a dotted path"),
        ({"schedule": "cosine"}, "schedule must be a dotted path"),
        ({"schedule": "burnish_trainer.schedules.cosine"}, "must be those of .*num_steps"),
        ({"schedule_args": {"warm_up": 3}}, "must be those of .*warm_up"),
    ],
)
def test_a_schedule_that_cannot_be_called_is_refused_before_a_step(
    checkpoint: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TorchPolicy(checkpoint, learning_rate=1e-2, **settings)


def test_fused_adamw_is_the_default_and_equals_the_plain_one(checkpoint: str) -> None:
    fused, plain = (
        TorchPolicy(checkpoint, learning_rate=1e-2, optimizer_args=arguments)
        for arguments in (None, {"fused": False})
    )
    assert fused._optimizers[0].defaults["fused"] is True
    assert plain._optimizers[0].defaults["fused"] is False
    start = weights(fused)
    for policy in (fused, plain):
        for _ in range(3):
            policy.train_step(a_batch(), SLOTS, weighted_nll)
    got = weights(fused)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)
        assert (tensor - start[name]).abs().max() > 1e-3, name


def test_nothing_is_built_without_a_learning_rate() -> None:
    model = torch.nn.Linear(2, 2)
    assert build_optimizers(model, optimizer="torch.optim.AdamW", learning_rate=None) == []
    (built,) = build_optimizers(model, optimizer="torch.optim.AdamW", learning_rate=0.5)
    assert built.param_groups[0]["lr"] == 0.5


HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        (schedules.constant, {}, [1, 1, 1]),
        (schedules.constant, {"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        (schedules.linear, {"num_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        (schedules.linear, {"num_steps": 4, "final": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (
            schedules.linear,
            {"num_steps": 5, "warmup_steps": 1},
            [0.5, 1, 0.75, 0.5, 0.25, 0],
        ),
        (
            schedules.cosine,
            {"num_steps": 4},
            [1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0, 0],
        ),
        (
            schedules.cosine,
            {"num_steps": 6, "warmup_steps": 2, "final": 0.5},
            [1 / 3, 2 / 3, 1, (3 + HALF) / 4, 0.75, (3 - HALF) / 4, 0.5],
        ),
        (
            schedules.warmup_stable_decay,
            {"num_steps": 8, "warmup_steps": 1, "decay_steps": 4},
            [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0],
        ),
        (
            schedules.warmup_stable_decay,
            {"num_steps": 4, "decay_steps": 2, "final": 0.1},
            [1, 1, 1, 0.55, 0.1, 0.1],
        ),
    ],
)
def test_schedules_worked_by_hand(
    function: Callable[..., float], settings: dict[str, Any], expected: list[float]
) -> None:
    path = f"burnish_trainer.schedules.{function.__name__}"
    got = [schedule_factor(path, step, settings) for step in range(len(expected))]
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torch.optim.Muon"])
def test_a_schedule_goes_on_after_a_resume(checkpoint: str, tmp_path: Path, optimizer: str) -> None:
    settings: dict[str, Any] = {
        "learning_rate": 0.008,
        "optimizer": optimizer,
        "schedule": "burnish_trainer.schedules.linear",
        "schedule_args": {"num_steps": 4},
    }

    def rates(policy: TorchPolicy, steps: int) -> list[float]:
        metrics = [policy.train_step(a_batch(), SLOTS, weighted_nll) for _ in range(steps)]
        groups = [group["lr"] for o in policy._optimizers for group in o.param_groups]
        assert set(groups) == {metrics[-1]["train/learning_rate"]}
        return [metric["train/learning_rate"] for metric in metrics]

    policy = TorchPolicy(checkpoint, **settings)
    first = rates(policy, 2)
    policy.save(tmp_path / "step_000002", {})
    resumed = TorchPolicy(checkpoint, **settings)
    resumed.load(tmp_path / "step_000002")
    assert first + rates(resumed, 2) == pytest.approx([0.008, 0.006, 0.004, 0.002], rel=1e-12)


def test_a_learning_rate_held_in_a_tensor_stays_that_tensor() -> None:
    """As torchao's optimizers, which compile their step, hold it."""
    from burnish_trainer.optim import set_learning_rate

    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate, foreach=False)
    got = set_learning_rate(
        [optimizer], 0.5, "burnish_trainer.schedules.linear", 1, {"num_steps": 4}
    )
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == got == 0.375
