"""What a person sees of any run: a bar, a line per step, files and a curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import rich
from burnish_distributed import rank
from burnish_tracking import (
    FanOut,
    JsonlLogger,
    StepProgress,
    TensorboardLogger,
    plot_curves,
    read_metrics,
    series,
)
from rich.console import Console

MEAN_STEPS = 5  # of the summary's first and last means


def say(text: str) -> None:
    """A line of text, as it is; from the first rank alone."""
    if rank() == 0:
        rich.get_console().print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class RunReport:
    """Writes metrics.jsonl, TensorBoard files and curve.png, and the terminal, on the first rank.

    Args:
        run_dir: where the files go.
        num_steps: of the whole run.
        curve: the metric drawn for every step.
        points: the metric of the held-out rows.
    """

    def __init__(self, run_dir: Path, num_steps: int, *, curve: str, points: str) -> None:
        self.run_dir = run_dir
        self._num_steps, self._curve, self._points = num_steps, curve, points
        self._is_first = rank() == 0
        self._console = None if self._is_first else Console(quiet=True)
        self._progress = StepProgress(num_steps, console=self._console)
        self._started = False

    def __enter__(self) -> Self:
        self._logger = FanOut(self._loggers() if self._is_first else [])
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._started:
            self._progress.__exit__()
        self._logger.close()
        if self._is_first:
            self._finish()

    def say(self, text: str) -> None:
        """A line of text."""
        self._progress.print(text)

    def start_progress(self, done: int) -> None:
        """Show the bar, from the step after ``done``."""
        self._progress = StepProgress(self._num_steps, first_step=done + 1, console=self._console)
        self._progress.__enter__()
        self._started = True

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics, into the files."""
        self._logger.log(step, metrics)

    def advance(self, line: str) -> None:
        """One more step is done."""
        self._progress.advance(line)

    def summary(self, curve: Sequence[float], points: Sequence[float]) -> str:
        """The run in one line, from all values of its two metrics."""
        first, last = curve[:MEAN_STEPS], curve[-MEAN_STEPS:]
        return (
            f"{self._curve}: first {len(first)} steps {sum(first) / len(first):.4f}, "
            f"last {len(last)} {sum(last) / len(last):.4f}; "
            f"held out, {self._points}: {points[0]:.4f} -> {points[-1]:.4f}"
        )

    def contents(self) -> str:
        """What is in the run directory."""
        return "metrics, curve.png and checkpoints"

    def _loggers(self) -> list[JsonlLogger | TensorboardLogger]:
        return [
            JsonlLogger(self.run_dir / "metrics.jsonl"),
            TensorboardLogger(self.run_dir / "tensorboard"),
        ]

    def _finish(self) -> None:
        """The curve and a summary, of however many steps were done."""
        path = self.run_dir / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        if not any(self._curve in record for record in records):
            return
        values, points = series(records, self._curve)[1], series(records, self._points)[1]
        plot_curves(path, self.run_dir / "curve.png", [self._curve], points=[self._points])
        self.say(self.summary(values, points))
        self.say(f"{self.contents()} are in {self.run_dir}")


def with_times(metrics: Mapping[str, float], stages: Sequence[str]) -> dict[str, float]:
    """Metrics in which the seconds of a stage are named ``time/<stage>_s``."""
    return {f"time/{k}_s" if k in stages else k: v for k, v in metrics.items()}


def shown(metrics: Mapping[str, float], name: str, form: str) -> str:
    """A metric's value; a dash where it was not measured."""
    value = metrics.get(name, math.nan)
    return "-" if math.isnan(value) else format(value, form)
