"""Supervised fine-tuning of a language model on chats (SFT).

Each step takes `training.batch_size` conversations, packs them without padding into micro-batches,
and raises the probability of what the assistant says in them. The loss is the mean over the trained
tokens of the whole batch, however it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from burnish_data import BadRowError, Encoded, encode_chats
from burnish_data.multimodal import encode_images
from burnish_data.sources import with_answer
from burnish_losses.supervised import nll_loss

from burnish_apps.sft.config import SftConfig
from burnish_apps.sft.images import Numbered, WithPixels, encode_without_pixels, load_processor
from burnish_apps.shell.config import load_config
from burnish_apps.shell.model import load_tokenizer, model_config, model_folder
from burnish_apps.supervised.batches import make_batch
from burnish_apps.supervised.loop import Task, run_task, train

RECIPES = Path(__file__).parent / "recipes"


def run(recipe: str, overrides: Sequence[str]) -> int:
    """Load the recipe, check it, and train; returns the exit code."""
    return run_task(load_config(SftConfig, RECIPES, recipe, overrides), main)


def main(config: SftConfig) -> Path:
    """The whole run; returns its directory."""
    model = model_folder(config.model)
    task = Task(
        batch=make_batch,
        loss_fn=nll_loss,
        step_line=lambda metrics: f"loss {metrics['train/loss']:.4f}",
        held_out_line=lambda metrics: f"loss {metrics['validation/loss']:.4f}",
        **encoding(config, model),
    )
    return train(config, model, task)


def encoding(config: SftConfig, model: Path) -> dict[str, Any]:
    """How a `Task` encodes rows: by the model's tokenizer, or with images by its processor."""
    training = config.training
    options: dict[str, Any] = {
        "train_on": training.train_on,
        "max_length": training.max_length,
        "too_long": training.too_long,
    }
    if getattr(model_config(model), "vision_config", None) is None:
        return {"encode": partial(encode, tokenizer=load_tokenizer(model), **options)}
    one = partial(
        encode_image_row,
        processor=load_processor(model),
        image_folder=config.data.image_folder,
        **options,
    )
    return {
        "encode": partial(encode_without_pixels, encode_one=one),
        "before": Numbered,
        "after": partial(WithPixels, encode_one=one),
    }


def encode(rows: Sequence[Any], **options: Any) -> list[Encoded | BadRowError]:
    """Chats, or problems with their answers, as token ids; see `encode_chats`."""
    return encode_chats([as_chat(row) for row in rows], **options)


def encode_image_row(row: Any, **options: Any) -> dict[str, Any]:
    """A chat, or a problem with its answer, as token ids and pixels; see `encode_images`."""
    return encode_images(as_chat(row), **options)


def as_chat(row: Any) -> Any:
    """A problem with its answer as a chat; what else there is as it is."""
    is_problem = isinstance(row, Mapping) and {"prompt", "answer"} <= row.keys()
    return with_answer(row) if is_problem and "messages" not in row else row
