"""Chats as token ids, with the tokens that are trained.

A conversation is rendered once, by its template, and tokenised once: the ids are those of the
whole text. Which tokens are trained is found by their offsets in the text. A token is trained if it
begins inside what is trained; one that begins before it (and ends inside) is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from burnish_data._arguments import check_many, check_one, check_tokenizer, require_messages
from burnish_data._template_spans import Rendered, Turn, generations_of, place_of, places_of
from burnish_data._tokens import TokenAt, special_texts, tokenise
from burnish_data.chat_template import ChatTemplate, load_template
from burnish_data.messages import ChatRow, Message, validate_messages, validate_tools
from burnish_data.rows import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "last", "all"]
TooLong = Literal["error", "truncate", "skip"]


class LeftOutError(BadRowError):
    """A row that the caller asked to leave out (`too_long="skip"`).

    It is to be counted as skipped, and not raised, even where a bad row is an error.
    """


class Encoded(TypedDict):
    """The columns of one sequence; index t of each is about token t.

    `token_weights` is there only if some weight is neither 0 nor 1; where it is missing, a trained
    token weighs 1. `truncated` is there, and True, only if the tail was cut; it is no column.
    """

    token_ids: npt.NDArray[np.int32]  # [T]
    token_mask: npt.NDArray[np.bool_]  # [T], True where the token is trained
    token_weights: NotRequired[npt.NDArray[np.float32]]  # [T], 0 where the mask is False
    truncated: NotRequired[bool]


class Span(NamedTuple):
    """`text[start:end]` is trained with this weight; 0 is not at all. A later span wins."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class RenderedChat:
    """A whole conversation as text, and what of it is trained; all else is not."""

    text: str
    spans: list[Span]


