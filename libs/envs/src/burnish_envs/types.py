"""The plain types between environments, generators and trainers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Row = Mapping[str, Any]
"""One problem of a data set. Its keys are the environment's business."""

Message = Mapping[str, object]
"""One chat message: `{"role": ..., "content": ...}`."""

Prompt = Sequence[Message] | str
"""Messages, to be rendered by a chat template, or raw text."""

Render = Callable[[Prompt], Sequence[int]]
"""A prompt as token ids, ready for the model to go on."""

Decode = Callable[[Sequence[int]], str]
"""Token ids as text."""

FinishReason = Literal["stop", "length", "abort"]


class CompletionLike(Protocol):
    """What `collect_groups` reads of a completion; any object with these attributes is one."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def weight_version(self) -> int: ...


@dataclass(frozen=True)
class Completion:
    """What a model sampled after one prompt.

    `logprobs[t]` is the natural log of the probability with which `token_ids[t]` was sampled.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int


class Generate(Protocol):
    """Token ids in, one completion for each prompt out, in the order of the prompts.

    Sampling settings (temperature, limits, stop strings) are bound by whoever makes the generator.
    `seeds[i]` makes sample i reproducible.
    """

    def __call__(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> Sequence[CompletionLike]: ...


@dataclass(frozen=True)
class Turn:
    """What was put before the model, and what it sampled.

    `prompt_token_ids` holds only what was added since the turn before. The prompts and completions
    of a rollout's turns, put end to end, are exactly the tokens that the model saw.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    text: str


@dataclass(frozen=True)
class Rollout:
    """One attempt at one row. `group_id` and `index` name it: attempt `index` at row `group_id`.

    `status` is "ok", or says what kept the reward from being an ordinary one: "error" (environment
    or verifier failed; reward NaN), "abort" (the engine gave up; reward NaN), "timeout" (the
    verifier gave up), "max_turns" or "max_tokens" (the world was not done), or an environment's
    own word.
    """

    row: Row
    group_id: int
    index: int
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    status: str = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutGroup:
    """All attempts at one row, by index."""

    group_id: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to the newest turn of one rollout.

    `reward` is for this turn; a rollout's reward is the sum over its turns. When the world is not
    `done`, `observation` holds the messages that the model sees next.
    """

    reward: float
    done: bool
    observation: Sequence[Message] | None = None
    status: str = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """A world that asks and judges. It keeps no state of a rollout: the turns are the state."""

    def prompt(self, row: Row) -> Prompt:
        """What the model is asked first."""
        ...

    def step(self, rollouts: Sequence[Rollout]) -> Sequence[StepResult]:
        """Judge the newest turn of each rollout; one result for each, in order."""
        ...
