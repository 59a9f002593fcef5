"""Progress over the steps of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class StepProgress:
    """A bar with rate and time left below the lines of the steps; without a terminal, lines only.

    Args:
        num_steps: steps of the whole run.
        first_step: the first one this process does, above 1 after a resume; the rate counts only
            the steps that were done here.
        description: what stands before the bar.
        console: where to write; rich's own choice of stdout by default.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 1,
        description: str = "step",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._done = first_step - 1
        self._clock = clock
        self._start_s = clock()
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(description, total=num_steps, completed=self._done, pace="")

    def __enter__(self) -> Self:
        self._start_s = self._clock()
        self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._bar.stop()

    def advance(self, line: str) -> None:
        """One more step is done; `line` tells of it, after its number."""
        self._done += 1
        pace = self._pace()
        numbered = f"[{self._done}/{self._num_steps}] {line}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, pace=pace)
            self.print(numbered)
        else:
            self.print(f"{numbered}  ({pace})")

    def print(self, text: str) -> None:
        """A line above the bar, as it is: brackets in a model's words are no markup."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _pace(self) -> str:
        step_s = (self._clock() - self._start_s) / (self._done - self._first_step + 1)
        left = timedelta(seconds=round(step_s * (self._num_steps - self._done)))
        return f"{step_s:.1f} s/step, {left} left"
