"""A reward model from pairs of a better and a worse answer (Bradley-Terry).

Each step takes `training.batch_size` pairs, packs them without padding, the shared prompt of a pair
once, and widens the gap between the scores of the better and the worse answer. Where rows have a
margin, the gap is to be as large. Held-out pairs are judged by accuracy, and by how far the
probabilities that the gaps stand for are from the shares that are right (calibration).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from burnish_data import encode_preferences
from burnish_distributed import RaggedBatch
from burnish_losses.reduce import count, finalize, total
from burnish_losses.reward_model import bradley_terry_loss
from burnish_trainer.policy import LossFunction
from burnish_trainer.policy_group import PolicyGroup

from burnish_apps.rm.config import RmConfig
from burnish_apps.shell.config import load_config
from burnish_apps.shell.model import load_tokenizer, model_folder
from burnish_apps.supervised.loop import Task, run_task, train
from burnish_apps.supervised.pairs import pair_batch

RECIPES = Path(__file__).parent / "recipes"
NUM_BINS = 10  # of the calibration error


def run(recipe: str, overrides: Sequence[str]) -> int:
    """Load the recipe, check it, and train; returns the exit code."""
    return run_task(load_config(RmConfig, RECIPES, recipe, overrides), main)


def main(config: RmConfig) -> Path:
    """The whole run; returns its directory."""
    model = model_folder(config.model)
    training = config.training
    task = Task(
        encode=partial(
            encode_preferences,
            tokenizer=load_tokenizer(model),
            max_length=training.max_length,
            too_long=training.too_long,
        ),
        batch=pair_batch,
        loss_fn=partial(bradley_terry_loss, center_coefficient=training.center_coefficient),
        step_line=partial(line, "train"),
        held_out_line=lambda metrics: (
            f"{line('validation', metrics)}  calibration error "
            f"{metrics['validation/calibration_error']:.3f}"
        ),
        curve="train/rewards/accuracy",
        evaluate=judge,
        head="reward",
    )
    return train(config, model, task)


def line(part: str, metrics: Mapping[str, float]) -> str:
    """Loss, accuracy and margin."""
    return (
        f"loss {metrics[f'{part}/loss']:.4f}  accuracy {metrics[f'{part}/rewards/accuracy']:.3f}  "
        f"margin {metrics[f'{part}/rewards/margin']:.3f}"
    )


def judge(
    policy: PolicyGroup, batch: RaggedBatch, plan: Any, loss_fn: LossFunction
) -> dict[str, float]:
    """Loss, metrics and calibration of held-out pairs, from one score for each answer."""
    scores = policy.scores(batch, plan)
    names = {"pair_ids", "chosen", "margins"} & batch.sequence_columns.keys()
    columns = {name: torch.tensor(batch.sequence_columns[name]) for name in names}
    output = loss_fn(torch.from_numpy(scores), columns)
    counts = count(columns)
    return {
        **finalize(output.metrics, counts),
        "loss": float(total(output.terms, counts)),
        "num_pairs": float(counts["pairs"]),
        "calibration_error": calibration_error(scores[0::2] - scores[1::2]),
    }


def calibration_error(gaps: np.ndarray[Any, Any]) -> float:
    """Expected calibration error (Guo et al. 2017) of sigmoid(|gap|), which says who is better.

    Args:
        gaps: [P] score of the better answer less that of the worse.

    Returns:
        The mean over pairs of |share that is right - mean probability| in each of `NUM_BINS` equal
        bins of [0.5, 1]; ties are right by half.
    """
    probabilities = 1 / (1 + np.exp(-np.abs(gaps.astype(np.float64))))
    right = (gaps > 0) + 0.5 * (gaps == 0)
    bins = np.minimum(((probabilities - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    apart = np.bincount(bins, weights=right - probabilities, minlength=NUM_BINS)
    return float(np.abs(apart).sum() / len(gaps))
