"""Chats and rows: the plain types of this library, all of them JSON but for images."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_args
from urllib.parse import urlsplit
from urllib.request import url2pathname

from burnish_data._json_text import parse_json, refuse_surrogates
from burnish_data.rows import BadRowError

Role = Literal["system", "user", "assistant", "tool"]

# Who may speak after whom; None is the beginning.
_FOLLOWS: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "user", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
# Names that others use for these roles.
ROLE_ALIASES: dict[str, Role] = {"developer": "system"}


class TextPart(TypedDict):
    """Text among images."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image: a path, the bytes of a file, or a PIL image."""

    type: Literal["image"]
    image: Any


class FunctionCall(TypedDict):
    """A function's name and its arguments as an object, never as JSON text."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """What an assistant asks a tool to do."""

    type: Literal["function"]
    function: FunctionCall
    id: NotRequired[str]


class Message(TypedDict):
    """One message of a chat.

    `content` is "" where an assistant only calls tools. `weight` (0 or more) says how much an
    assistant's message is trained; 0 is not at all.
    """

    role: Role
    content: str | list[TextPart | ImagePart]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    weight: NotRequired[float]


class ChatRow(TypedDict):
    """A chat to be learnt from. `tools` are JSON schemas, as OpenAI's API has them."""

    messages: list[Message]
    tools: NotRequired[list[dict[str, Any]]]


class PreferenceRow(TypedDict):
    """A prompt with a better and a worse way to go on; prompts and completions are messages."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: NotRequired[list[dict[str, Any]]]
    margin: NotRequired[float]  # how much better, where the data set says
    problem: NotRequired[str]  # equal for rows of one problem, where a source says


class RankedRow(TypedDict):
    """A prompt with several completions, the better the higher the score."""

    prompt: list[Message]
    completions: list[list[Message]]
    scores: list[float]
    tools: NotRequired[list[dict[str, Any]]]


class LabelledRow(TypedDict):
    """A prompt with a completion that is desirable (True) or not, as KTO learns from."""

    prompt: list[Message]
    completion: list[Message]
    label: bool
    tools: NotRequired[list[dict[str, Any]]]


class ProblemRow(TypedDict):
    """One problem with its answer.

    `prompt` is a chat, or raw text to be continued. `stop`, if there, is where an answer ends: the
    model was shown lines and may go on with more of them. `choices`, if there, are the texts among
    which the answer, a letter from "A" on, chooses.
    """

    prompt: list[Message] | str
    answer: str
    task: str
    level: int
    id: str
    stop: NotRequired[str]
    choices: NotRequired[list[str]]


def validate_messages(messages: object, *, where: str = "messages") -> list[Message]:
    """Check that `messages` is a chat, and return it in the one form of this library.

    A chat is a list of messages with a known role and content. A system message stands first if at
    all, a user speaks first after it, an assistant answers a user or a tool, a tool an assistant.
    Only a tool, and an assistant who calls tools or reasons, may have no content. "developer"
    becomes "system", arguments that are JSON text become objects, and keys whose value is None are
    left out, as Arrow adds them to rows that lack them. Images are a path, bytes or a PIL image;
    OpenAI's `image_url` parts become one of these, and nothing is fetched. A weight is one that
    float32 can hold, in which it is kept.

    Args:
        messages: anything.
        where: begins the column in error messages.

    Raises:
        BadRowError: a ValueError; what is wrong with which message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRowError("a list of at least one message", messages, column=where)
    checked: list[Message] = []
    previous: str | None = None
    for index, message in enumerate(messages):
        checked.append(_message(message, previous, f"{where}[{index}]"))
        previous = checked[-1]["role"]
    return checked


def validate_tools(tools: object, *, where: str = "tools") -> list[dict[str, Any]]:
    """Check that `tools` is a list of JSON schemas, each with its function if it names one.

    Args:
        tools: anything; None is no tools.
        where: begins the column in error messages.

    Raises:
        BadRowError: it is none.
    """
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise BadRowError("a list of tools' JSON schemas", tools, column=where)
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function", tool), Mapping):
            expected = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise BadRowError(expected, tool, column=f"{where}[{index}]")
        refuse_surrogates(tool, column=f"{where}[{index}]")
    return list(tools)


