"""The processes of a run: the policy's ranks and the engines."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from burnish_distributed.workers import WorkerGroup
from burnish_generation import Replicas
from burnish_generation.replicas import at_once
from burnish_generation.vllm_engine import VllmEngine, engine_environment
from burnish_trainer.policy_group import PolicyGroup

from burnish_apps.grpo.config import GrpoConfig


def num_cpus(config: GrpoConfig) -> int:
    """Cores a local cluster offers: every process gets a place, also on a small machine."""
    return max(os.cpu_count() or 1, config.training.num_ranks + config.engine.num_engines)


def num_threads(num_processes: int) -> int:
    """Threads of one of ``num_processes`` that compute at the same time on this machine."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def start(config: GrpoConfig, model: str) -> tuple[PolicyGroup, Replicas]:
    """Start the policy and the engines side by side.

    They take turns, so each may use all cores.
    """
    calls: list[Callable[[], Any]] = [
        partial(start_policy, config, model),
        partial(start_engines, config, model),
    ]
    policy, engines = at_once(calls)
    return policy, engines


def start_policy(config: GrpoConfig, model: str) -> PolicyGroup:
    """The ranks that train."""
    training = config.training
    arguments: dict[str, Any] = {
        "model": model,
        "learning_rate": training.learning_rate,
        "optimizer": training.optimizer,
        "optimizer_args": training.optimizer_args,
        "schedule": training.schedule,
        "schedule_args": training.schedule_arguments(),
        "max_grad_norm": training.max_grad_norm,
        "on_nonfinite": training.on_nonfinite,
        "frozen": training.frozen,
        "lora": training.lora,
        "dtype": config.model.dtype,
        "device": "cuda" if training.gpus_per_rank else "cpu",
        "reference": training.kl_coefficient > 0,
        "gradient_checkpointing": training.gradient_checkpointing,
        "seed": config.seed,
    }
    return PolicyGroup(
        arguments,
        num_ranks=training.num_ranks,
        environment={"OMP_NUM_THREADS": str(num_threads(training.num_ranks))},
        num_gpus=training.gpus_per_rank,
    )


def start_engines(config: GrpoConfig, model: str) -> Replicas:
    """The engines, each in a process of its own, behind one handle."""
    engine = config.engine
    arguments: dict[str, Any] = {
        "model": model,
        "max_model_len": engine.max_model_len,
        "kv_cache_bytes": engine.kv_cache_bytes,
        "dtype": config.model.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "seed": config.seed,
        "engine_args": engine.engine_args,
    }
    group = WorkerGroup(
        VllmEngine,
        arguments,
        num_workers=engine.num_engines,
        name="engine",
        environment=engine_environment(num_threads(engine.num_engines)),
        num_gpus=engine.gpus_per_engine,
    )
    return Replicas(group.workers)
