"""What a recipe of a supervised app may say."""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish_data.encode import TooLong
from burnish_data.rows import OnBadRow
from pydantic import Field, PositiveInt

from burnish_apps.shell import settings
from burnish_apps.shell.config import ConfigError
from burnish_apps.shell.optimization import Optimization
from burnish_apps.shell.policy import Launcher
from burnish_apps.shell.settings import RunSettings, resume_problems

STATE = {"step": int, "loader": dict}  # beside a checkpoint
UNKNOWN_STEPS = 1_000_000  # for checks, where the number shows with the data


class Data(settings.Data):
    """Rows, and how they are read."""

    on_bad_row: OnBadRow = "error"  # skip: leave it out, and count it
    num_workers: PositiveInt = 1  # processes that encode


class Training(Optimization):
    """The optimizer steps over the data set. Lengths in tokens."""

    num_steps: PositiveInt | None = None
    num_epochs: PositiveInt | None = None
    batch_size: PositiveInt  # rows of an optimizer step, over all ranks
    max_length: int = Field(ge=2)  # of a sequence
    too_long: TooLong = "error"
    packing: Literal["packed", "padded", "fixed"] = "packed"
    micro_batch_size: PositiveInt | None = None  # sequences, for packing=fixed

    def steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run."""
        if self.num_epochs is not None:
            return self.num_epochs * steps_per_epoch
        assert self.num_steps is not None
        return self.num_steps


class SupervisedConfig(RunSettings):
    """A whole run; an app's own config adds to it."""

    sequences_per_row: ClassVar[int] = 1  # that stay in one micro-batch

    launcher: Launcher = "ray"  # local: this process is the only rank
    data: Data
    training: Training

    def check(self) -> None:
        """Everything that can be told without reading model and data.

        Raises:
            ConfigError: with every violation.
        """
        problems = self.problems()
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))

    def problems(self) -> list[str]:
        """Every violation, one sentence each."""
        training = self.training
        num_steps = None if training.num_epochs else training.num_steps
        return [
            *self.data.problems(),
            *self.model.problems(),
            *training.problems(num_steps or UNKNOWN_STEPS),
            *resume_problems(self.resume_from, num_steps, STATE),
            *self.length_problems(),
            *self.launch_problems(),
        ]

    def length_problems(self) -> list[str]:
        """Numbers of the training that contradict each other."""
        training, problems = self.training, []
        if (training.num_steps is None) == (training.num_epochs is None):
            given = "neither" if training.num_steps is None else "both"
            problems.append(f"training: must give one of num_steps and num_epochs, got {given}")
        if (training.packing == "fixed") != (training.micro_batch_size is not None):
            problems.append(
                f"training.micro_batch_size must be given for packing=fixed and no other, got "
                f"{training.micro_batch_size} for {training.packing}"
            )
        longest = self.sequences_per_row * training.max_length
        if training.max_tokens < longest:
            problems.append(
                f"training.max_tokens must hold the longest row, {self.sequences_per_row} x "
                f"training.max_length = {longest}, got {training.max_tokens}"
            )
        if training.batch_size < training.num_ranks:
            problems.append(
                f"every rank must have a row in each step, got training.batch_size = "
                f"{training.batch_size} for {training.num_ranks} ranks; raise it"
            )
        return problems

    def launch_problems(self) -> list[str]:
        """What the launcher cannot start."""
        training, problems = self.training, []
        if self.launcher != "ray" and self.ray_address is not None:
            problems.append(
                f"ray_address: must go with launcher=ray, got {self.launcher}; leave it out"
            )
        if self.launcher == "local" and training.num_ranks != 1:
            problems.append(
                f"training.num_ranks: must be 1 for launcher=local, got {training.num_ranks}; "
                "use ray or torchrun"
            )
        if self.launcher == "local" and self.model.dtype != "float32":
            problems.append(
                f"model.dtype: must be float32 for launcher=local, got {self.model.dtype}; use ray "
                "or torchrun"
            )
        return problems
