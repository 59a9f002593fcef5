"""The stages of a step on plain data, without Ray or an engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_task
from burnish_apps.grpo import stages
from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.grpo.main import RECIPES, is_due, training_sampling
from burnish_apps.grpo.report import (
    sample_line,
    sample_record,
    step_line,
    summary,
    with_rates,
)
from burnish_apps.shell.config import load_config
from burnish_distributed import shard_batch
from burnish_envs import Rollout, RolloutGroup, Turn
from burnish_generation import Completion, Replicas, Sampling

HALF = math.sqrt(3) / 2  # rewards 1, 0, 0, 1: mean 1/2, sample deviation sqrt(1/3)


@pytest.fixture
def config(tiny_recipe: Path) -> Callable[..., GrpoConfig]:
    return lambda *overrides: load_config(GrpoConfig, RECIPES, str(tiny_recipe), overrides)


def rollout(group: int, index: int, reward: float, tokens: Sequence[int]) -> Rollout:
    """A judged rollout with a prompt of ``group + 2`` tokens."""
    prompt = tuple(range(100, 102 + group))
    logprobs = tuple(-0.5 * (t + 1) for t in range(len(tokens)))
    turn = Turn(prompt, tuple(tokens), logprobs, "stop", 7 + group, f"text {index}")
    status = "error" if math.isnan(reward) else "ok"
    return Rollout({"id": f"row-{group}", "prompt": "a\nb"}, group, index, (turn,), reward, status)


def make_groups(rewards: Sequence[Sequence[float]]) -> list[RolloutGroup]:
    """One group per list of rewards; rollout i has i + 1 sampled tokens."""
    return [
        RolloutGroup(g, tuple(rollout(g, i, r, range(i + 1)) for i, r in enumerate(row)))
        for g, row in enumerate(rewards)
    ]


class TestTrainingBatch:
    def test_literal_columns(self, config: Callable[..., GrpoConfig]) -> None:
        groups = make_groups([[1, 0, 0, 1], [1, 1, 1, 1], [math.nan, 2, 0, 4]])
        batch, statistics = stages.training_batch(groups, config())
        assert batch is not None
        # the second group has no spread; prompts of 2 and 4 tokens before 1 to 4 sampled ones
        assert batch.lengths.tolist() == [3, 4, 5, 6, 5, 6, 7, 8]
        assert batch.sequence_columns["prefix_ids"].tolist() == [0] * 4 + [2] * 4
        assert batch.sequence_columns["prefix_lengths"].tolist() == [2] * 4 + [4] * 4
        advantages = [column[0] for column in batch.sequences("advantages")]
        np.testing.assert_allclose(advantages, [HALF, -HALF, -HALF, HALF, 0, 0, -1, 1], rtol=1e-6)
        assert all(len(set(column.tolist())) == 1 for column in batch.sequences("advantages"))
        assert batch.sequences("token_ids")[1].tolist() == [100, 101, 0, 1]
        assert batch.sequences("token_mask")[1].tolist() == [False, False, True, True]
        assert batch.sequences("sampled_logprobs")[1].tolist() == [0.0, 0.0, -0.5, -1.0]
        # a failed rollout trains nothing, though it is there
        assert not batch.sequences("token_mask")[4].any()
        assert [int(mask.sum()) for mask in batch.sequences("token_mask")] == [
            *(1, 2, 3, 4),
            *(0, 2, 3, 4),
        ]
        assert all(np.isfinite(column).all() for column in batch.token_columns.values())
        assert statistics["rollout/groups_without_spread"] == 1
        assert statistics["rollout/failed"] == 1
        assert statistics["reward/mean"] == pytest.approx((2 + 4 + 6) / 11)
        assert statistics["reward/accuracy"] == pytest.approx(8 / 11)
        assert statistics["rollout/num_tokens"] == 30
        assert statistics["rollout/completion_tokens"] == 2.5
        assert statistics["rollout/weight_version"] == 7

    def test_advantages_without_the_deviation(self, config: Callable[..., GrpoConfig]) -> None:
        plain = config("training.normalize_advantages=false")
        batch, _ = stages.training_batch(make_groups([[1, 0, 0, 1]]), plain)
        assert batch is not None
        advantages = [column[0] for column in batch.sequences("advantages")]
        assert advantages == [0.5, -0.5, -0.5, 0.5]

    @pytest.mark.parametrize(
        "rewards",
        [
            [[1, 1], [0, 0]],
            [[math.nan, math.nan], [math.nan, math.nan]],
            [[math.nan, 1], [0, 0]],  # one that counts has nothing to be compared with
        ],
    )
    def test_none_when_nothing_is_left(
        self, config: Callable[..., GrpoConfig], rewards: list[list[float]]
    ) -> None:
        batch, statistics = stages.training_batch(make_groups(rewards), config())
        assert batch is None
        assert statistics["rollout/groups_without_spread"] == 2

    def test_means_of_failed_rollouts_are_unknown(self) -> None:
        statistics = stages.rollout_statistics(make_groups([[math.nan, math.nan]]))
        assert math.isnan(statistics["reward/mean"])
        assert math.isnan(statistics["reward/accuracy"])
        assert statistics["rollout/failed"] == 2


class TestPlan:
    def test_shards_hold_every_sequence_once_and_prompts_once(
        self, config: Callable[..., GrpoConfig]
    ) -> None:
        batch, _ = stages.training_batch(make_groups([[1, 0, 0, 1], [0, 1, 0, 1]]), config())
        assert batch is not None
        plan = stages.plan(batch, config("training.num_ranks=2"))
        # a group costs its prompt once: 2 + 10 and 3 + 10 tokens, one micro-batch on each rank
        assert sorted(plan.ranks) == [((0, 1, 2, 3),), ((4, 5, 6, 7),)]
        shards = shard_batch(batch, plan.ranks)
        assert [slots for _, slots in shards] == [((0, 1, 2, 3),), ((0, 1, 2, 3),)]
        found = {
            (int(prefix), tuple(tokens.tolist()))
            for shard, _ in shards
            for prefix, tokens in zip(
                shard.sequence_columns["prefix_ids"], shard.sequences("token_ids"), strict=True
            )
        }
        assert len(found) == 8

    def test_one_group_on_more_ranks_than_it_fills(self, config: Callable[..., GrpoConfig]) -> None:
        batch, _ = stages.training_batch(make_groups([[1, 0]]), config())
        assert batch is not None
        plan = stages.plan(batch, config("training.num_ranks=4"))
        assert len(plan.ranks) == 4
        assert len({len(slots) for slots in plan.ranks}) == 1
        shard_batch(batch, plan.ranks)  # each sequence once, or it raises


class FakePolicy:
    """Answers as a policy group would; remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], tuple[str, ...]]] = []

    def _note(self, name: str, batch: stages.RaggedBatch) -> None:
        ids = batch.sequence_columns["prefix_ids"].tolist()
        self.calls.append((name, list(dict.fromkeys(ids)), tuple(sorted(batch.token_columns))))

    def logprobs(
        self, batch: stages.RaggedBatch, plan: object, *, temperature: float
    ) -> np.ndarray:
        self._note("logprobs", batch)
        return np.zeros(batch.num_tokens, dtype=np.float32)

    reference_logprobs = logprobs

    def train_step(
        self, batch: stages.RaggedBatch, plan: object, loss_fn: object, *, temperature: float
    ) -> dict[str, float]:
        self._note("train_step", batch)
        update = len([name for name, *_ in self.calls if name == "train_step"])
        return {
            "mismatch/mean_abs": 10.0**update,
            "train/loss": float(update),
            "train/num_tokens": 100.0 * update,
        }


