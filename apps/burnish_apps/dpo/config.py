"""What a DPO recipe may say."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from burnish_trainer.optim import imported
from burnish_trainer.policy import LossFunction
from pydantic import Field

from burnish_apps.shell.config import argument_problems, cause
from burnish_apps.supervised import config as supervised

LOSS = "burnish_losses.preference.dpo_loss"
PAIR_LOSS = "burnish_losses.pair_losses.ipo_pair_loss"  # an example
# One pair, of one trained token each: what a loss is tried on.
COLUMNS = {
    "token_mask": torch.ones(2, dtype=torch.bool),
    "nll_mask": torch.tensor([True, False]),
    "cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32),
    "pair_ids": torch.zeros(2, dtype=torch.int64),
    "chosen": torch.tensor([True, False]),
}


class Training(supervised.Training):
    """The optimizer steps over the pairs. ``max_length`` is that of one side with its prompt."""

    loss: str = LOSS  # dotted path of a function of burnish_losses.preference, or of its form
    loss_args: dict[str, Any] = Field(default_factory=dict)  # beta, nll_coefficient, ...
    pair_loss: str | None = None  # of burnish_losses.pair_losses; null: that of the loss
    pair_loss_args: dict[str, Any] = Field(default_factory=dict)
    # null: the loss has no reference. cached: computed once for all rows, and no copy of the first
    # weights is kept; on_the_fly: in every step.
    reference: Literal["on_the_fly", "cached"] | None = "on_the_fly"

    def loss_function(self) -> LossFunction:
        """The loss with its arguments."""
        arguments = dict(self.loss_args)
        if self.pair_loss is not None:
            function = imported(self.pair_loss, "pair_loss", PAIR_LOSS)
            arguments["pair_loss"] = partial(function, **self.pair_loss_args)
        return partial(imported(self.loss, "loss", LOSS), **arguments)

    def loss_problems(self) -> list[str]:
        """Why the loss cannot be computed so; it is, for one pair."""
        if self.pair_loss is None and self.pair_loss_args:
            return ["training.pair_loss_args: must come with training.pair_loss, got none"]
        try:
            loss_fn: Any = self.loss_function()
        except Exception as error:  # noqa: BLE001  (a module may raise anything)
            return [f"training.loss: {cause(error)}"]
        given = ["logprobs", "batch", *loss_fn.keywords]
        problems = argument_problems(loss_fn.func, given, "training.loss_args")
        if self.pair_loss is not None and not problems:
            function = loss_fn.keywords["pair_loss"].func
            names = ["chosen_logratios", "rejected_logratios", "beta", *self.pair_loss_args]
            problems = argument_problems(function, names, "training.pair_loss_args")
        if problems:
            return problems
        alone = _failure(loss_fn, COLUMNS)
        if self.reference is None:
            failed = f"training.loss: {self.loss} fails without a reference, {alone}"
            return [] if alone is None else [failed]
        if alone is None:
            return [f"training.reference: must be null for {self.loss}, which reads none"]
        told = _failure(loss_fn, COLUMNS | {"reference_logprobs": torch.zeros(2)})
        return [] if told is None else [f"training.loss_args: {self.loss} fails, {told}"]


def _failure(loss_fn: LossFunction, columns: dict[str, torch.Tensor]) -> str | None:
    """Why a loss cannot be computed; None if it can."""
    try:
        loss_fn(torch.full((2,), -1.0), columns)
    except Exception as error:  # noqa: BLE001  (whatever the loss raises)
        return cause(error)
    return None


class DpoConfig(supervised.SupervisedConfig):
    """A whole run."""

    sequences_per_row: ClassVar[int] = 2

    name: str = Field(default="dpo", pattern=r"^\w[\w.+-]*$")  # part of a folder's name
    training: Training

    def problems(self) -> list[str]:
        """Every violation, one sentence each."""
        return [*super().problems(), *self.training.loss_problems()]
