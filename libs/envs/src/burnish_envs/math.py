"""Exact-answer rewards for mathematics, by Math-Verify, in processes that can be killed."""

import importlib.util
import json
import math
import os
import queue
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

from burnish_envs.types import Prompt, Rollout, Row, StepResult

_START_TIMEOUT_S = 120.0  # importing sympy on a busy machine
_CONTROL_PAIR = ("1", "1")
_NUMBER = re.compile(r"-?[\d,]+(\.\d+)?")


@dataclass(frozen=True)
class Verdict:
    """`score` is 1.0 for a right answer and 0.0 for another. By `status`:

    "ok": judged. "timeout": no judgement before the deadline; score 0.0, since the text did it.
    "error": judging failed (an answer that is no mathematics, a worker that died of the text);
    score NaN.
    """

    score: float
    status: str


class Verifier(Protocol):
    """Judges pairs of (text, answer), in order."""

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]: ...


class MathVerifier:
    """Compares answers as mathematics ("0.5" is "1/2"), in worker processes.

    A text such as `9**9**9` can hold Math-Verify for ever. Its own time-out needs signals, which
    work in no thread but the main one; so each pair has a deadline, and the worker that misses it
    is killed and replaced. POSIX only. Safe to call from several threads.

    Args:
        timeout_s: deadline for each pair.
        num_workers: processes.
        memory_bytes: address space that each process may use.
    """

    def __init__(
        self, *, timeout_s: float = 5.0, num_workers: int = 1, memory_bytes: int = 4 * 1024**3
    ) -> None:
        if timeout_s <= 0 or num_workers < 1:
            raise ValueError(
                "timeout_s must be positive and num_workers at least 1, got "
                f"{timeout_s} and {num_workers}."
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "MathVerifier needs Math-Verify, which is not installed; run "
                "`pip install 'burnish-envs[math]'`."
            )
        self._workers = [_Worker(timeout_s, memory_bytes) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math-verifier")

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Judge each (text, answer); one verdict for each pair, in order.

        Raises:
            RuntimeError: the workers die or hang whatever they are asked.
        """
        return list(self._threads.map(self._verify_pair, pairs))

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verify_pair(self, pair: tuple[str, str]) -> Verdict:
        worker = self._idle.get()
        try:
            return _verdict(worker, pair)
        finally:
            self._idle.put(worker)


def _verdict(worker: "_Worker", pair: tuple[str, str]) -> Verdict:
    for _ in range(2):  # a worker may die of something else, so the pair gets a second one
        try:
            return worker.ask(pair)
        except TimeoutError:
            return Verdict(0.0, "timeout")
        except EOFError:
            continue
    try:
        worker.ask(_CONTROL_PAIR)
    except (TimeoutError, EOFError) as error:
        raise RuntimeError(
            "The workers of MathVerifier die whatever they are asked; their messages are on "
            f"standard error, and `{sys.executable} -m burnish_envs.math_worker 5 4294967296` "
            "shows them too."
        ) from error
    return Verdict(math.nan, "error")


class _Worker:
    """A worker process and its replacements. Not safe to share between threads."""

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._command = [
            sys.executable,
            "-m",
            "burnish_envs.math_worker",
            str(timeout_s),
            str(memory_bytes),
        ]
        self._start()

    def ask(self, pair: tuple[str, str]) -> Verdict:
        """TimeoutError past the deadline, EOFError when the process dies; both replace it."""
        try:
            self._wait_until_ready()
            self._write_line(json.dumps(pair))
            reply = json.loads(self._read_line(self._timeout_s))
        except (TimeoutError, EOFError):
            self.stop()
            self._start()
            raise
        return Verdict(reply["score"], reply["status"])

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes and reaps the process

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._ready = False  # it loads while the caller goes on

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._read_line(_START_TIMEOUT_S)
        except TimeoutError as error:  # not the pair's deadline
            raise EOFError(f"The worker was not ready after {_START_TIMEOUT_S} s.") from error
        self._ready = True

    def _write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        data = memoryview(line.encode() + b"\n")
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError as error:
            raise EOFError("The worker died.") from error

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline - time.monotonic())
            if not readable.poll(left_s * 1000.0):
                raise TimeoutError(f"The worker did not answer within {timeout_s} s.")
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise EOFError("The worker died.")
            line += chunk
        return line


class MathEnvironment:
    """One turn: the row's prompt, then 1.0 for its answer and 0.0 for another.

    Rows have `prompt` (messages or raw text) and `answer` (str). A row may have `stop` (str): then
    the completion is read up to there, as a model that was shown lines goes on with more lines, and
    must be the answer and nothing else.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def prompt(self, row: Row) -> Prompt:
        return row["prompt"]

    def step(self, rollouts: Sequence[Rollout]) -> Sequence[StepResult]:
        judged = [r for r in rollouts if isinstance(r.row.get("answer"), str)]
        verdicts = iter(self._verifier.verify([(_answer_text(r), r.row["answer"]) for r in judged]))
        results = []
        for rollout in rollouts:
            if isinstance(rollout.row.get("answer"), str):
                verdict = next(verdicts)
                results.append(StepResult(verdict.score, done=True, status=verdict.status))
            else:  # its own failure, not that of the rows beside it
                error = f"a row must have an answer as text, got {rollout.row.get('answer')!r}"
                results.append(StepResult(math.nan, True, None, "error", {"error": error}))
        return results


@contextmanager
def math_environment(*, timeout_s: float = 5.0, num_workers: int = 1) -> Iterator[MathEnvironment]:
    """A `MathEnvironment` with a `MathVerifier` of its own, closed at the end of the block."""
    with MathVerifier(timeout_s=timeout_s, num_workers=num_workers) as verifier:
        yield MathEnvironment(verifier)


def _answer_text(rollout: Rollout) -> str:
    text, stop = rollout.turns[-1].text, rollout.row.get("stop")
    if not stop:
        return text
    line = text.split(stop, 1)[0].strip()
    return line if _NUMBER.fullmatch(line) else ""  # neither "12 + 45" nor "12, 45" is one answer
