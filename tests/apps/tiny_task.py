"""A task for a random model; recipes name ``tiny_task:rows`` and ``tiny_task:even_tokens``."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from burnish_envs import Rollout, StepResult


def rows(num_problems: int, *, seed: int, text: str = "Say something") -> list[dict[str, Any]]:
    """Prompts, chat messages and raw text in turns."""
    return [
        {
            "id": f"tiny-{seed}-{i}",
            "prompt": [{"role": "user", "content": f"{text} {i}"}] if i % 2 else f"{text} {i}:",
            "answer": "even",
        }
        for i in range(num_problems)
    ]


class EvenTokens:
    """The reward is the share of even token ids, which a random model spreads widely."""

    def __init__(self, fail_on_call: int, pause_s: float) -> None:
        self._fail_on_call = fail_on_call
        self._pause_s = pause_s
        self._calls = 0

    def prompt(self, row: Any) -> Any:
        return row["prompt"]

    def step(self, rollouts: Sequence[Rollout]) -> list[StepResult]:
        self._calls += 1
        time.sleep(self._pause_s)
        if self._calls == self._fail_on_call:
            raise OSError("the world is out of order")
        return [
            StepResult(share_even(rollout.turns[-1].token_ids), done=True) for rollout in rollouts
        ]


@contextmanager
def even_tokens(*, fail_on_call: int = 0, pause_s: float = 0.0) -> Iterator[EvenTokens]:
    """The environment; its ``fail_on_call``-th judgement raises."""
    yield EvenTokens(fail_on_call, pause_s)


def share_even(token_ids: Sequence[int]) -> float:
    """Share of even ids."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


def anything(**arguments: Any) -> list[dict[str, Any]]:
    """A row source that takes any keyword argument."""
    return [{"prompt": str(arguments)}]


NOT_A_FUNCTION = 3
