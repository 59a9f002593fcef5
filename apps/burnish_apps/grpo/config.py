"""What a GRPO recipe may say."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import torch
from burnish_converters.model_source import check_model_source
from burnish_trainer.checkpoint import read_state
from burnish_trainer.lora import lora_config
from burnish_trainer.optim import build_optimizer, imported, schedule_factor
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from burnish_apps.shell.config import ConfigError, Part, Section, argument_problems, cause


def _whole_or_fraction(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("must be a whole number, or a fraction below 1")
    return value


Gpus = Annotated[NonNegativeFloat, AfterValidator(_whole_or_fraction)]  # as Ray reserves them
SCHEDULE = ("schedule", "burnish_trainer.schedules.cosine")  # what it is, and an example of one
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]


class Model(Section):
    """The model that is trained."""

    source: str  # a checkpoint folder, a packaged name, or a hub id
    cache_dir: str = "~/.cache/burnish/models"
    dtype: Literal["float32", "bfloat16"] = "float32"


class Data(Section):
    """Problems: ``source.make(**train)`` and ``source.make(**validation)`` are lists of rows."""

    source: Part
    train: dict[str, Any] = Field(default_factory=dict)
    validation: dict[str, Any] = Field(default_factory=dict)


class Rollout(Section):
    """How the policy is sampled."""

    prompts_per_step: PositiveInt
    group_size: int = Field(ge=2)
    max_new_tokens: PositiveInt
    temperature: float = Field(default=1.0, ge=0.01, le=2)  # vLLM raises less, and refuses more
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class Engine(Section):
    """The inference engines. Lengths in tokens, memory in bytes per engine."""

    num_engines: PositiveInt = 1
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt = 256
    kv_cache_bytes: PositiveInt | None = None
    gpus_per_engine: Gpus = 0
    engine_args: dict[str, Any] = Field(default_factory=dict)
    max_mismatch: PositiveFloat | None = 5e-5  # mean |log-prob difference| to the trainer, in nats


class Training(Section):
    """The optimizer step. Tokens are counted per micro-batch and rank."""

    num_steps: PositiveInt
    learning_rate: PositiveFloat
    optimizer: str = "torch.optim.AdamW"
    optimizer_args: dict[str, Any] = Field(default_factory=lambda: {"weight_decay": 0.0})
    schedule: str = "burnish_trainer.schedules.constant"
    schedule_args: dict[str, Any] = Field(default_factory=dict)
    warmup_steps: NonNegativeInt = 0
    max_grad_norm: PositiveFloat = 1.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    lora: dict[str, Any] | None = None  # arguments of peft.LoraConfig; null: the weights themselves
    frozen: tuple[str, ...] = ()  # globs over the names of parameters that are not trained
    updates_per_step: PositiveInt = 1
    max_tokens: PositiveInt  # of a packed micro-batch
    num_ranks: PositiveInt = 1
    gpus_per_rank: Gpus = 0
    gradient_checkpointing: bool = False
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    kl_coefficient: NonNegativeFloat = 0.0
    normalize_advantages: bool = True
    aggregation: Literal["tokens", "sequences"] = "tokens"

    def given_to_schedule(self) -> dict[str, int]:
        """What the app tells any schedule that takes it, in optimizer steps."""
        return {
            "warmup_steps": self.warmup_steps,
            "num_steps": self.num_steps * self.updates_per_step,
        }

    def schedule_arguments(self) -> dict[str, Any]:
        """``schedule_args``, and of the app's own those that the schedule takes."""
        parameters = inspect.signature(imported(self.schedule, *SCHEDULE)).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = self.given_to_schedule().items()
        return self.schedule_args | {k: v for k, v in given if takes_any or k in parameters}