class TestUpdate:
    def test_updates_share_out_the_groups_and_old_logprobs_are_of_before(
        self, config: Callable[..., GrpoConfig]
    ) -> None:
        batch, _ = stages.training_batch(make_groups([[0, 1]] * 4), config())
        assert batch is not None
        policy = FakePolicy()
        two = config("training.updates_per_step=2", "training.kl_coefficient=0.1")
        metrics = stages.update(policy, batch, two)  # type: ignore[arg-type]
        assert [(name, ids) for name, ids, _ in policy.calls] == [
            ("logprobs", [0, 1, 2, 3]),
            ("logprobs", [0, 1, 2, 3]),
            ("train_step", [0, 1]),
            ("train_step", [2, 3]),
        ]
        assert {"old_logprobs", "reference_logprobs"} < set(policy.calls[-1][2])
        assert metrics == {
            "mismatch/mean_abs": 55.0,
            "train/loss": 1.5,
            "train/num_tokens": 300.0,
        }

    def test_one_update_makes_no_other_pass(self, config: Callable[..., GrpoConfig]) -> None:
        batch, _ = stages.training_batch(make_groups([[0, 1]] * 4), config())
        assert batch is not None
        policy = FakePolicy()
        stages.update(policy, batch, config())  # type: ignore[arg-type]
        assert [name for name, *_ in policy.calls] == ["train_step"]
        assert "old_logprobs" not in policy.calls[0][2]

    def test_fewer_groups_than_updates(self, config: Callable[..., GrpoConfig]) -> None:
        batch, _ = stages.training_batch(make_groups([[0, 1], [1, 1], [0, 0]]), config())
        assert batch is not None
        policy = FakePolicy()
        stages.update(policy, batch, config("training.updates_per_step=4"))  # type: ignore[arg-type]
        assert [name for name, *_ in policy.calls] == ["logprobs", "train_step"]


class FakeEngine:
    """Samples fixed tokens."""

    def __init__(self) -> None:
        self.samplings: list[Sampling] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        self.samplings.append(sampling)
        return [Completion((2, len(prompt)), (-1.0, -1.0), "stop", 0) for prompt in prompts]

    def update_weights(self, source: object, weight_version: int) -> int:
        return 0


