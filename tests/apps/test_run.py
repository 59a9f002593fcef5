"""Signals, and the end of what was started: in process, and with children of our own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from burnish_apps.shell.config import ConfigError
from burnish_apps.shell.run import (
    Interrupted,
    interrupted_after,
    interruptible,
    make_run_directory,
    no_process_left,
)

# A child that starts a grandchild, says its process id, and goes on or leaves it an orphan.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_the_first_signal_raises_and_more_are_ignored(number: signal.Signals, code: int) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    cleaned = []

    @interruptible()
    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(1)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(Interrupted, match=number.name) as caught:
        work()
    assert caught.value.exit_code == code
    assert cleaned == [True]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_the_signal_is_named_whatever_comes_up() -> None:
    @interruptible()
    def work(number: int, what: BaseException) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(1)
        except Interrupted:
            raise what from None  # as Ray does

    for what in (KeyboardInterrupt(), RuntimeError("while ending")):
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            work(signal.SIGTERM, what)
        assert caught.value.exit_code == 143


def test_other_errors_go_up_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), interruptible():
        raise ZeroDivisionError


def test_a_signal_waits_for_what_cannot_be_cut_short() -> None:
    done = []

    @interruptible()
    def work() -> None:
        with interrupted_after():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            done.append("all of it")
        done.append("more")

    with pytest.raises(Interrupted, match="SIGTERM"):
        work()
    assert done == ["all of it"]


def test_a_librarys_handler_does_not_outlast_the_block() -> None:
    @interruptible()
    def work(fails: bool) -> None:
        try:
            with interrupted_after():
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ray does
                if fails:
                    raise RuntimeError("no cluster")
        except RuntimeError:
            assert fails
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

    for fails in (False, True):
        with pytest.raises(Interrupted, match="SIGTERM"):
            work(fails)


def test_a_second_signal_does_not_wait() -> None:
    done = []

    @interruptible()
    def work() -> None:
        try:
            with interrupted_after():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
                done.append("all of it")
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # ignored by now

    with pytest.raises(Interrupted, match="SIGINT"):
        work()
    assert done == []


def test_without_interruptible_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupted_after():
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("stays_s", [0, 100], ids=["orphan", "family"])
def test_no_process_is_left(stays_s: int) -> None:
    earlier = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        with no_process_left(grace_s=0.2):
            child = subprocess.Popen(
                [sys.executable, "-c", FAMILY, str(stays_s)], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            grandchild = psutil.Process(int(child.stdout.readline()))
            if not stays_s:
                child.wait()
            assert grandchild.is_running()
        child.stdout.close()
        assert child.wait() == (-signal.SIGKILL if stays_s else 0)
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert earlier.poll() is None  # was there before
    finally:
        earlier.kill()
        earlier.wait()


def test_what_ends_by_itself_is_given_time() -> None:
    with no_process_left(grace_s=20):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    assert child.wait() == 0


def test_a_run_directory_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_run_directory("a/b", "name") == Path("a/b")
    assert make_run_directory(None, "name").match("runs/name-*-*")
    metrics = tmp_path / "a" / "b" / "metrics.jsonl"
    metrics.touch()
    assert make_run_directory("a/b", "name") == Path("a/b")  # nothing was done there
    metrics.write_text("{}")
    with pytest.raises(ConfigError, match="a/b holds an earlier run"):
        make_run_directory("a/b", "name")
