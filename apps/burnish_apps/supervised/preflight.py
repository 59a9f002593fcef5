"""What is checked with model and data at hand, before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from burnish_apps.shell.config import ConfigError
from burnish_apps.shell.model import (
    available_bytes,
    model_config,
    num_gpus,
    num_parameters,
    training_bytes,
)
from burnish_apps.shell.settings import resume_problems
from burnish_apps.supervised.config import STATE, SupervisedConfig
from burnish_apps.supervised.data import EncodedRows


def preflight(
    config: SupervisedConfig,
    model: Path,
    data: Sequence[EncodedRows],
    num_steps: int,
    *,
    reference: bool,
) -> None:
    """Check steps, lengths, memory and GPUs.

    Raises:
        ConfigError: with every violation.
    """
    limit = getattr(model_config(model).get_text_config(), "max_position_embeddings", None)
    needed = training_bytes(num_parameters(model), config.training, reference=reference)
    problems = [
        *config.training.schedule_problems(num_steps),
        *resume_problems(config.resume_from, num_steps, STATE),
        *length_problems(config, limit, data),
        *machine_problems(config, needed),
    ]
    if problems:
        raise ConfigError(problems)


def length_problems(
    config: SupervisedConfig, limit: int | None, data: Sequence[EncodedRows]
) -> list[str]:
    """Sequences that are longer than the model was made for."""
    longest = max(rows.longest for rows in data)
    if limit is None or longest <= limit:
        return []
    return [
        f"training.max_length must keep sequences within the model's {limit} tokens, got "
        f"{longest} in the data and a max_length of {config.training.max_length}; lower it"
    ]


def machine_problems(config: SupervisedConfig, needed: int) -> list[str]:
    """More GPUs or memory than this machine has, where the run is to be on it alone."""
    training = config.training
    if config.ray_address is not None or config.launcher == "torchrun":
        return []
    asked = training.num_ranks * training.gpus_per_rank
    if asked > (found := num_gpus()):
        return [
            f"training.gpus_per_rank must fit this machine's {found} GPUs, got {asked:g} for "
            f"{training.num_ranks} ranks; ask for fewer, or give ray_address of a cluster that has "
            "them"
        ]
    free = available_bytes()
    if training.gpus_per_rank or needed <= free:
        return []
    return [
        f"weights and optimizer must fit this machine's free memory, {free / 1e9:.1f} GB, but need "
        f"{needed / 1e9:.1f} GB; take a smaller model, train adapters (training.lora), or free "
        "memory"
    ]
