"""Rows in, groups of rollouts out: one flat loop over the turns."""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from burnish_envs.types import (
    CompletionLike,
    Decode,
    Environment,
    FinishReason,
    Generate,
    Render,
    Rollout,
    RolloutGroup,
    Row,
    StepResult,
    Turn,
)

_logger = logging.getLogger(__name__)


@dataclass
class _Attempt:
    """A rollout on its way: the tokens the model has seen, and those since its last completion."""

    rollout: Rollout
    added: tuple[int, ...]
    context: tuple[int, ...] = ()


def collect_groups(
    rows: Sequence[Row],
    environment: Environment,
    generate: Generate,
    *,
    group_size: int,
    render: Render,
    decode: Decode,
    seed: int,
    max_turns: int = 1,
    render_observation: Render | None = None,
    max_total_tokens: int | None = None,
    on_error: Literal["status", "raise"] = "status",
) -> list[RolloutGroup]:
    """Let the model attempt every row `group_size` times; row i becomes group i.

    A turn of all rollouts that go on is one call of `generate`. Each row is rendered once, and
    sampled ids are kept as they are: what the model sees next is the ids so far and the rendered
    observation.

    Args:
        seed: gives each sample its seed, with group, index and turn. Another one for every batch.
        max_turns: a rollout that is not done then ends with status "max_turns".
        render_observation: an observation as the token ids that go on after a completion (the
            render of a prompt would begin a new conversation). Needed if max_turns > 1.
        max_total_tokens: no turn begins when a rollout has this many tokens; it ends with status
            "max_tokens". The limit of one completion is the generator's.
        on_error: "status": when `environment.step` raises, the error is logged, and the rollouts
            it was given end with reward NaN, status "error", and the error in `info["error"]`.
            "raise": the error goes up.

    Raises:
        ValueError: a prompt without room for a completion, or a generator or an environment that
            breaks its contract (counts, lengths, finish reasons).
    """
    _check_settings(group_size, max_turns, render_observation)
    prompts = [_render_prompt(row, environment, render, max_total_tokens) for row in rows]
    attempts = [
        _Attempt(Rollout(row, group_id, index), prompts[group_id])
        for group_id, row in enumerate(rows)
        for index in range(group_size)
    ]
    live = attempts
    for turn in range(max_turns):
        live = _sample_turn(live, turn, generate, decode, seed)
        live = _judge_turn(live, environment, on_error, render_observation)
        live = [a for a in live if not _ends(a, turn + 1 == max_turns, max_total_tokens)]
    rollouts = [attempt.rollout for attempt in attempts]
    return [
        RolloutGroup(g, tuple(rollouts[g * group_size : (g + 1) * group_size]))
        for g in range(len(rows))
    ]


def sample_seed(seed: int, group_id: int, index: int, turn: int) -> int:
    """The seed of one sample, in [0, 2**63): the same in every process and Python version."""
    key = f"{seed}/{group_id}/{index}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _check_settings(group_size: int, max_turns: int, render_observation: Render | None) -> None:
    if group_size < 1 or max_turns < 1:
        raise ValueError(
            f"group_size and max_turns must be at least 1, got {group_size} and {max_turns}."
        )
    if max_turns > 1 and render_observation is None:
        raise ValueError(
            f"max_turns={max_turns} needs render_observation, which turns an environment's "
            "observation into the token ids that follow a completion; pass one."
        )


def _render_prompt(
    row: Row, environment: Environment, render: Render, max_total_tokens: int | None
) -> tuple[int, ...]:
    token_ids = tuple(render(environment.prompt(row)))
    if max_total_tokens is not None and len(token_ids) >= max_total_tokens:
        raise ValueError(
            f"A prompt must leave room for a completion within max_total_tokens="
            f"{max_total_tokens}, but row {row.get('id', row)!r} renders to {len(token_ids)} "
            "tokens; drop the row or raise the limit."
        )
    return token_ids


