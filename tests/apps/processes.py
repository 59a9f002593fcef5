"""Runs of the command in processes of their own, and what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

HERE = Path(__file__).parent
BURNISH = Path(sys.executable).with_name("burnish")


def heed_interrupts() -> None:
    """A background job, as this test run may be, ignores them, and so would its child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A command in a session of its own, as a terminal starts it, with all its descendants.

    Args:
        command: program and arguments.
        folder: the working directory; stdout and stderr go into files there.
    """

    def __init__(self, command: Sequence[object], folder: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(HERE),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        self.started_s = time.monotonic()
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=heed_interrupts,
            )
        self.descendants: dict[psutil.Process, str] = {}

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def look(self) -> None:
        """Remember the descendants there are now, with their command lines."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for child in found:  # each time anew: between fork and exec a child bears another's name
            try:
                line = " ".join(child.cmdline())
                if line or child not in self.descendants:
                    self.descendants[child] = line or child.name()
            except psutil.Error:
                self.descendants.setdefault(child, "?")

    def command_lines(self) -> list[str]:
        """What the living descendants call themselves now; Ray's workers change it."""
        lines = []
        for process in self._living():
            try:
                lines.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return lines

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Look on until ``condition()``; an AssertionError with the output if it never holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.look()
            assert self.process.poll() is None, f"ended early: {self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"took too long: {self.stdout}\n{self.stderr}"
            time.sleep(0.1)
        self.look()

    def wait(self, timeout_s: float) -> int:
        """Look on until the command ends; its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < deadline, f"took too long: {self.stdout}\n{self.stderr}"
            time.sleep(0.1)
        return int(self.process.returncode)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the whole process group."""
        self.look()
        os.killpg(self.process.pid, signal.SIGINT)

    def left_behind(self, timeout_s: float) -> list[str]:
        """Processes of the run that are still there after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while (left := self._living()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [f"{process.pid} {self.descendants.get(process, process)}" for process in left]

    def kill(self) -> None:
        """End whatever still runs: a failed test leaves nothing behind either."""
        self.look()
        for process in self._living():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def _living(self) -> list[psutil.Process]:
        session = [
            psutil.Process(pid) for pid in psutil.pids() if _session(pid) == self.process.pid
        ]
        both = {*session, *self.descendants}
        return [process for process in both if _lives(process)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
