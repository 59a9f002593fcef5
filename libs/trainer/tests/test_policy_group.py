"""A policy on Ray workers: the same training as in one process, whatever the number of ranks."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burnish_converters import read_weights
from burnish_distributed import RaggedBatch, rank
from burnish_distributed.cluster import ray_cluster
from burnish_distributed.weight_transport import get_weights
from burnish_distributed.workers import WorkerError
from burnish_losses.reduce import LossOutput, Metric, Term, masked_sum
from burnish_packing import plan_micro_batches
from burnish_trainer import TorchPolicy, latest_checkpoint
from burnish_trainer.policy_group import Plan, PolicyGroup
from ray import cloudpickle
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# Workers cannot import a module that pytest imported by path, so its functions travel as code.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Run = tuple[dict[str, float], dict[str, Tensor]]


@dataclass
class HandMade:
    """A plan as `Plan` wants it."""

    ranks: list[list[tuple[int, ...]]]
    mode: str = "packed"


def weighted_nll(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    total = masked_sum(-logprobs * columns["advantages"], columns["token_mask"])
    return LossOutput((Term(total, "tokens"),), {"nll": Metric(total.detach(), "tokens", "mean")})


def one_token_lost_on_the_last_rank(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    mask = columns["token_mask"].clone()
    mask[-1] = mask[-1] & (rank() == 0)
    return weighted_nll(logprobs, {**columns, "token_mask": mask})


def recorded_batch() -> RaggedBatch:
    """Two prompts with three completions each, and one sequence on its own."""
    generator = np.random.default_rng(0)
    rows, ids, prefix = [], [], []
    for group, (num_prompt, completions) in enumerate([(7, (4, 9, 2)), (11, (3, 3, 8))]):
        prompt = generator.integers(0, 97, num_prompt)
        for length in completions:
            rows.append((prompt, generator.integers(0, 97, length)))
            ids.append(group)
            prefix.append(num_prompt)
    rows.append((generator.integers(0, 97, 5), generator.integers(0, 97, 6)))
    return RaggedBatch.from_rows(
        [
            {
                "token_ids": np.concatenate([prompt, completion]),
                "token_mask": np.arange(len(prompt) + len(completion)) >= len(prompt),
                "advantages": generator.normal(size=len(prompt) + len(completion)).astype("f4"),
            }
            for prompt, completion in rows
        ],
        {"prefix_ids": [*ids, -1], "prefix_lengths": [*prefix, 0]},
    )


def plan_for(batch: RaggedBatch, num_ranks: int, max_tokens: int) -> Plan:
    columns = batch.sequence_columns
    return plan_micro_batches(
        batch.lengths,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        prefix_ids=columns["prefix_ids"],
        prefix_lengths=columns["prefix_lengths"],
    )


POLICY: dict[str, Any] = {
    "device": "cpu",
    "learning_rate": 0.1,
    "optimizer": "torch.optim.SGD",
    "max_grad_norm": 1e9,
    "reference": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(checkpoint: str) -> TorchPolicy:
    """The same policy in this process, before any step."""
    return TorchPolicy(checkpoint, **POLICY)


ALL = [(0, 1, 2, 3, 4, 5, 6)]


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> Run:
    """Three steps in this process, without shared prefixes."""
    batch = recorded_batch()
    plain = RaggedBatch(batch.lengths, batch.token_columns)
    policy = TorchPolicy(checkpoint, **POLICY)
    metrics = [policy.train_step(plain, ALL, weighted_nll) for _ in range(3)]
    return metrics[0], {name: tensor.clone() for name, tensor in policy.named_weights()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=2):
        yield


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def started(
    request: pytest.FixtureRequest, cluster: None, checkpoint: str, tmp_path_factory: Any
) -> Iterator[tuple[PolicyGroup, Path]]:
    group = PolicyGroup(
        POLICY | {"model": checkpoint},
        num_ranks=request.param,
        environment={"OMP_NUM_THREADS": "1"},
        num_cpus=0.1,
    )
    start = tmp_path_factory.mktemp("start") / "step_000000"
    group.save(start, {"step": 0})
    yield group, start
    group.close()


@pytest.fixture
def group(started: tuple[PolicyGroup, Path]) -> PolicyGroup:
    """The group, back at its first weights."""
    policy_group, start = started
    assert policy_group.load(start)["step"] == 0
    return policy_group


def three_steps(group: PolicyGroup, plan: Plan, loss_fn: Any = weighted_nll) -> Run:
    metrics = [group.train_step(recorded_batch(), plan, loss_fn) for _ in range(3)]
    return metrics[0], dict(get_weights(group.publish_weights()))


def assert_equal_run(got: Run, expected: Run, start: Mapping[str, Tensor]) -> None:
    """Loss, norm and metrics to 1e-5; weights to 1e-5 of the way moved, and three roundings."""
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        moved = (tensor - start[name]).abs().max()
        rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (got[1][name] - tensor).abs().max() <= 1e-5 * moved + rounding, name


@pytest.mark.parametrize("max_tokens", [20, 64])
def test_any_number_of_ranks_trains_as_one_process(
    group: PolicyGroup, alone: TorchPolicy, expected: Run, max_tokens: int
) -> None:
    plan = plan_for(recorded_batch(), group.num_ranks, max_tokens)
    assert len(plan.ranks) == group.num_ranks
    got = three_steps(group, plan)
    assert_equal_run(got, expected, dict(alone.named_weights()))
    assert (got[0]["train/num_tokens"], got[0]["train/num_sequences"]) == (35, 7)


def test_a_rank_with_an_empty_slot_trains_with_the_others(
    group: PolicyGroup, alone: TorchPolicy, expected: Run
) -> None:
    ranks = [[(), *ALL], [(), ()]] if group.num_ranks == 2 else [[(), (2, 0, 1), (6, 3, 5, 4)]]
    got = three_steps(group, HandMade(ranks))
    assert_equal_run(got, expected, dict(alone.named_weights()))


def test_a_gradient_that_is_wrong_on_one_rank_is_noticed(
    group: PolicyGroup, alone: TorchPolicy, expected: Run
) -> None:
    plan = plan_for(recorded_batch(), group.num_ranks, 64)
    got = three_steps(group, plan, one_token_lost_on_the_last_rank)
    if group.num_ranks == 1:  # there is no last rank to lose it: the loss function is sound
        assert_equal_run(got, expected, dict(alone.named_weights()))
        return
    with pytest.raises(AssertionError):
        assert_equal_run(got, expected, dict(alone.named_weights()))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_come_back_in_the_order_of_the_batch(
    group: PolicyGroup, alone: TorchPolicy, temperature: float
) -> None:
    batch = recorded_batch()
    expected = alone.logprobs(batch, ALL, temperature=temperature)
    plans = [
        plan_for(batch, group.num_ranks, 20),
        HandMade([[(6, 2), (5,)], [(0, 4), (3, 1)]][: group.num_ranks])
        if group.num_ranks == 2
        else HandMade([[(6, 2), (5, 0, 4), (3, 1)]]),
    ]
    for plan in plans:
        got = group.logprobs(batch, plan, temperature=temperature)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        assert ((got != 0) == batch.token_columns["token_mask"]).all()


def test_the_reference_stays_while_the_policy_moves(group: PolicyGroup, alone: TorchPolicy) -> None:
    batch = recorded_batch()
    plan = plan_for(batch, group.num_ranks, 64)
    group.train_step(batch, plan, weighted_nll)
    before = alone.logprobs(batch, ALL)
    np.testing.assert_allclose(group.reference_logprobs(batch, plan), before, atol=1e-5)
    assert np.abs(group.logprobs(batch, plan) - before).max() > 1e-3


def test_published_weights_are_the_saved_ones_bit_for_bit(
    group: PolicyGroup, tmp_path: Path
) -> None:
    batch = recorded_batch()
    group.train_step(batch, plan_for(batch, group.num_ranks, 64), weighted_nll)
    published = dict(get_weights(group.publish_weights()))
    group.save(tmp_path / "step_000001", {"step": 1})
    saved = dict(read_weights(tmp_path / "step_000001" / "model"))
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)


def test_a_checkpoint_brings_everything_back(group: PolicyGroup, tmp_path: Path) -> None:
    batch = recorded_batch()
    plan = plan_for(batch, group.num_ranks, 64)
    group.train_step(batch, plan, weighted_nll)
    group.save(tmp_path / "step_000001", {"step": 1, "data": {"position": 8}})
    continued = three_steps(group, plan)
    state = group.load(tmp_path / "step_000001")
    assert (state["step"], state["data"]) == (1, {"position": 8})
    resumed = three_steps(group, plan)
    assert resumed[0] == continued[0]
    assert all(torch.equal(resumed[1][name], continued[1][name]) for name in continued[1])


def test_only_the_latest_checkpoints_are_kept(group: PolicyGroup, tmp_path: Path) -> None:
    for step in (1, 2, 9, 10):
        group.save(tmp_path / f"step_{step}", {"step": step}, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_9", "step_10"}
    assert latest_checkpoint(tmp_path) == tmp_path / "step_10"


def test_a_non_finite_gradient_is_told_and_harms_nothing(
    group: PolicyGroup, alone: TorchPolicy, expected: Run
) -> None:
    batch = recorded_batch()
    plan = plan_for(batch, group.num_ranks, 64)
    bad = np.where(np.arange(batch.num_tokens) == 8, np.nan, batch.token_columns["advantages"])
    assert batch.token_columns["token_mask"][8]
    with pytest.raises(WorkerError, match="raised NonFiniteGradientError: loss and gradients"):
        group.train_step(batch.with_token_column("advantages", bad), plan, weighted_nll)
    got = three_steps(group, plan)
    assert_equal_run(got, expected, dict(alone.named_weights()))


@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_non_finite_gradient_names_the_sequence_of_the_whole_batch(
    group: PolicyGroup, on_rank: int
) -> None:
    batch, number = recorded_batch(), 4
    bad = batch.token_columns["advantages"].copy()
    bad[batch.offsets[number + 1] - 1] = np.nan
    ranks = [[(6, 2), (5, 0, 1)], [(3,), (4,)]]
    ranks = ranks if on_rank else ranks[::-1]
    place = f"micro-batch 1 of rank {on_rank}"
    if group.num_ranks == 1:
        ranks, place = [ranks[0] + ranks[1]], f"micro-batch {1 + 2 * on_rank} of rank 0"
    told = rf"from {place} \(sequences 4; .*columns with NaN or infinity: advantages\)\. The"
    with pytest.raises(WorkerError, match=told):
        group.train_step(batch.with_token_column("advantages", bad), HandMade(ranks), weighted_nll)


def test_evaluation_and_likeliest_tokens_are_those_of_one_process(
    group: PolicyGroup, alone: TorchPolicy
) -> None:
    batch = recorded_batch()
    plan = plan_for(batch, group.num_ranks, 20)
    got = group.evaluate(batch, plan, weighted_nll)
    assert got == pytest.approx(alone.evaluate(batch, ALL, weighted_nll), rel=1e-5)
    lost = group.evaluate(batch, plan, one_token_lost_on_the_last_rank)
    assert (lost == got) == (group.num_ranks == 1)  # a token lost on one of two ranks shows
    ids, logprobs = group.topk_logprobs(batch, plan, 3)
    expected_ids, expected_logprobs = alone.topk_logprobs(batch, ALL, 3)
    mask = batch.token_columns["token_mask"]
    np.testing.assert_array_equal(ids[mask], expected_ids[mask])
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)


def test_a_rank_without_sequences_scores_with_the_others(
    group: PolicyGroup, alone: TorchPolicy
) -> None:
    batch = recorded_batch()
    plan = HandMade([[(), *ALL], [(), ()]][: group.num_ranks])
    expected = alone.logprobs(batch, ALL)
    np.testing.assert_allclose(group.logprobs(batch, plan), expected, atol=1e-5)


def test_a_policy_that_comes_back_to_its_device_is_the_same(group: PolicyGroup) -> None:
    batch = recorded_batch()
    plan = plan_for(batch, group.num_ranks, 64)
    before = group.logprobs(batch, plan)
    group.offload()
    group.onload()
    np.testing.assert_array_equal(group.logprobs(batch, plan), before)
    assert group.train_step(batch, plan, weighted_nll)["train/skipped"] == 0


def test_a_plan_of_another_batch_or_other_ranks_is_refused(group: PolicyGroup) -> None:
    batch = recorded_batch()
    with pytest.raises(ValueError, match="each of the 6 sequences exactly once"):
        group.logprobs(batch.select(range(6)), plan_for(batch, group.num_ranks, 64))
    with pytest.raises(ValueError, match=rf"one tuple per worker \({group.num_ranks}\), got 3"):
        group.train_step(batch, plan_for(batch, 3, 64), weighted_nll)


@pytest.fixture
def start_group(cluster: None, checkpoint: str) -> Iterator[Callable[..., PolicyGroup]]:
    groups: list[PolicyGroup] = []

    def start(num_ranks: int = 2, name: str = "policy", **policy_args: Any) -> PolicyGroup:
        groups.append(
            PolicyGroup(
                POLICY | {"model": checkpoint, "reference": False} | policy_args,
                num_ranks=num_ranks,
                name=name,
                environment={"OMP_NUM_THREADS": "1"},
                num_cpus=0.1,
            )
        )
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def test_a_reference_in_workers_of_its_own_is_the_policys_own_reference(
    start_group: Callable[..., PolicyGroup], alone: TorchPolicy
) -> None:
    reference = start_group(1, name="reference", learning_rate=None)
    policy = start_group(2, reference=True)
    batch = recorded_batch()
    plan = plan_for(batch, 2, 64)
    policy.train_step(batch, plan, weighted_nll)
    got = reference.logprobs(batch, HandMade([ALL]))
    np.testing.assert_allclose(got, policy.reference_logprobs(batch, plan), atol=1e-5)
    assert np.abs(got - policy.logprobs(batch, plan)).max() > 1e-3
    with pytest.raises(WorkerError, match="of reference raised ValueError: training needs a"):
        reference.train_step(batch, HandMade([ALL]), weighted_nll)


@pytest.mark.parametrize(("head", "method"), [("reward", "scores"), ("value", "values")])
def test_numbers_of_a_head_come_back_in_the_order_of_the_batch(
    start_group: Callable[..., PolicyGroup], checkpoint: str, head: Any, method: str
) -> None:
    batch = recorded_batch()
    group = start_group(head=head)
    expected = getattr(TorchPolicy(checkpoint, learning_rate=None, head=head), method)(batch, ALL)
    assert len(np.unique(expected.round(4))) > 6  # an order that is wrong would be seen
    got = getattr(group, method)(batch, HandMade([[(6, 2), (5,)], [(0, 4), (3, 1)]]))
    np.testing.assert_allclose(got, expected, atol=1e-5)


TORCHRUN = """
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from burnish_distributed import RaggedBatch, rank
from burnish_losses.reduce import LossOutput, Metric, Term, masked_sum
from burnish_packing import plan_micro_batches
from burnish_trainer import NonFiniteGradientError, policy_group
from burnish_trainer.policy_group import Plan, PolicyGroup
from torch import Tensor