def _sample_turn(
    live: list[_Attempt], turn: int, generate: Generate, decode: Decode, seed: int
) -> list[_Attempt]:
    """One completion for each attempt. Returns the attempts whose completion can be judged."""
    if not live:
        return []
    for attempt in live:
        attempt.context += attempt.added
    seeds = [sample_seed(seed, a.rollout.group_id, a.rollout.index, turn) for a in live]
    completions = generate([attempt.context for attempt in live], seeds)
    _check_count("generate", len(completions), len(live))
    for attempt, completion in zip(live, completions, strict=True):
        new = _turn(attempt.added, completion, decode)
        attempt.context += new.token_ids
        attempt.rollout = replace(attempt.rollout, turns=(*attempt.rollout.turns, new))
        if new.finish_reason == "abort":  # half a sample: nothing to judge or to learn from
            attempt.rollout = replace(attempt.rollout, reward=math.nan, status="abort")
    return [attempt for attempt in live if attempt.rollout.status != "abort"]


def _turn(prompt_token_ids: tuple[int, ...], completion: CompletionLike, decode: Decode) -> Turn:
    token_ids, logprobs = tuple(completion.token_ids), tuple(completion.logprobs)
    if len(token_ids) != len(logprobs):
        raise ValueError(
            f"A completion must have one log-prob for each token, got {len(logprobs)} for "
            f"{len(token_ids)} tokens; check the generator."
        )
    if completion.finish_reason not in get_args(FinishReason):
        raise ValueError(
            f"finish_reason must be one of {get_args(FinishReason)}, got "
            f"{completion.finish_reason!r}; check the generator."
        )
    return Turn(
        prompt_token_ids=prompt_token_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=cast(FinishReason, completion.finish_reason),
        weight_version=completion.weight_version,
        text=decode(token_ids),
    )


def _judge_turn(
    live: list[_Attempt],
    environment: Environment,
    on_error: Literal["status", "raise"],
    render_observation: Render | None,
) -> list[_Attempt]:
    """Rewards for the newest turns. Returns the attempts that are not done."""
    if not live:
        return []
    results = _step(environment, [attempt.rollout for attempt in live], on_error)
    for attempt, result in zip(live, results, strict=True):
        attempt.rollout = replace(
            attempt.rollout,
            reward=attempt.rollout.reward + result.reward,
            status=result.status,
            info={**attempt.rollout.info, **result.info},
        )
        if not result.done and render_observation is not None:
            attempt.added = _render_observation(result, render_observation)
    return [a for a, result in zip(live, results, strict=True) if not result.done]


def _render_observation(result: StepResult, render: Render) -> tuple[int, ...]:
    if result.observation is None:
        raise ValueError(
            "A StepResult that is not done must have an observation for the next turn, got None; "
            "give one or set done=True."
        )
    return tuple(render(result.observation))


def _ends(attempt: _Attempt, is_last_turn: bool, max_total_tokens: int | None) -> bool:
    """Whether a limit ends an attempt that is not done; its status then says which."""
    num_tokens = len(attempt.context) + len(attempt.added)
    if is_last_turn:
        status = "max_turns"
    elif max_total_tokens is not None and num_tokens >= max_total_tokens:
        status = "max_tokens"
    else:
        return False
    attempt.rollout = replace(attempt.rollout, status=status)
    return True


def _step(
    environment: Environment, rollouts: Sequence[Rollout], on_error: Literal["status", "raise"]
) -> Sequence[StepResult]:
    try:
        results = environment.step(rollouts)
    except Exception as error:
        if on_error == "raise":
            raise
        # A failure must not look like a wrong answer: NaN is never a reward, and it is counted.
        _logger.exception("The environment failed on %d rollouts.", len(rollouts))
        failed = StepResult(math.nan, done=True, status="error", info={"error": repr(error)})
        return [failed] * len(rollouts)
    _check_count("environment.step", len(results), len(rollouts))
    return results


def _check_count(what: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(
            f"{what} must return one result for each of its {expected} inputs, got {got}."
        )