class GrpoConfig(Section):
    """A whole run."""

    name: str = Field(default="grpo", pattern=r"^\w[\w.+-]*$")  # part of a folder's name
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    run_dir: UserPath | None = None
    ray_address: str | None = None
    resume_from: UserPath | None = None  # a step_* folder of an earlier run's checkpoints
    validate_every: NonNegativeInt = 10  # steps; 0: only before and after
    checkpoint_every: NonNegativeInt = 0  # steps; 0: only at the end
    keep_checkpoints: PositiveInt = 1
    model: Model
    data: Data
    environment: Part
    rollout: Rollout
    engine: Engine
    training: Training

    def check(self) -> None:
        """Everything that can be told without reading the model.

        Raises:
            ConfigError: with every violation.
        """
        problems = self.environment.problems("environment")
        train, validation = sorted(self.data.train), sorted(self.data.validation)
        problems += self.data.source.problems("data.source", train)
        problems += self.data.source.problems("data.source", validation)
        try:
            check_model_source(self.model.source)
        except ValueError as error:
            problems.append(f"model.source: {error}")
        problems += self.optimizer_problems()
        problems += self.schedule_problems()
        problems += self.lora_problems()
        if self.resume_from is not None:
            problems += self.resume_problems(Path(self.resume_from))
        prompts, updates = self.rollout.prompts_per_step, self.training.updates_per_step
        if prompts % updates:
            problems.append(
                f"rollout.prompts_per_step must be a multiple of training.updates_per_step, got "
                f"{prompts} and {updates}; change one of them"
            )
        smallest = prompts // updates * self.rollout.group_size
        if smallest < self.training.num_ranks:
            problems.append(
                f"every rank must have a sequence in each update, got {smallest} sequences for "
                f"{self.training.num_ranks} ranks; raise rollout.prompts_per_step"
            )
        if self.rollout.max_new_tokens >= self.engine.max_model_len:
            problems.append(
                f"engine.max_model_len must exceed rollout.max_new_tokens, got "
                f"{self.engine.max_model_len} and {self.rollout.max_new_tokens}"
            )
        if self.training.max_tokens < self.engine.max_model_len:
            problems.append(
                f"training.max_tokens must hold the longest sequence, engine.max_model_len = "
                f"{self.engine.max_model_len}, got {self.training.max_tokens}"
            )
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))

    def optimizer_problems(self) -> list[str]:
        """Why the optimizer cannot be built; it is, for a small parameter."""
        path, arguments = self.training.optimizer, self.training.optimizer_args
        where = "training.optimizer_args"
        ours = sorted({"params", "lr"} & set(arguments))
        if ours:
            return [
                f"{where}: must not hold {' and '.join(ours)}, which the app gives; set "
                "training.learning_rate"
            ]
        try:
            optimizer = imported(path, "optimizer", "torch.optim.AdamW")
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a module may raise anything)
            return [f"training.optimizer: {cause(error)}"]
        problems = argument_problems(optimizer, ["params", "lr", *arguments], where)
        if problems:
            return problems
        try:
            rate, parameter = self.training.learning_rate, torch.nn.Parameter(torch.zeros(2, 2))
            built: object = build_optimizer(
                [parameter], optimizer=path, learning_rate=rate, optimizer_args=arguments
            )
        except Exception as error:  # noqa: BLE001  (whatever its constructor raises)
            return [f"{where}: {path} cannot be built with {arguments}, {cause(error)}"]
        if isinstance(built, torch.optim.Optimizer):
            return []
        return [f"training.optimizer: must name an optimizer, got {path!r}, which is none"]

    def schedule_problems(self) -> list[str]:
        """Why the schedule cannot be followed; its first and last steps are tried."""
        training, where = self.training, "training.schedule_args"
        path, given = training.schedule, training.given_to_schedule()
        ours = sorted(given.keys() & training.schedule_args.keys())
        if ours:
            return [
                f"{where}: must not hold {' and '.join(ours)}, which the app gives; set "
                "training.warmup_steps and training.num_steps"
            ]
        try:
            function = imported(path, *SCHEDULE)
            arguments = training.schedule_arguments()
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a module may raise anything)
            return [f"training.schedule: {cause(error)}"]
        if training.warmup_steps and "warmup_steps" not in arguments:
            return [f"training.warmup_steps: must be 0 for {path}, which does not take it"]
        problems = argument_problems(function, ["step", *arguments], where)
        if problems:
            return problems
        try:
            for step in (0, given["num_steps"] - 1):
                schedule_factor(path, step, arguments)
        except Exception as error:  # noqa: BLE001  (whatever the function raises)
            return [f"{where}: {path} fails with {arguments}, {cause(error)}"]
        return []

    def lora_problems(self) -> list[str]:
        """Why adapters cannot be configured; whether they fit the model shows with it."""
        if self.training.lora is None:
            return []
        try:
            lora_config(self.training.lora)
        except Exception as error:  # noqa: BLE001  (whatever peft raises)
            return [f"training.lora: {cause(error)}"]
        return []

    def resume_problems(self, checkpoint: Path) -> list[str]:
        """Why the run cannot go on from a checkpoint."""
        try:
            state = read_state(checkpoint)
            done = state.get("step")
        except Exception as error:  # noqa: BLE001  (whatever the file may hold)
            return [f"resume_from: {checkpoint}/state.json cannot be read, {cause(error)}"]
        kinds = {"step": int, "weight_version": int, "loader": dict}
        lacks = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
        lacks += [] if (checkpoint / "model").is_dir() else ["model"]
        if lacks or not isinstance(done, int):
            return [
                f"resume_from: a checkpoint must hold the folder model, and step, "
                f"weight_version and loader in state.json, got {checkpoint} without "
                f"{', '.join(lacks)}; name another"
            ]
        if done < self.training.num_steps:
            return []
        return [
            f"training.num_steps must exceed the {done} steps of {checkpoint}, got "
            f"{self.training.num_steps}"
        ]


def available_bytes() -> int:
    """Memory this machine can give to new processes."""
    return int(psutil.virtual_memory().available)
