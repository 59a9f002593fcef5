"""Groups of Ray actors that run plain classes, with failures that name the worker.

A worker's class knows nothing of Ray: it is built in a process of its own and its methods are
called from the driver. The same class runs under torchrun, or in the driver, unchanged.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class WorkerError(RuntimeError):
    """A worker raised or died. The message names the group, the rank and the cause."""


class _Host:
    """The actor: builds the given class in its process and passes calls on."""

    def __init__(self) -> None:
        self._target: Any = None

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free now."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return ray.util.get_node_ip_address(), port

    def build(
        self, cls: type, kwargs: Mapping[str, Any], rank_environment: Mapping[str, str]
    ) -> int:
        os.environ.update(rank_environment)
        with _portable_errors():
            self._target = cls(**kwargs)
        return os.getpid()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with _portable_errors():
            return getattr(self._target, method)(*args, **kwargs)


@contextmanager
def _portable_errors() -> Iterator[None]:
    """Exceptions that would not survive pickling leave as RuntimeErrors of the same text."""
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  (whatever their own constructors and state raise)
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


class Worker:
    """A remote object: ``worker.method(...)`` runs there and returns the result here."""

    def __init__(self, group: WorkerGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):  # what copy and pickle look for is not there
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {method!r}")

        def call(*args: Any, **kwargs: Any) -> Any:
            submitted = [self._group.submit(self._rank, method, args, kwargs)]
            return self._group.wait(submitted, method, ranks=[self._rank])[0]

        return call


class WorkerGroup:
    """``num_workers`` processes, each holding one instance of ``cls``.

    Args:
        cls: an importable class; its methods' arguments and results must pickle.
        kwargs: keyword arguments of its constructor, the same for every rank.
        num_workers: processes.
        name: what error messages call the group.
        environment: environment variables of the processes, set before Python starts in them
            (thread counts, engine settings).
        num_cpus: cores Ray reserves for each worker (a fraction is allowed).
        num_gpus: GPUs Ray reserves for each worker.
        placement_timeout_s: how long the workers may wait for those cores and GPUs, and for their
            processes to begin; other runs may hold them.

    Every worker also gets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
    ``MASTER_PORT``, as under torchrun.

    Raises:
        ValueError: if the whole cluster has not the cores or GPUs that are asked for.
        WorkerError: if a worker gets no place in time, or cannot be built; the group is taken down
            first.
    """

    def __init__(
        self,
        cls: type,
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 1,
        name: str = "",
        environment: Mapping[str, str] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        placement_timeout_s: float = 600.0,
    ) -> None:
        import ray

        self.name = name or cls.__name__
        self.num_workers = num_workers
        _check_resources(self.name, num_workers, {"CPU": num_cpus, "GPU": num_gpus})
        host: Any = ray.remote(_Host).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            runtime_env={"env_vars": dict(environment or {})},
        )
        self._actors: list[Any] = [host.remote() for _ in range(num_workers)]
        try:
            placed = [actor.address.remote() for actor in self._actors]
            address, port = self.wait(placed, "address", timeout_s=placement_timeout_s)[0]
            building = [
                actor.build.remote(
                    cls, dict(kwargs or {}), _rank_environment(rank, num_workers, address, port)
                )
                for rank, actor in enumerate(self._actors)
            ]
            self.pids: list[int] = self.wait(building, "build")
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[Worker]:
        """One handle per rank."""
        return [Worker(self, rank) for rank in range(self.num_workers)]

    def submit(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Start a call on one rank; returns Ray's reference to its result."""
        return self._actors[rank].call.remote(method, args, dict(kwargs))

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``method`` on every rank at once.

        Args:
            method: the method's name.
            per_rank: one tuple of positional arguments per rank; none without.
            kwargs: keyword arguments, the same for every rank.

        Returns:
            The results, in rank order.

        Raises:
            WorkerError: as soon as one rank fails; the others may still be waiting for it in a
                collective, so close the group then.
        """
        arguments = per_rank if per_rank is not None else [()] * self.num_workers
        if len(arguments) != self.num_workers:
            raise ValueError(
                f"per_rank must hold one tuple per worker ({self.num_workers}), "
                f"got {len(arguments)}"
            )
        running = [self.submit(rank, method, args, kwargs) for rank, args in enumerate(arguments)]
        return self.wait(running, method)

    def wait(
        self,
        references: Sequence[Any],
        method: str,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Results of `submit`'s references in order; the first failure is raised at once.

        Raises:
            WorkerError: also when not all are there after ``timeout_s`` seconds.
        """
        import ray

        rank_of = dict(zip(references, ranks or range(len(references)), strict=True))
        pending = list(references)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pending:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=left_s)
            if not ready:
                raise WorkerError(
                    f"{len(pending)} of {self.num_workers} workers of {self.name} did not answer "
                    f"within {timeout_s:g} s (in {method}); look with `ray status` whether others "
                    "hold the cores or GPUs they wait for"
                )
            done = ready[0]
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                raise WorkerError(_failure(self.name, rank_of[done], method, error)) from error
        return list(ray.get(list(references)))

    def close(self) -> None:
        """Kill the workers. Safe to call twice, and after Ray is gone."""
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        self._actors = []


def _check_resources(name: str, num_workers: int, each: Mapping[str, float]) -> None:
    """Refuse what the cluster could never place; Ray would wait for it for ever."""
    import ray

    exists = ray.cluster_resources()
    short = [
        f"{num_workers * number:g} {kind}s of {exists.get(kind, 0.0):g}"
        for kind, number in each.items()
        if num_workers * number > exists.get(kind, 0.0) + 1e-6  # fractions add up inexactly
    ]
    if short:
        raise ValueError(
            f"{name} must fit the cluster, but {num_workers} workers ask for {' and '.join(short)} "
            "that it has; take fewer workers, or less for each"
        )


def _failure(name: str, rank: int, method: str, error: BaseException) -> str:
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        what = f"raised {type(error.cause).__name__}: {error.cause}"
    elif not isinstance(error, ray.exceptions.RayActorError):
        what = f"gave no result, {type(error).__name__}: {str(error)[-1000:]}"
    else:
        what = (
            f"died ({type(error).__name__}); look for an out-of-memory kill or a crash in its log"
        )
    return f"worker {rank} of {name} {what} (in {method})"


def _rank_environment(rank: int, num_workers: int, address: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # Ray shows each worker only its own GPUs
        "WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
