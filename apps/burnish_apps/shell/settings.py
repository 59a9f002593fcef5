"""The sections of a config that all apps share, and what can be told of them without the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from burnish_converters.model_source import check_model_source
from burnish_trainer.checkpoint import read_state
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from burnish_apps.shell.config import Part, Section, cause

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]


class Model(Section):
    """The model that is trained."""

    source: str  # a checkpoint folder, a packaged name, or a hub id
    cache_dir: str = "~/.cache/burnish/models"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def problems(self) -> list[str]:
        """Why there can be no such model."""
        try:
            check_model_source(self.source)
        except ValueError as error:
            return [f"model.source: {error}"]
        return []


class Data(Section):
    """Rows: ``source.make(**train)`` and ``source.make(**validation)`` are lists of them."""

    source: Part
    train: dict[str, Any] = Field(default_factory=dict)
    validation: dict[str, Any] = Field(default_factory=dict)

    def problems(self) -> list[str]:
        """Why the source cannot be called."""
        both = (self.train, self.validation)
        return [p for given in both for p in self.source.problems("data.source", sorted(given))]


class RunSettings(Section):
    """What every app's config begins with."""

    name: str = Field(pattern=r"^\w[\w.+-]*$")  # part of a folder's name
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    run_dir: UserPath | None = None
    ray_address: str | None = None
    resume_from: UserPath | None = None  # a step_* folder of an earlier run's checkpoints
    validate_every: NonNegativeInt = 10  # steps; 0: only before and after
    checkpoint_every: NonNegativeInt = 0  # steps; 0: only at the end
    keep_checkpoints: PositiveInt = 1
    model: Model


def is_due(step: int, every: int, num_steps: int) -> bool:
    """Every ``every`` steps, and at the end."""
    return step == num_steps or (every > 0 and step % every == 0)


def resume_problems(
    checkpoint: str | None, num_steps: int | None, kinds: Mapping[str, type]
) -> list[str]:
    """Why a run cannot go on from a checkpoint.

    Args:
        checkpoint: its folder; None is a run from the start.
        num_steps: of the whole run; None where that shows later.
        kinds: what the app keeps in ``state.json``, ``step`` among it.
    """
    if checkpoint is None:
        return []
    folder = Path(checkpoint)
    try:
        state = read_state(folder)
        done = state.get("step")
    except Exception as error:  # noqa: BLE001  (whatever the file may hold)
        return [f"resume_from: {folder}/state.json cannot be read, {cause(error)}"]
    lacks = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
    lacks += [] if (folder / "model").is_dir() else ["model"]
    if lacks or not isinstance(done, int):
        *names, last = kinds
        return [
            f"resume_from: a checkpoint must hold the folder model, and "
            f"{', '.join(names)} and {last} in state.json, got {folder} without "
            f"{', '.join(lacks)}; name another"
        ]
    if num_steps is None or done < num_steps:
        return []
    return [
        f"training.num_steps must exceed the {done} steps of {folder}, got {num_steps}; train for "
        "longer, or start anew"
    ]
