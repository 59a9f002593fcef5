"""What a person sees: a bar, a line per step, samples, files and a curve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from burnish_envs import Rollout, RolloutGroup
from burnish_tracking import (
    FanOut,
    JsonlLogger,
    StepProgress,
    TensorboardLogger,
    plot_curves,
    read_metrics,
    series,
)

from burnish_apps.grpo.config import GrpoConfig

STAGES = ("generation", "training", "weight_sync", "validation", "checkpoint")
SAMPLE_CHARACTERS = 60


class Report:
    """Writes metrics.jsonl, samples.jsonl, TensorBoard files and curve.png, and the terminal."""

    def __init__(self, run_dir: Path, config: GrpoConfig) -> None:
        self._run_dir = run_dir
        self._num_steps = config.training.num_steps
        self._progress = StepProgress(self._num_steps)
        self._started = False

    def __enter__(self) -> Self:
        self._logger = FanOut(
            [
                JsonlLogger(self._run_dir / "metrics.jsonl"),
                TensorboardLogger(self._run_dir / "tensorboard"),
            ]
        )
        self._samples = (self._run_dir / "samples.jsonl").open("a", encoding="utf-8")
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._started:
            self._progress.__exit__()
        self._logger.close()
        self._samples.close()
        self._finish()

    def say(self, text: str) -> None:
        """A line of text."""
        self._progress.print(text)

    def start_progress(self, done: int) -> None:
        """Show the bar, from the step after ``done``."""
        self._progress = StepProgress(self._num_steps, first_step=done + 1)
        self._progress.__enter__()
        self._started = True

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[RolloutGroup]) -> None:
        """One step's metrics (seconds under the stages' names) and samples, everywhere."""
        metrics = with_rates(metrics)
        self._logger.log(step, metrics)
        for group in groups:
            for rollout in group.rollouts:
                self._samples.write(json.dumps(sample_record(step, rollout)) + "\n")
        self._samples.flush()
        if "reward/mean" in metrics:
            self._progress.advance(step_line(metrics))
        if "validation/accuracy" in metrics:
            self.say(f"    held out, greedy: {accuracies(metrics)}")
        best = max(groups[0].rollouts, key=lambda rollout: rollout.reward)
        self.say(f"    {sample_line(best)}")

    def _finish(self) -> None:
        """The curve and a summary, of however many steps were done."""
        path = self._run_dir / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        if not any("reward/mean" in record for record in records):
            return
        _, rewards = series(records, "reward/mean")
        _, held_out = series(records, "validation/accuracy")
        plot_curves(
            path, self._run_dir / "curve.png", ["reward/mean"], points=["validation/accuracy"]
        )
        self.say(summary(rewards, held_out))
        self.say(f"metrics, samples, curve.png and checkpoints are in {self._run_dir}")


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
    renamed = {f"time/{k}_s" if k in STAGES else k: v for k, v in metrics.items()}
    if "generation" in metrics:
        renamed["rate/generation_tokens_per_s"] = (
            metrics["rollout/num_tokens"] / metrics["generation"]
        )
    if "training" in metrics:
        renamed["rate/training_tokens_per_s"] = metrics["train/num_tokens"] / metrics["training"]
    return renamed


def step_line(metrics: Mapping[str, float]) -> str:
    """The step in one line; what was not measured (no group to learn from) shows as a dash."""

    def show(name: str, form: str) -> str:
        value = metrics.get(name, math.nan)
        return "-" if math.isnan(value) else format(value, form)

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
