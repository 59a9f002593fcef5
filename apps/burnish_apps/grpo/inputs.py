"""What a recipe names beside its numbers and its model: problems, environment, checkpoint.

Other people's code and files are met here, before any process starts. Whatever they raise becomes a
`ConfigError` that names the key of the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from burnish_data import BadRowError, PromptLoader
from burnish_data.messages import validate_messages
from burnish_envs import Environment
from burnish_trainer.checkpoint import read_state

from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.shell.config import ConfigError, blame

Rows = list[dict[str, Any]]


def load_rows(config: GrpoConfig) -> tuple[Rows, Rows]:
    """Problems to train on, and held-out ones."""
    made = []
    for key, arguments in (("train", config.data.train), ("validation", config.data.validation)):
        with blame(f"data.source: no problems for data.{key}"):
            rows = config.data.source.make(**arguments)
            check_rows(rows)
            made.append(list(rows))
    train, validation = made
    if not train or not validation:
        found = f"{len(train)} to train on and {len(validation)} held out"
        raise ConfigError([f"data.source: data must hold problems of both kinds, got {found}"])
    return train, validation


def check_rows(rows: object) -> None:
    """Whether a source returned a list of rows.

    Raises:
        ValueError: if not, or if a row has no prompt; it is named. A prompt may be text.
    """
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise ValueError(f"must return a list of rows, got a {type(rows).__name__}")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise ValueError(
                f"row {index} must be a dict with a prompt, got {str(row)[:80]!r}, "
                f"a {type(row).__name__}"
            )
        prompt = row["prompt"]
        if not isinstance(prompt, str):
            try:
                validate_messages(prompt, where="prompt")
            except BadRowError as error:
                raise error.at(f"row {index}") from error


def make_loader(config: GrpoConfig, rows: Rows) -> PromptLoader[dict[str, Any]]:
    """The order of the problems, where a run that is resumed left off."""
    loader = PromptLoader(rows, config.rollout.prompts_per_step, seed=config.seed)
    if config.resume_from:
        with blame("resume_from: the order of the problems cannot be restored"):
            loader.load_state_dict(read_state(Path(config.resume_from))["loader"])
    return loader


def enter_environment(config: GrpoConfig, stack: ExitStack) -> Environment:
    """The environment, which the recipe's function returns itself or as a context manager."""
    with blame("environment"):
        made = config.environment.make()
        is_context = hasattr(type(made), "__enter__")
        entered = stack.enter_context(made if is_context else nullcontext(made))
    lacks = [name for name in ("prompt", "step") if not callable(getattr(entered, name, None))]
    if lacks:
        raise ConfigError(
            [
                "environment.source: must return an environment, with methods prompt and step, got "
                f"a {type(entered).__name__} without {' and '.join(lacks)}"
            ]
        )
    environment: Environment = entered
    return environment
