"""One Ray cluster, local or remote. A launcher: the one place that sets Ray's environment."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_cluster(
    address: str | None = None, *, num_cpus: int | None = None, log_to_driver: bool = False
) -> Iterator[None]:
    """A connection to Ray for the time of a ``with`` block.

    Args:
        address: ``None`` starts a cluster of this one machine and takes it down at the end;
            ``"auto"`` or ``"host:port"`` joins a running one and leaves it running.
        num_cpus: cores the local cluster offers to actors; defaults to this machine's.
        log_to_driver: print the workers' output here.

    Usage statistics and the dashboard of a local cluster are off. Its ports are open to the
    network, as Ray's are; who connects must have the token that Ray keeps in the home directory.

    Raises:
        ConnectionError: if ``address`` names no reachable cluster.
    """
    _check_reachable(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call after shutdown must not start a new one
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"  # no GPU reserved, none seen
    import ray

    options: dict[str, Any] = {
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
    }
    if address is None:
        options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    else:
        options |= {"address": address}
    ray.init(**options)
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Whether someone listens at ``host:port``; Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(
            f"address must be that of a running Ray cluster, got {address} ({error}); start one "
            "there with `ray start --head`"
        ) from error
