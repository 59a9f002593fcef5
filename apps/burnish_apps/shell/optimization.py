"""How weights are trained, whatever the objective; every setting is tried before a run starts."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import torch
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

from burnish_apps.shell.config import Section, argument_problems, cause

SCHEDULE = ("schedule", "burnish_trainer.schedules.cosine")  # what it is, and an example of one


def _whole_or_fraction(value: float) -> float:
    if value > 1 and value != int(value):
        raise ValueError("must be a whole number, or a fraction below 1")
    return value


Gpus = Annotated[NonNegativeFloat, AfterValidator(_whole_or_fraction)]  # as Ray reserves them


class Optimization(Section):
    """The optimizer and what it moves. Tokens are counted per micro-batch and rank."""

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
    max_tokens: PositiveInt  # of a micro-batch
    num_ranks: PositiveInt = 1
    gpus_per_rank: Gpus = 0
    gradient_checkpointing: bool = False

    def given_to_schedule(self, num_updates: int) -> dict[str, int]:
        """What the app tells any schedule that takes it, in optimizer steps."""
        return {"warmup_steps": self.warmup_steps, "num_steps": num_updates}

    def schedule_arguments(self, num_updates: int) -> dict[str, Any]:
        """``schedule_args``, and of the app's own those that the schedule takes."""
        parameters = inspect.signature(imported(self.schedule, *SCHEDULE)).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = self.given_to_schedule(num_updates).items()
        return self.schedule_args | {k: v for k, v in given if takes_any or k in parameters}

    def problems(self, num_updates: int) -> list[str]:
        """Why training cannot begin; ``num_updates`` are the optimizer's steps in the whole run."""
        return [
            *self.optimizer_problems(),
            *self.schedule_problems(num_updates),
            *self.lora_problems(),
        ]

    def optimizer_problems(self) -> list[str]:
        """Why the optimizer cannot be built; it is, for a small parameter."""
        path, arguments, where = self.optimizer, self.optimizer_args, "training.optimizer_args"
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
            parameter = torch.nn.Parameter(torch.zeros(2, 2))
            built: object = build_optimizer(
                [parameter],
                optimizer=path,
                learning_rate=self.learning_rate,
                optimizer_args=arguments,
            )
        except Exception as error:  # noqa: BLE001  (whatever its constructor raises)
            return [f"{where}: {path} cannot be built with {arguments}, {cause(error)}"]
        if isinstance(built, torch.optim.Optimizer):
            return []
        return [f"training.optimizer: must name an optimizer, got {path!r}, which is none"]

    def schedule_problems(self, num_updates: int) -> list[str]:
        """Why the schedule cannot be followed; its first and last steps are tried."""
        where, path, given = "training.schedule_args", self.schedule, self.given_to_schedule(1)
        ours = sorted(given.keys() & self.schedule_args.keys())
        if ours:
            return [
                f"{where}: must not hold {' and '.join(ours)}, which the app gives; set "
                "training.warmup_steps and training.num_steps"
            ]
        try:
            function = imported(path, *SCHEDULE)
            arguments = self.schedule_arguments(num_updates)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a module may raise anything)
            return [f"training.schedule: {cause(error)}"]
        if self.warmup_steps and "warmup_steps" not in arguments:
            return [f"training.warmup_steps: must be 0 for {path}, which does not take it"]
        problems = argument_problems(function, ["step", *arguments], where)
        if problems:
            return problems
        try:
            for step in (0, num_updates - 1):
                schedule_factor(path, step, arguments)
        except Exception as error:  # noqa: BLE001  (whatever the function raises)
            return [f"{where}: {path} fails with {arguments}, {cause(error)}"]
        return []

    def lora_problems(self) -> list[str]:
        """Why adapters cannot be configured; whether they fit the model shows with it."""
        if self.lora is None:
            return []
        try:
            lora_config(self.lora)
        except Exception as error:  # noqa: BLE001  (whatever peft raises)
            return [f"training.lora: {cause(error)}"]
        return []
