"""The stages of a GRPO step. Each takes plain data and returns plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from burnish_distributed import RaggedBatch
from burnish_distributed.weight_transport import get_weights
from burnish_envs import Environment, RolloutGroup, collect_groups, sample_seed, training_rows
from burnish_generation import Replicas, Sampling
from burnish_losses.advantages import group_relative_advantages, groups_with_spread
from burnish_losses.aggregate import sequence_mean, token_mean
from burnish_losses.policy_gradient import grpo_loss
from burnish_packing import plan_micro_batches
from burnish_trainer.policy_group import PolicyGroup
from transformers import PreTrainedTokenizerBase

from burnish_apps.grpo.config import GrpoConfig

Rows = Sequence[dict[str, Any]]
Render = Callable[[Any], Sequence[int]]
Decode = Callable[[Sequence[int]], str]

MAX_FAILED_STEPS = 3
AGGREGATES = {"tokens": token_mean, "sequences": sequence_mean}


class WeightSyncError(RuntimeError):
    """Engine and trainer disagree about the log-probs of sampled tokens."""


class RolloutError(RuntimeError):
    """No rollout could be judged, in the first validation or several steps in a row."""


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """A completion as text, as an environment judges it: without special tokens."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def sample(
    rows: Rows,
    environment: Environment,
    engines: Replicas,
    sampling: Sampling,
    *,
    group_size: int,
    render: Render,
    decode: Decode,
    seed: int,
) -> list[RolloutGroup]:
    """``group_size`` judged rollouts of every row."""
    return collect_groups(
        rows,
        environment,
        lambda prompts, seeds: engines.generate(prompts, sampling, seeds),
        group_size=group_size,
        render=render,
        decode=decode,
        seed=seed,
    )


def training_batch(
    groups: Sequence[RolloutGroup], config: GrpoConfig
) -> tuple[RaggedBatch | None, dict[str, float]]:
    """Rollouts with their advantages, as a batch, and what to log of them.

    Groups whose rewards are all alike have no advantage and are left out, and counted.

    Returns:
        The batch with the columns that `grpo_loss` reads and the shared prefixes that packing
        reads; None if no group is left.
    """
    rows = training_rows(groups)
    rewards = torch.tensor(rows["reward"], dtype=torch.float64)
    group_ids = torch.tensor(rows["group_id"])
    normalize = config.training.normalize_advantages
    advantages = group_relative_advantages(rewards, group_ids, normalize=normalize)
    keep = groups_with_spread(rewards, group_ids)
    statistics = rollout_statistics(groups)
    statistics["rollout/groups_without_spread"] = float(len(groups) - len(group_ids[keep].unique()))
    kept = torch.nonzero(keep).flatten().tolist()
    if not kept:
        return None, statistics
    batch = RaggedBatch.from_rows(
        [
            {
                "token_ids": np.asarray(rows["token_ids"][i], dtype=np.int64),
                "token_mask": np.asarray(rows["token_mask"][i], dtype=bool),
                "sampled_logprobs": np.asarray(rows["sampled_logprobs"][i], dtype=np.float32),
                "advantages": np.full(len(rows["token_ids"][i]), advantages[i], dtype=np.float32),
            }
            for i in kept
        ],
        {
            "prefix_ids": [rows["group_id"][i] for i in kept],
            "prefix_lengths": [rows["prompt_length"][i] for i in kept],
        },
    )
    return batch, statistics


def count_failed_steps(groups: Sequence[RolloutGroup], before: int) -> int:
    """How many steps in a row had no rollout that could be judged, this one included.

    Raises:
        RolloutError: from `MAX_FAILED_STEPS` on, with the first failure's text: the run would learn
            nothing for hours.
    """
    if not all_failed(groups):
        return 0
    if before + 1 >= MAX_FAILED_STEPS:
        raise RolloutError(failure(groups, f", {before + 1} steps in a row"))
    return before + 1


def check_judged(groups: Sequence[RolloutGroup]) -> None:
    """Stop when the first validation could judge nothing.

    Raises:
        RolloutError: with the first failure's text; a judge that never worked will not begin to.
    """
    if all_failed(groups):
        raise RolloutError(failure(groups, " in the first validation"))


def all_failed(groups: Sequence[RolloutGroup]) -> bool:
    """Whether no rollout could be judged."""
    return all(not math.isfinite(rollout.reward) for group in groups for rollout in group.rollouts)


def failure(groups: Sequence[RolloutGroup], when: str) -> str:
    """What to say when all rollouts failed."""
    first, number = groups[0].rollouts[0], sum(len(group.rollouts) for group in groups)
    return (
        f"some rollouts must be judged, but all {number} failed{when}; the first with status "
        f"{first.status}: {first.info.get('error', 'no text')}"
    )