def encode_chat(
    row: ChatRow,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    max_length: int | None = None,
    too_long: TooLong = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Encoded:
    """One chat; see `encode_chats`. Raises BadRowError."""
    check_one(row, "encode_chat", "encode_chats")
    (encoded,) = encode_chats(
        [row],
        tokenizer,
        train_on=train_on,
        max_length=max_length,
        too_long=too_long,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )
    if isinstance(encoded, BadRowError):
        raise encoded
    return encoded


def encode_chats(
    rows: Sequence[ChatRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    max_length: int | None = None,
    too_long: TooLong = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Encoded | BadRowError]:
    """Chats as token ids and masks; a row that cannot be encoded gives its error in its place.

    The ids are those of `tokenizer(text, add_special_tokens=False)`, where text is the whole
    conversation as the template renders it. Of an assistant's turn, all is trained but its header
    (what generation is given) and white space after its last special token; so the token that ends
    the turn is trained, also where it is the padding token; and where a turn has none, the
    tokenizer's EOS directly behind it. Templates without any end teach no model to stop; nor does
    one where another turn's beginning is the end (GLM-4 stops at `<|user|>`), as that is not
    trained: pass a template with an end, or `{% generation %}` tags around it. Tools are never
    trained, nor is the first token of a sequence, which nothing foretells. A message's `weight`
    counts for all of its trained tokens.

    Args:
        rows: chats without images (`encode_images` is for those with).
        tokenizer: a fast one.
        train_on: "assistant" is every turn of the assistant, "last" the last of them, "all" every
            token but tools' messages.
        max_length: in tokens; None is no limit.
        too_long: "error" gives a BadRowError, "skip" a LeftOutError, "truncate" cuts the tail (no
            EOS is put in its place) and says so in `truncated`.
        chat_template: Jinja, the name of one of the tokenizer's, or a file; see `find_template`.
        chat_template_kwargs: further variables of the template (`enable_thinking=False`); names
            that it does not have are an error.

    Raises:
        ValueError: no template, one that cannot be used, a slow tokenizer, or bad arguments.
    """
    check_many(rows, "encode_chat", "encode_chats")
    _check_arguments(tokenizer, train_on, max_length, too_long)
    template_of = _templates(tokenizer, chat_template, chat_template_kwargs)
    ends = _ends_of(tokenizer)
    results: list[RenderedChat | BadRowError] = []
    for row in rows:
        try:
            results.append(_render_chat(row, template_of, ends, train_on, allow_images=False))
        except BadRowError as error:
            results.append(error)
    chats = [result for result in results if isinstance(result, RenderedChat)]
    tokens = tokenise(tokenizer, [chat.text for chat in chats])
    return [
        result
        if isinstance(result, BadRowError)
        else _encoded(result, *next(tokens), max_length, too_long)
        for result in results
    ]


def render_chat(
    row: ChatRow,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    allow_images: bool = False,
) -> RenderedChat:
    """A chat's text with what of it is trained, by `encode_chats`'s rules.

    Args:
        row: a chat.
        tokenizer: gives the special tokens, and its template if `chat_template` is None.
        train_on: see `encode_chats`.
        chat_template: see `encode_chats`.
        chat_template_kwargs: see `encode_chats`.
        allow_images: whether the messages may have images, whose tokens the caller takes out.

    Raises:
        BadRowError: the row cannot be used.
        ValueError: the template cannot be used.
    """
    template_of = _templates(tokenizer, chat_template, chat_template_kwargs)
    ends = _ends_of(tokenizer)
    return _render_chat(row, template_of, ends, train_on, allow_images=allow_images)


class _Ends(NamedTuple):
    """What may end a turn: special tokens as text, and the one that ends what is generated."""

    special: tuple[str, ...]
    eos: str | None


def _ends_of(tokenizer: PreTrainedTokenizerBase) -> _Ends:
    return _Ends(special_texts(tokenizer), tokenizer.eos_token)


# The template for chats with tools, and for those without.
_TemplateOf = Callable[[bool], ChatTemplate]


def _templates(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | Path | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> _TemplateOf:
    """Each is looked up when the first row needs it, and once."""

    @cache
    def template_of(has_tools: bool) -> ChatTemplate:
        return load_template(tokenizer, chat_template, chat_template_kwargs, tools=has_tools)

    return template_of


def _render_chat(
    row: ChatRow,
    template_of: _TemplateOf,
    ends: _Ends,
    train_on: TrainOn,
    *,
    allow_images: bool,
) -> RenderedChat:
    if not isinstance(row, Mapping):
        raise BadRowError('{"messages": [...], "tools"?: [...]}', row)
    tools = validate_tools(row.get("tools"))
    require_messages(row)
    messages = validate_messages(row["messages"])
    if not allow_images:
        _refuse_images(messages)
    template = template_of(bool(tools))
    rendered = template.render(messages, tools)
    places = places_of(rendered, len(messages))
    trained = [number for number, m in enumerate(messages) if m["role"] == "assistant"]
    if train_on == "last":
        trained = trained[-1:]
    wanted = {number: messages[number].get("weight", 1.0) for number in trained}
    if train_on == "all":
        spans = [Span(0, len(rendered.text), 1.0), *_spans_of_all(messages, places)]
    else:
        spans = _spans(wanted, messages, rendered, places, template, ends)
    return RenderedChat(rendered.text, spans)


def _check_arguments(
    tokenizer: PreTrainedTokenizerBase, train_on: object, max_length: int | None, too_long: object
) -> None:
    check_tokenizer(tokenizer)
    for name, value, known in (
        ("train_on", train_on, get_args(TrainOn)),
        ("too_long", too_long, get_args(TooLong)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}.")
    if max_length is not None and max_length < 2:
        raise ValueError(
            f"max_length must be at least 2 tokens, as the first is not trained, got {max_length}."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            "Trained tokens are found by their offsets, which a fast tokenizer alone knows, got "
            f"{type(tokenizer).__name__}; load it with use_fast=True."
        )


def _refuse_images(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message["content"], str):
            raise BadRowError(
                "text alone, as images need a processor (encode_images)",
                message["content"],
                column=f"messages[{number}].content",
                reason="images",
            )


def _spans(
    wanted: Mapping[int, float],
    messages: Sequence[Message],
    rendered: Rendered,
    places: Mapping[int, list[Turn]],
    template: ChatTemplate,
    ends: _Ends,
) -> list[Span]:
    """What is trained of the wanted messages, in the order of the text."""
    wanted = {number: weight for number, weight in wanted.items() if weight}
    if rendered.generations:
        assistants = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        turns = generations_of(rendered, assistants, list(wanted))
        return [Span(turn.start, turn.end, wanted[turn.message]) for turn in turns]
    spans: list[Span] = []
    for number, weight in wanted.items():
        turn = place_of(number, places, rendered)
        text = rendered.text[turn.start : turn.end]
        header = template.header(messages[number - 1]["role"])
        start = header.length(text)
        if start is None:
            raise BadRowError(
                f"a turn that begins as generation does ({header.prompt!r}); if this one begins "
                "otherwise, add {% generation %} and {% endgeneration %} to the chat template",
                text,
                column=f"messages[{number}]",
                reason="header not found",
            )
        end = _end_of(turn, rendered.text, ends)
        spans.append(Span(turn.start + start, max(turn.start + start, end), weight))
        # A template may put other messages (a tool's answer) inside this one.
        spans += [
            Span(inner.start, inner.end, 0.0)
            for other, turns in places.items()
            for inner in turns
            if other != number and turn.start <= inner.start and inner.end <= turn.end
        ]
    return spans


def _end_of(turn: Turn, text: str, ends: _Ends) -> int:
    """Where what is trained of a turn ends: behind the token that ends it, if there is one.

    White space after that token is the template's; without such a token it is what ends the turn.
    The token may come out after the turn: behind the loop, or first thing in the next turn.
    """
    stripped = text[turn.start : turn.end].rstrip()
    if ends.special and stripped.endswith(ends.special):
        return turn.start + len(stripped)
    behind = text[turn.end :].lstrip()
    if ends.eos and behind.startswith(ends.eos):
        return len(text) - len(behind) + len(ends.eos)
    return turn.end


def _spans_of_all(messages: Sequence[Message], places: Mapping[int, list[Turn]]) -> list[Span]:
    """Weights of messages, where all is trained; a tool's is 0."""
    spans = []
    for number, message in enumerate(messages):
        weight = 0.0 if message["role"] == "tool" else message.get("weight", 1.0)
        if weight == 1.0:
            continue
        turns = places[number]
        if not turns:
            raise BadRowError(
                'a tool\'s message (or one with a weight) whose place is known, as train_on="all" '
                "leaves it out",
                message["role"],
                column=f"messages[{number}]",
                reason="not rendered once",
            )
        spans += [Span(turn.start, turn.end, weight) for turn in turns]
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _why_nothing(*, is_cut: bool) -> str:
    if is_cut:
        return "max_length cut off all that is trained: raise it, or leave such rows out"
    return "no message is the assistant's, or those that are have a weight of 0"


def _encoded(
    chat: RenderedChat,
    ids: Sequence[int],
    token_at: TokenAt,
    max_length: int | None,
    too_long: TooLong,
) -> Encoded | BadRowError:
    is_cut = max_length is not None and len(ids) > max_length
    if is_cut and too_long != "truncate":
        kind = LeftOutError if too_long == "skip" else BadRowError
        return kind(f"at most {max_length} tokens", len(ids), column="messages", reason="too long")
    weights = np.zeros(len(ids), np.float32)
    for span in chat.spans:
        weights[token_at(span.start) : token_at(span.end)] = span.weight
    weights[:1] = 0.0  # nothing foretells the first token
    whole, weights = weights, weights[:max_length]
    mask = weights > 0
    if not mask.any():
        return BadRowError(
            "at least one trained token",
            f"none of {len(weights)}{f', the first of {len(ids)}' if is_cut else ''}",
            hint=_why_nothing(is_cut=is_cut and bool(whole.any())),
            column="messages",
            reason="nothing to train",
        )
    encoded: Encoded = {
        "token_ids": np.asarray(ids[:max_length], np.int32),
        "token_mask": mask,
    }
    if (weights[mask] != 1).any():
        encoded["token_weights"] = weights
    if is_cut:
        encoded["truncated"] = True
    return encoded
