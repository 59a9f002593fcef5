"""What a reward model's recipe may say."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from burnish_apps.supervised import config as supervised


class Training(supervised.Training):
    """The optimizer steps over the pairs. ``max_length`` is that of one side with its prompt."""

    too_long: Literal["error", "skip"] = "error"  # a cut answer cannot be judged
    center_coefficient: NonNegativeFloat = 0.0  # pull of the scores towards 0; 0.01 is usual


class RmConfig(supervised.SupervisedConfig):
    """A whole run."""

    sequences_per_row: ClassVar[int] = 2

    name: str = Field(default="rm", pattern=r"^\w[\w.+-]*$")  # part of a folder's name
    training: Training
