"""Rows of each task as token ids: preferences, rankings, labels and problems.

Plain functions over `encode_chats`. The ones for many rows call the tokenizer once and give a bad
row's error in its place; those for one row raise it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from burnish_data._arguments import check_many, check_one, check_tokenizer
from burnish_data._json_text import refuse_surrogates
from burnish_data.chat_template import render_prompt
from burnish_data.encode import Encoded, LeftOutError, TooLong, encode_chats
from burnish_data.files import require_columns
from burnish_data.formats import number
from burnish_data.messages import (
    ChatRow,
    LabelledRow,
    Message,
    PreferenceRow,
    ProblemRow,
    RankedRow,
    validate_messages,
)
from burnish_data.rows import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pairs = Literal["best_worst", "adjacent", "all"]
ResultT = TypeVar("ResultT")


class EncodedPreference(TypedDict):
    """Both ways to go on, each with its prompt; only the completions are trained."""

    chosen: Encoded
    rejected: Encoded
    margin: NotRequired[float]


class EncodedRanking(TypedDict):
    """Several completions, each with its prompt; the better the higher the score."""

    completions: list[Encoded]
    scores: list[float]


class EncodedLabelled(TypedDict):
    """A completion with its prompt, and whether it is desirable."""

    completion: Encoded
    label: bool


class EncodedProblem(TypedDict):
    """A prompt after which the model answers."""

    token_ids: npt.NDArray[np.int32]  # [T]


def encode_preferences(
    rows: Sequence[PreferenceRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    too_long: TooLong = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[EncodedPreference | BadRowError]:
    """Both sides rendered whole, prompt and completion, and trained on the completion alone.

    Args: see `encode_chats`. A row is too long if one of its sides is.

    Raises:
        ValueError: see `encode_chats`. A row that cannot be used (among them one whose two sides
            are the same) gives a BadRowError in its place.
    """
    needed = ("prompt", "chosen", "rejected")
    check_many(rows, "encode_preference", "encode_preferences")
    chats = [_try(_preference_chats, row, needed) for row in rows]
    encoded = _encode_groups(
        chats, tokenizer, max_length, too_long, chat_template, chat_template_kwargs
    )
    made: list[EncodedPreference | BadRowError] = []
    for row, sides in zip(rows, encoded, strict=True):
        if isinstance(sides, BadRowError):
            made.append(sides)
            continue
        pair: EncodedPreference = {"chosen": sides[0], "rejected": sides[1]}
        if np.array_equal(sides[0]["token_ids"], sides[1]["token_ids"]):
            made.append(_same(row))
            continue
        if row.get("margin") is not None:
            pair["margin"] = number(row["margin"], "margin")
        made.append(pair)
    return made


def encode_preference(
    row: PreferenceRow, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> EncodedPreference:
    """One preference; see `encode_preferences`. Raises BadRowError."""
    check_one(row, "encode_preference", "encode_preferences")
    return _only(encode_preferences([row], tokenizer, **options))


def encode_rankings(
    rows: Sequence[RankedRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    too_long: TooLong = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[EncodedRanking | BadRowError]:
    """Every completion rendered whole with the prompt, and trained on the completion alone.

    Args: see `encode_chats`. A row is too long if one of its completions is.

    Raises:
        ValueError: see `encode_chats`; a row that cannot be used gives a BadRowError.
    """
    check_many(rows, "encode_ranked", "encode_rankings")
    chats = [_try(_ranked_chats, row, _RANKED) for row in rows]
    encoded = _encode_groups(
        chats, tokenizer, max_length, too_long, chat_template, chat_template_kwargs
    )
    return [
        sides
        if isinstance(sides, BadRowError)
        else {"completions": sides, "scores": [float(score) for score in row["scores"]]}
        for row, sides in zip(rows, encoded, strict=True)
    ]


def encode_ranked(
    row: RankedRow, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> EncodedRanking:
    """One ranking; see `encode_rankings`. Raises BadRowError."""
    check_one(row, "encode_ranked", "encode_rankings")
    return _only(encode_rankings([row], tokenizer, **options))


def ranked_to_pairs(row: RankedRow, pairs: Pairs = "best_worst") -> list[PreferenceRow]:
    """The preferences that a ranking holds; equal scores give none.

    Args:
        row: completions with their scores.
        pairs: "best_worst" is the best against the worst; "adjacent" each score against the next
            lower one; "all" every higher score against every lower one. Among equal scores the
            earlier completion stands first.

    Returns:
        Pairs with `margin`, the difference of the scores; from the best chosen one to the worst.

    Raises:
        BadRowError: the row is no ranking.
        ValueError: another value of `pairs`.
    """
    if pairs not in ("best_worst", "adjacent", "all"):
        raise ValueError(f'pairs must be "best_worst", "adjacent" or "all", got {pairs!r}.')
    _check_row(row, _RANKED)
    completions, scores = row["completions"], _scores(row)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    chosen_from: Iterator[tuple[int, int]]
    if pairs == "best_worst":
        chosen_from = iter([(order[0], order[-1])])
    elif pairs == "adjacent":
        chosen_from = itertools.pairwise(order)
    else:
        chosen_from = itertools.combinations(order, 2)
    made: list[PreferenceRow] = []
    for better, worse in chosen_from:
        if scores[better] == scores[worse]:
            continue
        pair: PreferenceRow = {
            "prompt": row["prompt"],
            "chosen": completions[better],
            "rejected": completions[worse],
            "margin": scores[better] - scores[worse],
        }
        if row.get("tools"):
            pair["tools"] = row["tools"]
        made.append(pair)
    return made


def encode_labels(
    rows: Sequence[LabelledRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    too_long: TooLong = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[EncodedLabelled | BadRowError]:
    """Completions rendered whole with their prompts, and trained on the completion alone.

    Args: see `encode_chats`.

    Raises:
        ValueError: see `encode_chats`; a row that cannot be used gives a BadRowError.
    """
    check_many(rows, "encode_labelled", "encode_labels")
    needed = ("prompt", "completion", "label")
    chats = [_try(_labelled_chats, row, needed) for row in rows]
    encoded = _encode_groups(
        chats, tokenizer, max_length, too_long, chat_template, chat_template_kwargs
    )
    return [
        sides if isinstance(sides, BadRowError) else {"completion": sides[0], "label": row["label"]}
        for row, sides in zip(rows, encoded, strict=True)
    ]


def encode_labelled(
    row: LabelledRow, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> EncodedLabelled:
    """One labelled completion; see `encode_labels`. Raises BadRowError."""
    check_one(row, "encode_labelled", "encode_labels")
    return _only(encode_labels([row], tokenizer, **options))


def encode_problem(
    row: ProblemRow,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    too_long: Literal["error", "skip"] = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> EncodedProblem:
    """A problem's prompt as the token ids after which the model answers; see `render_prompt`.

    Args:
        row: a problem.
        tokenizer: a Hugging Face tokenizer.
        max_length: in tokens; None is no limit. A prompt is never cut.
        too_long: "error" raises a BadRowError, "skip" a LeftOutError.
        chat_template: see `render_prompt`.
        chat_template_kwargs: see `render_prompt`.

    Raises:
        BadRowError: the prompt cannot be used, or is too long.
        ValueError: the template cannot be used.
    """
    check_one(row, "encode_problem", "a loop over the rows")
    check_tokenizer(tokenizer)
    if too_long not in ("error", "skip"):
        raise ValueError(
            f'too_long must be "error" or "skip" for a prompt, which is not cut, got {too_long!r}.'
        )
    ids = render_prompt(
        tokenizer,
        _prompt_of_problem(row),
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )
    if max_length is not None and len(ids) > max_length:
        kind = LeftOutError if too_long == "skip" else BadRowError
        raise kind(f"at most {max_length} tokens", len(ids), column="prompt", reason="too long")
    return {"token_ids": np.asarray(ids, np.int32)}


# From rows to whole conversations.

_RANKED = ("prompt", "completions", "scores")


def _check_row(row: object, needed: Sequence[str]) -> None:
    if not isinstance(row, Mapping):
        raise BadRowError(f"a row with {', '.join(needed)}", row)
    require_columns(row, *needed)


def _prompt_of_problem(row: ProblemRow) -> Sequence[Mapping[str, Any]] | str:
    _check_row(row, ["prompt"])
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        return _checked_prompt(prompt)
    if not prompt:
        raise BadRowError("text that is not empty", prompt, column="prompt", reason="empty prompt")
    refuse_surrogates(prompt, column="prompt")
    return prompt


def _checked_prompt(prompt: object) -> list[Message]:
    checked = validate_messages(prompt, where="prompt")
    if checked[-1]["role"] == "assistant":
        raise BadRowError(
            "a prompt that ends where the assistant is to speak",
            checked[-1]["role"],
            column=f"prompt[{len(checked) - 1}].role",
        )
    return checked


def _preference_chats(row: PreferenceRow) -> list[ChatRow]:
    if row.get("margin") is not None:
        number(row["margin"], "margin")
    if row["chosen"] == row["rejected"]:
        raise _same(row)
    return [_chat(row, row[side], side) for side in ("chosen", "rejected")]


def _same(row: PreferenceRow) -> BadRowError:
    return BadRowError(
        "two completions that differ",
        row["chosen"],
        column="rejected",
        reason="chosen and rejected are the same",
    )


def _ranked_chats(row: RankedRow) -> list[ChatRow]:
    _scores(row)
    return [
        _chat(row, completion, f"completions[{index}]")
        for index, completion in enumerate(row["completions"])
    ]


def _scores(row: RankedRow) -> list[float]:
    completions, scores = row["completions"], row["scores"]
    if isinstance(completions, str) or not isinstance(completions, Sequence):
        raise BadRowError("a list of completions", completions, column="completions")
    if not isinstance(scores, list | tuple | np.ndarray):
        raise BadRowError("a list of scores", scores, column="scores")
    if len(completions) != len(scores) or len(scores) < 2:
        raise BadRowError(
            f"a score for each of at least 2 completions (here {len(completions)})",
            scores,
            column="scores",
        )
    return [number(score, f"scores[{index}]") for index, score in enumerate(scores)]


def _labelled_chats(row: LabelledRow) -> list[ChatRow]:
    if not isinstance(row["label"], bool):
        raise BadRowError("true or false", row["label"], column="label")
    return [_chat(row, row["completion"], "completion")]


def _chat(row: Mapping[str, Any], completion: Sequence[Message], column: str) -> ChatRow:
    """Prompt and completion as one chat, in which the prompt's turns weigh nothing."""
    prompt = _checked_prompt(row["prompt"])
    if isinstance(completion, str) or not isinstance(completion, Sequence) or not completion:
        raise BadRowError("a list of at least one message", completion, column=column)
    try:
        messages = validate_messages([*prompt, *completion])
    except BadRowError as error:
        raise _renamed(error, len(prompt), column) from error
    for message in messages[: len(prompt)]:
        message["weight"] = 0.0
    chat: ChatRow = {"messages": messages}
    if row.get("tools"):
        chat["tools"] = row["tools"]
    return chat