FUNCTIONS

def raised(function, *arguments, **kwargs):
    try:
        function(*arguments, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder, arguments):
    deletions = []
    delete = policy_group.delete_old_checkpoints
    policy_group.delete_old_checkpoints = lambda *a, **k: (deletions.append(a), delete(*a, **k))
    batch, plan = recorded_batch(), plan_for(recorded_batch(), 2, 20)
    odd = HandMade([[(6, 2), (5,)], [(0, 4), (3, 1)]])
    group = PolicyGroup(arguments, launcher="torchrun", num_ranks=2)
    found = {"num_ranks": group.num_ranks, "logprobs": group.logprobs(batch, odd)}
    found["evaluate"] = group.evaluate(batch, odd, weighted_nll)
    group.save(folder / "step_0", {"step": 0})
    found["metrics"] = [group.train_step(batch, plan, weighted_nll) for _ in range(3)][0]
    found["reference"] = group.reference_logprobs(batch, odd)
    found["moved"] = group.logprobs(batch, odd)
    for step in (1, 2, 3):
        group.save(folder / f"step_{step}", {"step": step}, keep=2)
    found["left"] = sorted(path.name for path in folder.glob("step_*"))
    found["deletions"] = len(deletions)
    found["state"] = group.load(folder / "step_3")
    found["resumed"] = group.logprobs(batch, odd)

    bad = batch.token_columns["advantages"].copy()
    bad[batch.offsets[5] - 1] = np.nan
    worse = batch.with_token_column("advantages", bad)
    ranks = HandMade([[(6, 2), (5, 0, 1)], [(3,), (4,)]])
    found["nan"] = raised(group.train_step, worse, ranks, weighted_nll)
    found["plan"] = raised(group.train_step, batch, plan_for(batch, 3, 64), weighted_nll)
    found["ranks"] = raised(PolicyGroup, arguments, launcher="torchrun", num_ranks=3)

    head = arguments | {"head": "reward", "reference": False}
    found["scores"] = PolicyGroup(head, launcher="torchrun").scores(batch, odd)
    found["published"] = raised(group.publish_weights)
    found["weights"] = {name: tensor.clone() for name, tensor in group.named_weights()}
    found["ray"] = "ray" in sys.modules
    torch.save(found, folder / f"rank_{rank()}.pt")
    group.close()
    found["is_open"] = torch.distributed.is_initialized()
    assert not found["is_open"]


