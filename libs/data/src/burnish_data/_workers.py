"""Worker processes that answer in order: bounded ahead, none left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, cast

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_NO_TASK = -1  # the number of an answer that is about the worker itself
_PATIENCE_S = 5.0  # for a process to end after SIGTERM


class WorkerDiedError(RuntimeError):
    """A worker process ended before its work was done, which its exit code explains."""


class Workers(Generic[TaskT, ResultT]):
    """Processes that run one function on tasks.

    They are spawned, not forked: a fork of a process with threads (those of torch, pyarrow, and
    tokenizers) may hang. They ignore Ctrl-C, which is the parent's to handle, and end by themselves
    when the parent does, however it ends.

    Args:
        function: picklable; what it takes and gives as well.
        num_workers: >= 1.

    Raises:
        ValueError: `function` cannot be pickled.
        WorkerDiedError: a process ended at its start.
    """

    def __init__(self, function: Callable[[TaskT], ResultT], num_workers: int) -> None:
        payload = _pickled(function)
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        try:
            with _interrupts_held():
                for _ in range(num_workers):
                    mine, theirs = context.Pipe()
                    process = context.Process(target=_work, args=(theirs,), daemon=True)
                    process.start()
                    theirs.close()  # so that its end is seen as the end of the pipe
                    self._processes.append(process)
                    self._connections.append(mine)
            # Not as an argument of the process: start() would wait for each to read it.
            for worker in range(num_workers):
                self._send(worker, payload)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the processes have ended: after `close`, an error, or results not all taken."""
        return not self._processes

    def map(self, tasks: Iterable[TaskT], *, ahead: int) -> Iterator[ResultT]:
        """The results, in the order of the tasks.

        Args:
            tasks: taken one by one as they are given out.
            ahead: tasks per worker that may be under way, or done and not yet asked for.

        Raises:
            WorkerDiedError: a process ended.
            Exception: what the function raised, with the worker's traceback as a note.
        """
        whole = False
        try:
            yield from self._in_order(iter(tasks), ahead * len(self._processes))
            whole = True
        finally:
            if not whole:  # processes still at work would answer the next map
                self.close()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def _in_order(self, tasks: Iterator[TaskT], limit: int) -> Iterator[ResultT]:
        under_way = [0] * len(self._processes)
        answers: dict[int, tuple[bool, Any]] = {}  # by number: whether it failed, and the result
        given = taken = 0
        while True:
            while given - taken < limit:
                try:
                    task = next(tasks)
                except StopIteration:
                    limit = 0  # no more to give
                    break
                worker = under_way.index(min(under_way))
                self._send(worker, pickle.dumps((given, task)))
                under_way[worker] += 1
                given += 1
            if taken == given:
                return
            while taken not in answers:
                for connection in wait(self._connections):
                    worker = self._connections.index(cast(Connection, connection))
                    number, failed, result = self._receive(worker)
                    if number == _NO_TASK:
                        raise result
                    answers[number] = failed, result
                    under_way[worker] -= 1
            failed, result = answers.pop(taken)
            if failed:  # in its turn, so that the first error is the same with any workers
                raise result
            yield result
            taken += 1

    def _send(self, worker: int, message: bytes) -> None:
        try:
            self._connections[worker].send_bytes(message)
        except OSError as error:
            raise self._death(worker) from error

    def _receive(self, worker: int) -> tuple[int, bool, Any]:
        try:
            message = self._connections[worker].recv_bytes()
        except (EOFError, OSError) as error:
            raise self._death(worker) from error
        return cast(tuple[int, bool, Any], pickle.loads(message))

    def _death(self, worker: int) -> WorkerDiedError:
        process = self._processes[worker]
        process.join(_PATIENCE_S)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        hint = "see what it wrote to stderr; a script that starts workers must do so under "
        hint += 'if __name__ == "__main__"'
        if how == "signal SIGKILL":
            hint = "if memory ran out, use fewer workers or smaller batches"
        return WorkerDiedError(
            f"Worker processes must run until their work is done, got the end of worker {worker} "
            f"(pid {process.pid}) by {how}; {hint}."
        )


def as_num_workers(num_workers: int, least: int) -> int:
    """ValueError unless it is an integer of at least this."""
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < least:
        raise ValueError(
            f"num_workers must be a number of processes, {least} or more, got {num_workers!r}; "
            f"pass {least} to do the work in this process."
        )
    return num_workers


def _pickled(function: object) -> bytes:
    try:
        return pickle.dumps(function, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"What worker processes run must be picklable, but {error}; use functions from the top "
            f"level of a module, functools.partial for their arguments, or no workers."
        ) from error


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits, and processes started meanwhile never see it: they inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection) -> None:
    """What a worker process does until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        payload = connection.recv_bytes()
    except (EOFError, OSError):
        return
    # Threads keep the pipe moving while the function runs, so that neither side waits for the other
    # to read; what they hold is bounded by what the parent gives out.
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for moves, messages in ((_receive_all, tasks), (_send_all, answers)):
        threading.Thread(target=moves, args=(connection, messages), daemon=True).start()
    try:
        function = pickle.loads(payload)
    except Exception as error:  # noqa: BLE001 (a worker's edge: the parent raises it)
        answers.put(pickle.dumps((_NO_TASK, True, _portable(error))))
        threading.Event().wait()  # for the end
    while True:
        number, task = pickle.loads(tasks.get())
        try:
            answer = pickle.dumps((number, False, function(task)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 (a worker's edge: the parent raises it)
            answer = pickle.dumps((number, True, _portable(error)))
        answers.put(answer)


def _receive_all(connection: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone, or wants no more: nobody reads what is under way


def _send_all(connection: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            connection.send_bytes(messages.get())
        except OSError:
            os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error as it can be sent, with its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"In a worker process:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (an error that cannot be pickled, for whatever reason)
        return RuntimeError(f"A worker process failed:\n{text}")
    return error
