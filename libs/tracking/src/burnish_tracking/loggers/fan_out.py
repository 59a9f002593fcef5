"""Several loggers as one that outlives any of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

_log = logging.getLogger(__name__)


class Logger(Protocol):
    """What a backend is."""

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Record the metrics of a step; a step may be logged in several calls."""

    def close(self) -> None:
        """Write what is left and let go of files and connections."""


class FanOut:
    """Hands every call to all loggers, in order.

    One that raises is dropped with one warning (to the `logging` module, with the traceback), and
    the run goes on: losing a dashboard must not lose the training.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._each(lambda logger: logger.log(step, metrics), f"step {step}")

    def close(self) -> None:
        self._each(lambda logger: logger.close(), "closing")
        self._loggers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _each(self, call: Callable[[Logger], None], occasion: str) -> None:
        working = []
        for logger in self._loggers:
            try:
                call(logger)
                working.append(logger)
            except Exception:  # noqa: BLE001 - a backend may raise anything, and the run goes on
                name = type(logger).__name__
                _log.warning("%s failed at %s; it is dropped.", name, occasion, exc_info=True)
        self._loggers = working