folder = Path(sys.argv[1])
main(folder, torch.load(folder / "arguments.pt"))
"""


@pytest.fixture(scope="module")
def torchrun(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks under torchrun found."""
    folder = tmp_path_factory.mktemp("torchrun")
    torch.save(POLICY | {"model": checkpoint}, folder / "arguments.pt")
    functions = [HandMade, weighted_nll, recorded_batch, plan_for]
    source = "\n\n".join(map(inspect.getsource, functions))
    script = folder / "script.py"
    script.write_text(TORCHRUN.replace("FUNCTIONS", source))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--standalone", str(script), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = [torch.load(folder / f"rank_{i}.pt", weights_only=False) for i in range(2)]
    saved = dict(read_weights(folder / "step_3" / "model"))
    for rank_found in found:
        published = rank_found["published"]
        assert "through Ray, got a group without; iterate over named_weights" in published
        assert saved.keys() == rank_found["weights"].keys()
        assert all(torch.equal(saved[n], t) for n, t in rank_found["weights"].items())
    return found


class TestTorchrun:
    def test_it_trains_as_one_process(
        self, torchrun: list[dict[str, Any]], alone: TorchPolicy, expected: Run
    ) -> None:
        for found in torchrun:
            assert found["num_ranks"] == 2
            got = (found["metrics"], torchrun[0]["weights"])
            assert_equal_run(got, expected, dict(alone.named_weights()))

    def test_it_scores_as_one_process_in_the_order_of_the_batch(
        self, torchrun: list[dict[str, Any]], alone: TorchPolicy, checkpoint: str
    ) -> None:
        batch = recorded_batch()
        logprobs = alone.logprobs(batch, ALL)
        reward = TorchPolicy(checkpoint, learning_rate=None, head="reward")
        evaluated = alone.evaluate(batch, ALL, weighted_nll)
        for found in torchrun:
            np.testing.assert_allclose(found["logprobs"], logprobs, atol=1e-5)
            np.testing.assert_allclose(found["reference"], logprobs, atol=1e-5)
            assert np.abs(found["moved"] - logprobs).max() > 1e-3
            np.testing.assert_allclose(found["scores"], reward.scores(batch, ALL), atol=1e-5)
            assert found["evaluate"] == pytest.approx(evaluated, rel=1e-5)

    def test_checkpoints_come_back_and_rank_0_alone_deletes_old_ones(
        self, torchrun: list[dict[str, Any]]
    ) -> None:
        for found in torchrun:
            assert found["left"] == ["step_2", "step_3"]
            assert found["state"]["step"] == 3
            np.testing.assert_array_equal(found["resumed"], found["moved"])
        assert [found["deletions"] for found in torchrun] == [3, 0]

    def test_errors_are_those_of_the_ranks(self, torchrun: list[dict[str, Any]]) -> None:
        for found in torchrun:
            told = r"NonFiniteGradientError: .* from micro-batch 1 of rank 1 \(sequences 4; "
            assert re.match(told, found["nan"]), found["nan"]
            assert found["plan"].startswith("ValueError: per_rank must hold one tuple per rank (2)")
            assert found["ranks"].startswith(
                "ValueError: torchrun must have started 3 ranks, got 2"
            )

    def test_ray_is_not_imported(self, torchrun: list[dict[str, Any]]) -> None:
        assert [found["ray"] for found in torchrun] == [False, False]


