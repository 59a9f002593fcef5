"""Seconds per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """`with timers("generation"):` adds the block's seconds to that stage.

    A stage inside another is named by its path, "generation/weight_sync", and its seconds are in
    the outer one's too. A stage entered again adds up; one that raises is counted as well. For one
    thread.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(name)
        path = "/".join(self._open)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[path] = self._seconds.get(path, 0.0) + self._clock() - start
            self._open.pop()

    def summary(self) -> dict[str, float]:
        """Seconds of each finished stage since the last reset, in the order they finished first."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Start again at nothing, as for a new step.

        Raises:
            ValueError: a stage is still open; its seconds would be split over two steps.
        """
        if self._open:
            raise ValueError(f"All stages must be closed at a reset, {self._open} is still open.")
        self._seconds.clear()

    def take(self) -> dict[str, float]:
        """`summary` and then `reset`."""
        seconds = self.summary()
        self.reset()
        return seconds
