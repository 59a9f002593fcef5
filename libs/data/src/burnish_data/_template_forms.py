"""Forms in which templates want messages, how a turn's header is told, and what probes say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import jinja2

from burnish_data._template_spans import template_variables

# What a template may stumble over in a row: it is a program, and not ours.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
# No template has these, and none writes them otherwise, in capitals say, or as JSON.
CONTENT = "90817263545"
THOUGHT = "70615243342"
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# What rendering itself gives a template, each by its own argument.
_OWN_VARIABLES = ("add_generation_prompt", "messages", "tools")
# Names of what the assistant thought: the first is ours; gpt-oss has the second.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_THINK_TAG = re.compile(r"</?[\w:]*think\w*>|\[/?THINK\]|◁/?think▷", re.IGNORECASE)


def probe_call(number: int = 1) -> dict[str, Any]:
    """A tool call; another number is another function's."""
    suffix = "" if number == 1 else str(number)
    return {
        "id": f"probe000{number}",  # nine letters and digits, as Mistral's templates demand
        "type": "function",
        "function": {"name": f"probe_name{suffix}", "arguments": {"probe_key": "probe_value"}},
    }


@dataclass(frozen=True)
class Form:
    """How a template wants messages; templates of the hub differ."""

    content_as_parts: bool = False  # text, too, as a list of its one part
    arguments_as_text: bool = False  # of tool calls
    content_is_none: bool = False  # where the assistant only calls tools

    def of(self, message: Mapping[str, Any], reasoning: str | None = None) -> dict[str, Any]:
        """A message in this form; `reasoning` is the template's name of `reasoning_content`."""
        fields = dict(message)
        fields.pop("weight", None)
        if reasoning is not None and "reasoning_content" in fields:
            fields[reasoning] = fields.pop("reasoning_content")
        calls = fields.get("tool_calls")
        if calls and self.arguments_as_text:
            fields["tool_calls"] = [
                {**call, "function": _with_text(call["function"])} for call in calls
            ]
        if calls and self.content_is_none and fields["content"] == "":
            fields["content"] = None
        elif self.content_as_parts and isinstance(fields["content"], str):
            fields["content"] = [{"type": "text", "text": fields["content"]}]
        return fields


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@dataclass(frozen=True)
class Header:
    """What stands at the beginning of an assistant's turn and is not the assistant's.

    `prompt` is all that generation would be given there; `plain` is the part of it that a turn has
    which thinks otherwise than the generation prompt says. It is None where what prompt and turn
    have in common ends elsewhere than where the assistant begins: then it is no header.
    """

    prompt: str
    plain: str | None

    def length(self, turn: str) -> int | None:
        """How many characters of a turn's text are its header; None if it has another."""
        headers = (self.prompt, self.plain)
        lengths = [len(text) for text in headers if text is not None and turn.startswith(text)]
        return lengths[0] if lengths else None


def find_header(prompt: str, turn: str) -> Header:
    """The header, from what generation is given and a probe's turn, in which `CONTENT` is."""
    if not prompt:
        # No generation prompt: is there a header all the same?
        before = turn.partition(CONTENT)[0]
        return Header(before, before) if before.strip() else Header("", "")
    plain = _whole_tags(common_prefix(prompt, turn))
    return Header(prompt, plain if plain == prompt or begins_to_speak(turn[len(plain) :]) else None)


def begins_to_speak(text: str) -> bool:
    """Whether a probe's text begins with what the assistant says or with a tag of its thought."""
    return text.startswith(CONTENT) or _THINK_TAG.match(text) is not None


def common_prefix(one: str, other: str) -> str:
    """What both texts begin with."""
    length = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return one[:length]


def _whole_tags(text: str) -> str:
    """Without the beginning of a tag at its end: <think> and </think> both begin with "<"."""
    for opening, closing in ("<>", "[]", "◁▷"):
        begins = text.rfind(opening)
        if begins > text.rfind(closing):
            text = text[:begins]
    return text


def check_variables(given: Mapping[str, Any], sources: Sequence[str]) -> None:
    """Whether templates have the variables that a caller gives.

    Raises:
        ValueError: one is in none of the sources, or is given by another argument.
    """
    known = set[str]().union(*map(template_variables, sources))
    for name in given:
        if name in _OWN_VARIABLES:
            raise ValueError(
                "chat_template_kwargs must leave alone what other arguments give the template "
                f"{list(_OWN_VARIABLES)}, got {name!r}; drop it."
            )
        if name not in known:
            options = sorted(known.difference(_OWN_VARIABLES))
            match = get_close_matches(name, options, n=3)
            hint = f"did you mean {' or '.join(map(repr, match))}?" if match else "drop it."
            raise ValueError(
                f"chat_template_kwargs must be variables of the chat template, {options}, got "
                f"{name!r}; {hint}"
            )
