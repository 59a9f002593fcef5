"""The run directory and signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from burnish_apps.shell.config import ConfigError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; its exit code is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Interrupted` within the block, once.

    After the first one, more are ignored until the block is left, so that what takes processes
    down is not itself cut short.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_run_directory(run_dir: str | None, name: str) -> Path:
    """The given directory, or a new ``runs/<name>-<time>``.

    Raises:
        ConfigError: if it holds an earlier run, or cannot be made.
    """
    path = Path(run_dir) if run_dir else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (path / "metrics.jsonl").exists():
        raise ConfigError(
            [f"run_dir must be new, but {path} holds an earlier run; name another or move it away"]
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"run_dir must be a folder that can be made: {error}"]) from error
    return path