class TestEvaluate:
    def test_greedy_one_answer_each(self, config: Callable[..., GrpoConfig]) -> None:
        engine = FakeEngine()
        rows = [{"id": "even", "prompt": "ab"}, {"id": "odd", "prompt": "abc"}]
        metrics, groups = stages.evaluate(
            rows,
            tiny_task.EvenTokens(fail_on_call=0, pause_s=0),
            Replicas([engine]),
            config("rollout.stop=[x]"),
            lambda prompt: list(range(len(prompt))),
            lambda token_ids: "text",
        )
        assert metrics == {
            "validation/accuracy": 0.5,
            "validation/completion_tokens": 2.0,
            "validation/failed": 0.0,
        }
        assert [len(group.rollouts) for group in groups] == [1, 1]
        assert engine.samplings == [Sampling(8, temperature=0.0, stop=("x",))]

    def test_training_samples_as_the_recipe_says(self, config: Callable[..., GrpoConfig]) -> None:
        made = training_sampling(config("rollout.temperature=0.7", "rollout.stop=[x]"))
        assert made == Sampling(8, temperature=0.7, stop=("x",))


class TestCheckAgreement:
    def test_within_the_limit(self) -> None:
        stages.check_agreement({"mismatch/mean_abs": 5e-5}, 5e-5)
        stages.check_agreement({"mismatch/mean_abs": 1.0}, None)

    @pytest.mark.parametrize("value", [5.1e-5, 1.0, math.inf, math.nan])
    def test_above_the_limit_or_unknown(self, value: float) -> None:
        with pytest.raises(stages.WeightSyncError, match="did not reach the engine"):
            stages.check_agreement({"mismatch/mean_abs": value}, 5e-5)


@pytest.mark.parametrize(
    ("every", "num_steps", "due"),
    [(2, 5, [2, 4, 5]), (0, 3, [3]), (1, 2, [1, 2]), (10, 4, [4]), (3, 6, [3, 6])],
)
def test_is_due(every: int, num_steps: int, due: list[int]) -> None:
    assert [s for s in range(1, num_steps + 1) if is_due(s, every, num_steps)] == due


def test_steps_without_a_judgement_end_the_run_when_they_follow_one_another() -> None:
    failed, judged = make_groups([[math.nan] * 2] * 2), make_groups([[math.nan, 0.0]])
    count = stages.count_failed_steps(failed, 0)
    assert count == 1
    assert stages.count_failed_steps(judged, count) == 0
    count = stages.count_failed_steps(failed, count)
    with pytest.raises(stages.RolloutError, match=r"all 4 failed, 3 steps in a row; .* error: no"):
        stages.count_failed_steps(failed, count)


def test_a_first_validation_without_a_judgement_ends_the_run() -> None:
    stages.check_judged(make_groups([[math.nan], [0.0]]))
    with pytest.raises(stages.RolloutError, match=r"all 2 failed in the first .* error: no text"):
        stages.check_judged(make_groups([[math.nan], [math.nan]]))


def test_step_seeds_differ_and_stay() -> None:
    seeds = {stages.step_seed(seed, step) for seed in range(20) for step in range(200)}
    assert len(seeds) == 4000
    assert stages.step_seed(3, 4) == stages.step_seed(3, 4)
    assert all(0 <= seed < 2**63 for seed in seeds)


class TestReport:
    def test_rates_and_stage_seconds(self) -> None:
        metrics = {
            "generation": 2.0,
            "training": 4.0,
            "rollout/num_tokens": 100.0,
            "train/num_tokens": 80.0,
        }
        assert with_rates(metrics) == {
            "time/generation_s": 2.0,
            "time/training_s": 4.0,
            "rollout/num_tokens": 100.0,
            "train/num_tokens": 80.0,
            "rate/generation_tokens_per_s": 50.0,
            "rate/training_tokens_per_s": 20.0,
        }

    def test_a_step_that_learnt_nothing_shows_dashes(self) -> None:
        line = step_line({"reward/mean": math.nan})
        assert line.startswith("reward -  right -")
        assert "mismatch -" in line
        assert "reward 0.500" in step_line({"reward/mean": 0.5})

    def test_a_summary_of_what_was_judged(self) -> None:
        assert summary([math.nan, 0.25, 0.75], [0.5, math.nan]) == (
            "reward: first 2 steps 0.500, last 2 0.500; held-out accuracy: 0.500 -> 0.500"
        )
        assert summary([math.nan], [0.5]) == summary([1.0], []) == "nothing was judged"

    def test_samples(self) -> None:
        failed = rollout(0, 1, math.nan, [5])
        assert sample_line(rollout(0, 1, 0.5, [5])) == "'b' -> 'text 1' (reward 0.5)"
        empty = replace(failed, row={"prompt": [{"role": "user", "content": ""}]})
        assert sample_line(empty) == "'' -> 'text 1' (reward nan)"
        record = sample_record(3, failed)
        assert (record["step"], record["row"], record["reward"]) == (3, "row-0", None)
        assert (record["status"], record["weight_version"]) == ("error", 7)
