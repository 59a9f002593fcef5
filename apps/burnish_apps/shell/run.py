"""The run directory, signals, and the end of all processes."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from burnish_apps.shell.config import ConfigError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2

CAUGHT = (signal.SIGINT, signal.SIGTERM)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


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
    handler = _Handler()
    before = {number: signal.signal(number, handler) for number in CAUGHT}
    try:
        yield
    except BaseException as error:
        if handler.number is None:
            raise
        # Ray, for one, lets a KeyboardInterrupt of its own go up in the place of what was raised.
        raise Interrupted(handler.number) from error
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Within `interruptible`: what cannot be cut short. A signal raises after the block.

    A second one raises at once. Handlers that a library installs within the block (Ray does, for
    SIGTERM) do not outlast it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not isinstance(handler, _Handler):  # signals are someone else's business
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            handler(number, frame)

    for number in CAUGHT:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in CAUGHT if len(came) < 2 else ():
            signal.signal(number, handler)
    if came:
        handler(came[0], None)


class _Handler:
    """Raises once, and keeps which signal it was."""

    number: int | None = None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        for each in CAUGHT:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)


@contextmanager
def no_process_left(grace_s: float = 3.0) -> Iterator[None]:
    """Whatever was started within the block, at any depth, has ended after it.

    On Linux also what lost its parent: it becomes a child of this process. What has not ended by
    itself ``grace_s`` seconds after the block is killed.
    """
    _adopt_orphans(True)
    before = set(_living_descendants())
    try:
        yield
    finally:
        end_s = time.monotonic() + grace_s
        while left := set(_living_descendants()) - before:
            if time.monotonic() > end_s:
                for process in left:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            time.sleep(0.05)
        _adopt_orphans(False)


def _adopt_orphans(adopt: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _living_descendants() -> list[psutil.Process]:
    living = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def make_run_directory(run_dir: str | None, name: str) -> Path:
    """The given directory, or a new ``runs/<name>-<time>``.

    Raises:
        ConfigError: if it holds an earlier run, or cannot be made.
    """
    path = Path(run_dir) if run_dir else Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    metrics = path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise ConfigError(
            [f"run_dir must be new, but {path} holds an earlier run; name another or move it away"]
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"run_dir must be a folder that can be made: {error}"]) from error
    return path
