"""What a person sees of a supervised run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from burnish_apps.shell.report import RunReport, shown, with_times

STAGES = ("preparation", "training", "validation", "checkpoint")
Line = Callable[[Mapping[str, float]], str]


class Report(RunReport):
    """The report of any run; the app says what it shows of a step and of the held-out rows."""

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        *,
        curve: str,
        step_line: Line,
        held_out_line: Line,
    ) -> None:
        points = curve.replace("train/", "validation/")
        super().__init__(run_dir, num_steps, curve=curve, points=points)
        self._held_out, self._step_line, self._held_out_line = points, step_line, held_out_line

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics (seconds under the stages' names), everywhere."""
        metrics = with_rates(metrics)
        self.record(step, metrics)
        if "train/loss" in metrics:
            self.advance(f"{self._step_line(metrics)}  {pace(metrics)}")
        if self._held_out in metrics:
            seconds = shown(metrics, "time/validation_s", ".1f")
            self.say(f"    held out: {self._held_out_line(metrics)}  ({seconds} s)")


def with_rates(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by stage as ``time/<stage>_s``, and tokens trained per second, prompts among them."""
    renamed = with_times(metrics, STAGES)
    if "training" in metrics:
        renamed["rate/tokens_per_s"] = metrics["train/num_input_tokens"] / metrics["training"]
    return renamed


def pace(metrics: Mapping[str, float]) -> str:
    """The end of every step's line."""
    skipped = "SKIPPED  " if metrics["train/skipped"] else ""
    return (
        f"{skipped}grad {metrics['train/grad_norm']:.2f}  lr {metrics['train/learning_rate']:.1e}  "
        f"epoch {metrics['train/epoch']:.2f}  tok/s {metrics['rate/tokens_per_s']:.0f}  "
        f"s: train {shown(metrics, 'time/training_s', '.1f')}"
    )
