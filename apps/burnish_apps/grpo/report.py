"""What a person sees: a bar, a line per step, samples, files and a curve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from burnish_envs import Rollout, RolloutGroup

from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.shell.report import RunReport, shown, with_times

STAGES = ("generation", "training", "weight_sync", "validation", "checkpoint")
SAMPLE_CHARACTERS = 60


class Report(RunReport):
    """The report of any run, with samples.jsonl and a sample of every step."""

    def __init__(self, run_dir: Path, config: GrpoConfig) -> None:
        super().__init__(
            run_dir, config.training.num_steps, curve="reward/mean", points="validation/accuracy"
        )

    def __enter__(self) -> Self:
        self._samples = (self.run_dir / "samples.jsonl").open("a", encoding="utf-8")
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self._samples.close()
        super().__exit__(*exception)

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup]) -> None:
        """One step's metrics (seconds under the stages' names) and samples, everywhere."""
        metrics = with_rates(metrics)
        self.record(step, metrics)
        for group in groups:
            for rollout in group.rollouts:
                self._samples.write(json.dumps(sample_record(step, rollout)) + "\n")
        self._samples.flush()
        if "reward/mean" in metrics:
            self.advance(step_line(metrics))
        if "validation/accuracy" in metrics:
            self.say(f"    held out, greedy: {accuracies(metrics)}")
        best = max(groups[0].rollouts, key=lambda rollout: rollout.reward)
        self.say(f"    {sample_line(best)}")

    def summary(self, curve: Sequence[float], points: Sequence[float]) -> str:
        """See `summary`."""
        return summary(curve, points)

    def contents(self) -> str:
        """What is in the run directory."""
        return "metrics, samples, curve.png and checkpoints"


def summary(rewards: Sequence[float], held_out: Sequence[float]) -> str:
    """First and last rewards and accuracies; steps without a judgement (NaN) do not count."""
    rewards = [reward for reward in rewards if not math.isnan(reward)]
    held_out = [accuracy for accuracy in held_out if not math.isnan(accuracy)]
    if not rewards or not held_out:
        return "nothing was judged"
    first, last = rewards[:5], rewards[-5:]
    return (
        f"reward: first {len(first)} steps {sum(first) / len(first):.3f}, "
        f"last {len(last)} {sum(last) / len(last):.3f}; "
        f"held-out accuracy: {held_out[0]:.3f} -> {held_out[-1]:.3f}"
    )


def with_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage as ``time/<stage>_s``, and tokens per second."""
    renamed = with_times(metrics, STAGES)
    if "generation" in metrics:
        renamed["rate/generation_tokens_per_s"] = (
            metrics["rollout/num_tokens"] / metrics["generation"]
        )
    if "training" in metrics:
        renamed["rate/training_tokens_per_s"] = metrics["train/num_tokens"] / metrics["training"]
    return renamed


def step_line(metrics: Mapping[str, float]) -> str:
    """The step in one line; what was not measured (no group to learn from) shows as a dash."""
    show = partial(shown, metrics)
    failed = metrics.get("rollout/failed", 0)
    return "  ".join(
        [
            *([f"FAILED {failed:.0f}"] if failed else []),
            f"reward {show('reward/mean', '.3f')}",
            f"right {show('reward/accuracy', '.3f')}",
            f"length {show('rollout/completion_tokens', '.1f')}",
            f"kl {show('policy/approximate_kl', '.1e')}",
            f"clipped {show('policy/clip_fraction', '.3f')}",
            f"mismatch {show('mismatch/mean_abs', '.1e')}",
            f"tok/s {show('rate/generation_tokens_per_s', '.0f')} sampled "
            f"{show('rate/training_tokens_per_s', '.0f')} trained",
            f"s: sample {show('time/generation_s', '.1f')} train {show('time/training_s', '.1f')} "
            f"sync {show('time/weight_sync_s', '.1f')}",
        ]
    )


def accuracies(metrics: Mapping[str, float]) -> str:
    """Held-out accuracy, then that of each task."""
    tasks = {n.rpartition("/")[2]: v for n, v in metrics.items() if n.count("/") == 2}
    by_task = ", ".join(f"{task} {value:.3f}" for task, value in tasks.items())
    return f"accuracy {metrics['validation/accuracy']:.3f}" + (f" ({by_task})" if by_task else "")


def sample_line(rollout: Rollout) -> str:
    """The end of a prompt, and what was answered."""
    turn = rollout.turns[-1]
    prompt = rollout.row["prompt"]
    text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    last_line = (text[-SAMPLE_CHARACTERS:].splitlines() or [""])[-1]
    return f"{last_line!r} -> {turn.text[:SAMPLE_CHARACTERS]!r} (reward {rollout.reward:g})"


def sample_record(step: int, rollout: Rollout) -> dict[str, object]:
    """One rollout for samples.jsonl."""
    return {
        "step": step,
        "row": rollout.row.get("id"),
        "group_id": rollout.group_id,
        "index": rollout.index,
        "answer": rollout.row.get("answer"),
        "completions": [turn.text for turn in rollout.turns],
        "finish_reason": rollout.turns[-1].finish_reason,
        "weight_version": rollout.turns[-1].weight_version,
        "reward": rollout.reward if math.isfinite(rollout.reward) else None,
        "status": rollout.status,
    }
