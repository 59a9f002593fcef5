"""What goes into an engine and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# () -> (Hugging Face name, torch tensor) pairs, or "package.module:function" of that kind.
WeightSource = Callable[[], Iterable[tuple[str, Any]]] | str


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: a completion ends after this many tokens (finish reason ``length``).
        temperature: 0 is greedy; log-probs are those of the distribution sampled from, that is
            *after* the temperature (at 0: of the plain softmax).
        top_p: nucleus mass in (0, 1].
        top_k: number of most likely tokens to draw from; 0 is all of them.
        stop: texts that end a completion; the tokens that spell them stay in the completion.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole = isinstance(self.max_new_tokens, int) and not isinstance(self.max_new_tokens, bool)
        if not whole or self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens!r}; give a whole "
                "number of tokens"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or positive, got {self.top_k}")
        # A text is a sequence of texts too: each of its letters would end a completion.
        if not isinstance(self.stop, tuple | list) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise ValueError(
                f"stop must be a tuple of texts that are not empty, got {self.stop!r}; write one "
                "text as (text,)"
            )


@dataclass(frozen=True)
class Completion:
    """What an engine made of one prompt.

    Attributes:
        token_ids: the sampled ids, the one that ended the completion included.
        logprobs: natural log-probs, one per sampled token, of the distribution sampled from.
        finish_reason: ``stop`` (end of sequence or a stop text), ``length`` or ``abort``.
        weight_version: the weights that sampled it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weight_version: int


class Engine(Protocol):
    """An engine, or a handle on a remote one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion per prompt, in prompt order; ``seeds[i]`` drives prompt i's draws."""
        ...

    def update_weights(self, source: WeightSource, weight_version: int) -> int:
        """Load new weights in place; returns the number of tensors loaded."""
        ...