def _message(message: object, previous: str | None, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise BadRowError('{"role": ..., "content": ...}', message, column=where)
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if isinstance(role, str):
        role = role if role in _FOLLOWS else role.lower()  # "User"
        role = ROLE_ALIASES.get(role, role)
    if not isinstance(role, str) or role not in _FOLLOWS:
        raise BadRowError(f"one of {get_args(Role)}", role, column=f"{where}.role")
    if previous not in _FOLLOWS[role]:
        allowed = " or ".join(repr(name) for name in _FOLLOWS if previous in _FOLLOWS[name])
        place = "first" if previous is None else f"after {previous!r}"
        reason = "wrong order of roles"
        hint = _remedy(previous, role)
        raise BadRowError(
            f"{allowed} {place}", role, column=f"{where}.role", reason=reason, hint=hint
        )
    fields["role"] = role
    calls = fields.get("tool_calls")
    if calls is not None and not calls:
        del fields["tool_calls"]
    elif calls is not None:
        fields["tool_calls"] = _tool_calls(calls, role, f"{where}.tool_calls")
    for name in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(fields.get(name, ""), str):
            raise BadRowError("text", fields[name], column=f"{where}.{name}")
    if "weight" in fields:
        fields["weight"] = _weight(fields["weight"], f"{where}.weight")
    # A tool may have nothing to say, and an assistant may only call tools or reason.
    may_be_empty = role == "tool" or bool(fields.keys() & {"tool_calls", "reasoning_content"})
    fields["content"] = _content(fields.get("content"), may_be_empty, f"{where}.content")
    for name, value in fields.items():
        if not isinstance(value, str) or not value.isascii():
            refuse_surrogates(value, column=f"{where}.{name}")
    return fields  # type: ignore[return-value]


def _remedy(previous: str | None, role: str) -> str:
    if previous == role:
        return "join the two messages before the format"
    if previous is None:
        return "leave it out, or put a user's message before it"
    if role == "system":
        return "move it to the beginning, or make it a user's"
    return "put the message that is missing before it, or leave the row out"


def _content(content: object, may_be_empty: bool, where: str) -> str | list[Any]:
    if content is None and may_be_empty:
        return ""
    if content is None or isinstance(content, str):
        if content is None or (not content.strip() and not may_be_empty):
            reason = "empty message"
            raise BadRowError("text that is not empty", content, column=where, reason=reason)
        return content
    if isinstance(content, bytes) or not isinstance(content, Sequence) or not content:
        raise BadRowError("text, or a list of text and image parts", content, column=where)
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        # Templates of text models know text alone.
        return _content("".join(part["text"] for part in parts), may_be_empty, where)
    return parts


def _part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if part.get("type") == "image" and part.get("image") is not None:
            return {"type": "image", "image": part["image"]}
        if part.get("type") == "image_url" and isinstance(part.get("image_url"), Mapping):
            return {"type": "image", "image": _image_of_url(part["image_url"].get("url"), where)}
    raise BadRowError(
        '{"type": "text", "text": ...} or {"type": "image", "image": ...}', part, column=where
    )


def _image_of_url(url: object, where: str) -> bytes | str:
    if isinstance(url, str) and url.startswith("data:") and ";base64," in url:
        try:
            return base64.b64decode(url.partition(";base64,")[2], validate=True)
        except ValueError as error:
            raise BadRowError(f"base64 ({error})", url, column=f"{where}.image_url.url") from error
    if isinstance(url, str) and url and "://" not in url:
        return url
    expected = "a path or data:image/...;base64,... (nothing is fetched)"
    if isinstance(url, str) and url.startswith("file://"):
        try:
            return url2pathname(urlsplit(url).path)
        except ValueError as error:
            raise BadRowError(expected, url, column=f"{where}.image_url.url") from error
    raise BadRowError(expected, url, column=f"{where}.image_url.url")


def _tool_calls(calls: object, role: str, where: str) -> list[ToolCall]:
    if role != "assistant":
        raise BadRowError("tool calls of the assistant alone", role, column=where)
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise BadRowError("a list of tool calls", calls, column=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
        expected = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise BadRowError(expected, call, column=where)
    if not isinstance(name, str):
        raise BadRowError("a function's name", name, column=f"{where}.function.name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        column = f"{where}.function.arguments"
        arguments = parse_json(arguments, column) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise BadRowError("an object", arguments, column=f"{where}.function.arguments")
    made: ToolCall = {
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }
    if call.get("id") is not None:
        if not isinstance(call["id"], str):
            raise BadRowError("text", call["id"], column=f"{where}.id")
        made["id"] = call["id"]
    return made


def _weight(weight: object, where: str) -> float:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:  # type: ignore[operator]
        raise BadRowError("a finite number of 0 or more", weight, column=where)
    try:
        kept = struct.unpack("<f", struct.pack("<f", float(weight)))[0]  # type: ignore[arg-type]
    except OverflowError:
        kept = math.inf
    if kept == math.inf or (kept == 0) != (weight == 0):
        expected = "0, or a finite number that float32 can hold (1.5e-45 to 3.4e38)"
        raise BadRowError(expected, weight, column=where)
    return float(weight)  # type: ignore[arg-type]
