"""The processes of a run: the policy's ranks and the engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from burnish_distributed.workers import WorkerGroup
from burnish_generation import Replicas
from burnish_generation.replicas import at_once
from burnish_generation.vllm_engine import VllmEngine, engine_environment
from burnish_trainer.policy_group import PolicyGroup

from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.shell.policy import num_threads, start_policy


def start(config: GrpoConfig, model: Path) -> tuple[PolicyGroup, Replicas]:
    """Start the policy and the engines side by side.

    They take turns, so each may use all cores.
    """
    training = config.training
    calls: list[Callable[[], Any]] = [
        partial(
            start_policy,
            config.model,
            model,
            training,
            num_updates=training.num_updates,
            seed=config.seed,
            reference=training.kl_coefficient > 0,
        ),
        partial(start_engines, config, model),
    ]
    policy, engines = at_once(calls)
    return policy, engines


def start_engines(config: GrpoConfig, model: Path) -> Replicas:
    """The engines, each in a process of its own, behind one handle."""
    engine = config.engine
    arguments: dict[str, Any] = {
        "model": str(model),
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