def rollout_statistics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards, lengths and failures; failed rollouts (NaN rewards) are counted, not averaged."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if math.isfinite(rollout.reward)]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return {
        "reward/mean": float(np.mean(rewards)) if rewards else math.nan,
        "reward/std": float(np.std(rewards)) if rewards else math.nan,
        "reward/accuracy": float(np.mean([r >= 1 for r in rewards])) if rewards else math.nan,
        "rollout/completion_tokens": float(np.mean([len(turn.token_ids) for turn in turns])),
        "rollout/truncated": float(np.mean([t.finish_reason == "length" for t in turns])),
        "rollout/failed": float(len(rollouts) - len(rewards)),
        "rollout/timed_out": float(sum(rollout.status == "timeout" for rollout in rollouts)),
        "rollout/num_tokens": float(sum(len(turn.token_ids) for turn in turns)),
        "rollout/weight_version": float(min(turn.weight_version for turn in turns)),
    }


def update(policy: PolicyGroup, batch: RaggedBatch, config: GrpoConfig) -> dict[str, float]:
    """The optimizer steps of one batch: ``updates_per_step`` of them, each over some groups.

    With a single one the old log-probs are the current ones, and no extra pass is made.

    Returns:
        Metrics: of the only update, or their mean over the updates; numbers of tokens and sequences
        are sums.
    """
    training, temperature = config.training, config.rollout.temperature
    loss_fn = partial(
        grpo_loss,
        clip_low=training.clip_low,
        clip_high=training.clip_high,
        kl_coefficient=training.kl_coefficient,
        aggregate=AGGREGATES[training.aggregation],
    )
    if training.updates_per_step > 1:
        old = policy.logprobs(batch, plan(batch, config), temperature=temperature)
        batch = batch.with_token_column("old_logprobs", old)
    if training.kl_coefficient:
        reference = policy.reference_logprobs(batch, plan(batch, config), temperature=temperature)
        batch = batch.with_token_column("reference_logprobs", reference)
    group_ids = list(dict.fromkeys(batch.sequence_columns["prefix_ids"].tolist()))
    parts = np.array_split(np.array(group_ids), min(training.updates_per_step, len(group_ids)))
    metrics = []
    for part in parts:
        own = np.flatnonzero(np.isin(batch.sequence_columns["prefix_ids"], part))
        mini_batch = batch.select(own)
        metrics.append(
            policy.train_step(
                mini_batch, plan(mini_batch, config), loss_fn, temperature=temperature
            )
        )
    return {name: combine(name, [m[name] for m in metrics]) for name in metrics[0]}


def combine(name: str, values: Sequence[float]) -> float:
    """One metric of a step from its updates' values; see `update`."""
    return float(np.sum(values) if name.startswith("train/num_") else np.mean(values))


def plan(batch: RaggedBatch, config: GrpoConfig) -> Any:
    """Packed micro-batches, the completions of a prompt sharing its tokens where they fit."""
    return plan_micro_batches(
        batch.lengths,
        max_tokens=config.training.max_tokens,
        num_ranks=config.training.num_ranks,
        prefix_ids=batch.sequence_columns["prefix_ids"],
        prefix_lengths=batch.sequence_columns["prefix_lengths"],
    )


def sync_weights(policy: PolicyGroup, engines: Replicas, weight_version: int) -> None:
    """The policy's weights into the running engines, in place."""
    references = policy.publish_weights()
    engines.update_weights(partial(get_weights, references), weight_version)


def check_agreement(metrics: dict[str, float], limit: float | None) -> None:
    """Stop when engine and trainer score the sampled tokens differently.

    Raises:
        WeightSyncError: naming the difference; a lost or wrong weight update shows here first.
    """
    mismatch = metrics["mismatch/mean_abs"]
    if limit is not None and not mismatch <= limit:
        raise WeightSyncError(
            f"engine and trainer must give sampled tokens the same log-probs to {limit:g} on "
            f"average, got {mismatch:g}; the last weight update did not reach the engine, or their "
            "numerics differ (then raise engine.max_mismatch)"
        )


def evaluate(
    rows: Rows,
    environment: Environment,
    engines: Replicas,
    config: GrpoConfig,
    render: Render,
    decode: Decode,
) -> tuple[dict[str, float], list[RolloutGroup]]:
    """Greedy answers to held-out problems: the share that is exactly right, also by task."""
    sampling = Sampling(config.rollout.max_new_tokens, temperature=0.0, stop=config.rollout.stop)
    groups = sample(
        rows,
        environment,
        engines,
        sampling,
        group_size=1,
        render=render,
        decode=decode,
        seed=config.seed,
    )
    statistics = rollout_statistics(groups)
    tasks = sorted({str(row["task"]) for row in rows if "task" in row})
    by_task = {
        f"validation/accuracy/{task}": rollout_statistics(
            [group for group in groups if group.rollouts[0].row.get("task") == task]
        )["reward/accuracy"]
        for task in tasks
    }
    return by_task | {
        "validation/accuracy": statistics["reward/accuracy"],
        "validation/completion_tokens": statistics["rollout/completion_tokens"],
        "validation/failed": statistics["rollout/failed"],
    }, groups


def step_seed(seed: int, step: int) -> int:
    """The seed of a step's samples: a resumed run draws what an uninterrupted one would."""
    return sample_seed(seed, step, 0, 0)