@pytest.mark.parametrize(
    ("environment", "num_ranks", "message"),
    [
        ({}, None, "torchrun must have started the ranks, got no RANK and WORLD_SIZE"),
        ({"RANK": "0"}, 2, "torchrun must have started 2 ranks, got no RANK and WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 3, "torchrun must have started 3 ranks, got 2"),
    ],
)
def test_torchrun_that_started_nothing_or_other_ranks(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], num_ranks: Any, message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        PolicyGroup({"model": "/nowhere"}, launcher="torchrun", num_ranks=num_ranks)


def test_a_launcher_that_is_none() -> None:
    with pytest.raises(ValueError, match="launcher must be ray, torchrun or local, got 'slurm'"):
        PolicyGroup({"model": "/nowhere"}, launcher="slurm")  # type: ignore[arg-type]


def test_a_local_group_is_the_policy_itself(
    checkpoint: str, alone: TorchPolicy, expected: Run, tmp_path: Path
) -> None:
    batch, plan = recorded_batch(), plan_for(recorded_batch(), 1, 64)
    group = PolicyGroup(POLICY | {"model": checkpoint}, launcher="local")
    np.testing.assert_allclose(group.logprobs(batch, plan), alone.logprobs(batch, ALL), atol=1e-5)
    metrics, *_ = [group.train_step(batch, plan, weighted_nll) for _ in range(3)]
    weights = {name: tensor.clone() for name, tensor in group.named_weights()}
    assert_equal_run((metrics, weights), expected, dict(alone.named_weights()))
    group.save(str(tmp_path / "step_1"), {"step": 1}, keep=1)
    assert group.load(str(tmp_path / "step_1"))["step"] == 1
    group.close()
    with pytest.raises(ValueError, match="one rank, got num_ranks=2"):
        PolicyGroup({"model": "/nowhere"}, launcher="local", num_ranks=2)
