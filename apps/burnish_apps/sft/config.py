"""What an SFT recipe may say."""

from __future__ import annotations

from burnish_data.encode import TrainOn
from pydantic import Field

from burnish_apps.shell.settings import UserPath
from burnish_apps.supervised import config as supervised


class Data(supervised.Data):
    """Rows, and how they are read."""

    image_folder: UserPath | None = None  # where relative paths of images begin


class Training(supervised.Training):
    """The optimizer steps over the chats."""

    train_on: TrainOn = "assistant"  # every turn of the assistant; last; all


class SftConfig(supervised.SupervisedConfig):
    """A whole run."""

    name: str = Field(default="sft", pattern=r"^\w[\w.+-]*$")  # part of a folder's name
    data: Data
    training: Training
