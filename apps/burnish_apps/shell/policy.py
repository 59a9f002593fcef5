"""The ranks that train, and who starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from burnish_distributed import initialize_process_group
from burnish_trainer.policy import Head
from burnish_trainer.policy_group import PolicyGroup
from transformers.utils.logging import disable_progress_bar

from burnish_apps.shell.config import ConfigError
from burnish_apps.shell.optimization import Optimization
from burnish_apps.shell.settings import Model

Launcher = Literal["local", "ray", "torchrun"]


@contextmanager
def launched_by(launcher: Launcher, num_ranks: int) -> Iterator[None]:
    """Under torchrun: one of the ranks it started, for the time of the block.

    Raises:
        ConfigError: if torchrun did not start this process, or not that many.
    """
    if launcher != "torchrun":
        yield
        return
    started = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if started != str(num_ranks):
        raise ConfigError(
            [
                f"training.num_ranks: must be the number of processes that torchrun started, got "
                f"{num_ranks} and {started or 'none'}; run torchrun --nproc-per-node {num_ranks} "
                "-m burnish_apps.shell.cli with the command's arguments"
            ]
        )
    initialize_process_group(
        rank=int(os.environ["RANK"]),
        world_size=num_ranks,
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    )
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def num_cpus(num_processes: int) -> int:
    """Cores a local cluster offers: every process gets a place, also on a small machine."""
    return max(os.cpu_count() or 1, num_processes)


def num_threads(num_processes: int) -> int:
    """Threads of one of ``num_processes`` that compute at the same time on this machine."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def start_policy(
    model: Model,
    folder: Path,
    training: Optimization,
    *,
    num_updates: int,
    seed: int,
    launcher: Launcher = "ray",
    head: Head = "language",
    reference: bool = False,
) -> PolicyGroup:
    """Build the policy on its ranks.

    Args:
        model: which one, and what it computes in.
        folder: its checkpoint.
        training: how it is trained, and where.
        num_updates: steps of the optimizer in the whole run.
        seed: of dropout, new heads and adapters.
        launcher: who starts the ranks; see `PolicyGroup`.
        head: what the model gives: log-probs, values or scores.
        reference: keep the first weights for `PolicyGroup.reference_logprobs`.
    """
    disable_progress_bar()  # of reading weights, which takes a moment
    arguments: dict[str, Any] = {
        "model": str(folder),
        "learning_rate": training.learning_rate,
        "head": head,
        "optimizer": training.optimizer,
        "optimizer_args": training.optimizer_args,
        "schedule": training.schedule,
        "schedule_args": training.schedule_arguments(num_updates),
        "max_grad_norm": training.max_grad_norm,
        "on_nonfinite": training.on_nonfinite,
        "frozen": training.frozen,
        "lora": training.lora,
        "dtype": model.dtype,
        "device": "cuda" if training.gpus_per_rank else "cpu",
        "reference": reference,
        "gradient_checkpointing": training.gradient_checkpointing,
        "seed": seed,
    }
    return PolicyGroup(
        arguments,
        num_ranks=training.num_ranks,
        launcher=launcher,
        environment={"OMP_NUM_THREADS": str(num_threads(training.num_ranks))},
        num_gpus=training.gpus_per_rank,
    )
