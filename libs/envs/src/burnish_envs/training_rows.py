"""Rollouts as columns that a trainer takes."""

import math
from collections.abc import Sequence
from typing import Any

from burnish_envs.types import Rollout, RolloutGroup


def training_rows(groups: Sequence[RolloutGroup]) -> dict[str, list[Any]]:
    """One row for each rollout, in order, as a dict of equally long columns.

    Columns with one value for each token of the row (prompts and completions of all turns, end to
    end):

    - token_ids: int.
    - token_mask: bool, True on sampled tokens: these are trained. All False where the reward is not
      finite (a failed rollout teaches nothing and is counted nowhere).
    - sampled_logprobs: float, the log-probs with which the tokens were sampled; 0.0 on others.

    Columns with one value for each row:

    - reward: float, NaN where the rollout failed.
    - group_id: int.
    - prompt_length: int, tokens before the first sampled one. They are the same in all rows of a
      group.
    - status: str.
    - weight_version: int, the oldest that sampled any of the row's tokens.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "token_ids": [_token_ids(rollout) for rollout in rollouts],
        "token_mask": [_token_mask(rollout) for rollout in rollouts],
        "sampled_logprobs": [_sampled_logprobs(rollout) for rollout in rollouts],
        "reward": [rollout.reward for rollout in rollouts],
        "group_id": [rollout.group_id for rollout in rollouts],
        "prompt_length": [len(rollout.turns[0].prompt_token_ids) for rollout in rollouts],
        "status": [rollout.status for rollout in rollouts],
        "weight_version": [
            min(turn.weight_version for turn in rollout.turns) for rollout in rollouts
        ],
    }


def _token_ids(rollout: Rollout) -> list[int]:
    return [t for turn in rollout.turns for t in (*turn.prompt_token_ids, *turn.token_ids)]


def _token_mask(rollout: Rollout) -> list[bool]:
    trained = math.isfinite(rollout.reward)
    return [
        value
        for turn in rollout.turns
        for value in [False] * len(turn.prompt_token_ids) + [trained] * len(turn.token_ids)
    ]


def _sampled_logprobs(rollout: Rollout) -> list[float]:
    return [
        value
        for turn in rollout.turns
        for value in [0.0] * len(turn.prompt_token_ids) + list(turn.logprobs)
    ]
