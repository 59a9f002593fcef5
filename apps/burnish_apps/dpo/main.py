"""Preference optimization of a language model on pairs of answers (DPO and its relatives).

Each step takes `training.batch_size` pairs, packs them without padding, the shared prompt of a pair
once, and raises the probability of the better answer against that of the worse, both relative to
the model before training. `training.loss` names the objective: DPO with any pair loss (IPO, hinge,
robust, ...), CPO, SimPO, ORPO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from burnish_data import encode_preferences

from burnish_apps.dpo.config import DpoConfig
from burnish_apps.dpo.reference import Cache, on_the_fly
from burnish_apps.shell.config import load_config
from burnish_apps.shell.model import load_tokenizer, model_folder
from burnish_apps.supervised.loop import Task, nothing, run_task, train, unchanged
from burnish_apps.supervised.pairs import pair_batch

RECIPES = Path(__file__).parent / "recipes"


def run(recipe: str, overrides: Sequence[str]) -> int:
    """Load the recipe, check it, and train; returns the exit code."""
    return run_task(load_config(DpoConfig, RECIPES, recipe, overrides), main)


def main(config: DpoConfig) -> Path:
    """The whole run; returns its directory."""
    model = model_folder(config.model)
    training = config.training
    cache = Cache(training)
    is_cached = training.reference == "cached"
    prepare = {"cached": cache.add, "on_the_fly": on_the_fly, None: unchanged}
    task = Task(
        encode=partial(
            encode_preferences,
            tokenizer=load_tokenizer(model),
            max_length=training.max_length,
            too_long=training.too_long,
        ),
        batch=pair_batch,
        loss_fn=training.loss_function(),
        step_line=partial(line, "train"),
        held_out_line=partial(line, "validation"),
        curve="train/rewards/accuracy",
        begin=cache.fill if is_cached else nothing,
        prepare=prepare[training.reference],
        # To adapters the reference is the model without them, which costs nothing.
        reference=training.reference == "on_the_fly" or (is_cached and training.lora is not None),
    )
    return train(config, model, task)


def line(part: str, metrics: Mapping[str, float]) -> str:
    """Loss, accuracy and margin of the rewards."""
    return (
        f"loss {metrics[f'{part}/loss']:.4f}  accuracy {metrics[f'{part}/rewards/accuracy']:.3f}  "
        f"margin {metrics[f'{part}/rewards/margin']:.3f}"
    )