def _renamed(error: BadRowError, num_prompt: int, column: str) -> BadRowError:
    """An error of the whole chat, with the column of the row that it comes from."""
    match = re.match(r"messages\[(\d+)\]", error.column or "")
    if match and int(match[1]) >= num_prompt:
        rest = str(error.column)[match.end() :]
        name = f"{column}[{int(match[1]) - num_prompt}]{rest}"
    elif match:
        name = f"prompt{str(error.column)[len('messages') :]}"
    else:
        name = column
    return type(error)(
        error.expected,
        error.got,
        column=name,
        where=error.where,
        reason=error.reason,
        hint=error.hint,
    )


def _encode_groups(
    groups: Sequence[list[ChatRow] | BadRowError],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    too_long: TooLong,
    chat_template: str | Path | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[list[Encoded] | BadRowError]:
    """Encode all chats of all rows at once; a row with one bad chat is a bad row."""
    encoded = iter(
        encode_chats(
            [chat for group in groups if not isinstance(group, BadRowError) for chat in group],
            tokenizer,
            max_length=max_length,
            too_long=too_long,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
    )
    made: list[list[Encoded] | BadRowError] = []
    for group in groups:
        if isinstance(group, BadRowError):
            made.append(group)
            continue
        parts = [next(encoded) for _ in group]
        errors = [part for part in parts if isinstance(part, BadRowError)]
        made.append(errors[0] if errors else cast(list[Encoded], parts))
    return made


def _try(function: Any, row: Any, needed: Sequence[str]) -> list[ChatRow] | BadRowError:
    try:
        _check_row(row, needed)
        return cast(list[ChatRow], function(row))
    except BadRowError as error:
        return error


def _only(results: Sequence[ResultT | BadRowError]) -> ResultT:
    (result,) = results
    if isinstance(result, BadRowError):
        raise result
    return result
