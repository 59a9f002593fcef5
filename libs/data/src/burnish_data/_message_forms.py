"""The forms in which people write messages, tools and images, each turned into this library's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from burnish_data._json_text import parse_json, refuse_surrogates
from burnish_data.messages import Message, validate_messages
from burnish_data.rows import BadRowError

Record = Mapping[str, Any]
Loose = dict[str, Any]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
_IMAGE = "<image>"


def read_messages(value: object, where: str, images: Sequence[Any] = ()) -> list[Message]:
    """Messages of OpenAI's form or of ShareGPT's, or JSON text of such, checked.

    Args:
        value: anything.
        where: begins the column in error messages.
        images: what each "<image>" in the users' text stands for.

    Raises:
        BadRowError: see `validate_messages`; or another number of images than of marks.
    """
    return validate_messages(loose_messages(value, where, images), where=where)


def loose_messages(value: object, where: str, images: Sequence[Any] = ()) -> list[Any]:
    """`read_messages` without the check, for messages that are part of a chat."""
    if isinstance(value, str):
        value = parse_json(value, where)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise BadRowError("text or messages", value, column=where)
    made: list[Any] = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            made.append(message)  # to be refused by the check, which names it
            continue
        one, is_call = _message(message, f"{where}[{index}]")
        if one["role"] == "system" and _is_blank(one.get("content")):
            continue
        previous = made[-1] if made and isinstance(made[-1], dict) else {}
        if is_call and previous.get("role") == "assistant":
            # ShareGPT writes each of several calls, and the words before them, as a message.
            before = previous.get("tool_calls", [])
            if not isinstance(before, list | tuple):
                column = f"{where}[{index - 1}].tool_calls"
                raise BadRowError("a list of tool calls", before, column=column)
            previous["tool_calls"] = [*before, *one["tool_calls"]]
        else:
            made.append(one)
    return _place_images(made, images, where) if images else made


def _message(message: Record, where: str) -> tuple[Loose, bool]:
    """One message, and whether it is nothing but a call."""
    made = {key: value for key, value in message.items() if value is not None}
    role = made.pop("from", None) if "role" not in made else made["role"]
    if isinstance(role, str) and role.lower() in (*_ROLES, *_ROLES.values()):
        role = role.lower()  # "Human"
    if "content" not in made and "value" in made:
        made["content"] = made.pop("value")
    made["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
    if "weight" not in made and "loss_weight" in made:
        made["weight"] = made.pop("loss_weight")
    flags = {name: made.pop(name) for name in ("loss", "train") if name in made}
    for key, flag in flags.items():
        if not isinstance(flag, int | float) or flag not in (0, 1):
            raise BadRowError("true, false, 1 or 0", flag, column=f"{where}.{key}")
        if flag != flags.get("loss", flag):
            raise BadRowError("what 'loss' says, too", flag, column=f"{where}.{key}")
        made.setdefault("weight", float(flag))
    for name in ("reasoning", "thinking"):
        if "reasoning_content" not in made and isinstance(made.get(name), str):
            made["reasoning_content"] = made.pop(name)
    is_call = role == "function_call"
    if is_call:
        made["tool_calls"] = _calls(made.pop("content", None), f"{where}.value")
    elif "function_call" in made:
        made["tool_calls"] = _calls(made.pop("function_call"), f"{where}.function_call")
    if isinstance(made.get("content"), list):
        _read_parts(made, f"{where}.content")
    return made, is_call


def _calls(value: object, where: str) -> list[Any]:
    if isinstance(value, str):
        value = parse_json(value, where)
    return list(value) if isinstance(value, list) else [value]


def _read_parts(message: Loose, where: str) -> None:
    """Reasoning and calls among a message's parts become keys of the message; others stay."""
    parts: list[Any] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for index, part in enumerate(message["content"]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("reasoning", "thinking"):
            text = next((part[key] for key in ("value", "text", kind) if key in part), None)
            if not isinstance(text, str):
                raise BadRowError("text", text, column=f"{where}[{index}].value")
            reasoning.append(text)
        elif kind == "tool_call":
            calls += _calls(part.get("value"), f"{where}[{index}].value")
        else:
            parts.append(_part(part))
    message["content"] = parts or None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("text", part.get("value"))}
    if kind in ("image", "image_url") and part.get("image") is None:
        names = ("image_url", "url", "path", "value")
        found = next((part[name] for name in names if part.get(name) is not None), None)
        url = found.get("url") if isinstance(found, Mapping) else found
        return image_part(url)
    return part


def image_part(image: Any) -> Loose:
    """A message's part for an image: bytes, a PIL image, a path, or a URL with the data in it."""
    if isinstance(image, str):
        return {"type": "image_url", "image_url": {"url": image}}
    return {"type": "image", "image": image}


def _place_images(messages: list[Any], images: Sequence[Any], where: str) -> list[Any]:
    left = list(images)
    num_marks = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, str) or message["role"] != "user" or _IMAGE not in content:
            continue
        parts: list[Loose] = []
        for number, text in enumerate(content.split(_IMAGE)):
            if number:
                num_marks += 1
                parts += [image_part(left.pop(0))] if left else []
            parts += [{"type": "text", "text": text}] if text.strip() else []
        message["content"] = parts
    if num_marks != len(images):
        expected = f"{len(images)} {_IMAGE} in the users' text, as there are images"
        raise BadRowError(expected, num_marks, column=where, reason="images and marks differ")
    return messages


def read_images(record: Record) -> list[Any]:
    """The images of the columns "images" or "image"."""
    images = record.get("images", record.get("image"))
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def read_tools(record: Record) -> list[dict[str, Any]]:
    """The schemas of the columns "tools" or "functions", lists or JSON text, in OpenAI's form.

    Raises:
        BadRowError: something else.
    """
    column = "tools" if record.get("tools") is not None else "functions"
    tools = record.get(column)
    if isinstance(tools, str):
        tools = parse_json(tools, column) if tools.strip() else []
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise BadRowError("a list of tools' JSON schemas", tools, column=column)
    return [_tool(tool, f"{column}[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: object, where: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = parse_json(tool, where)
    if isinstance(tool, Mapping) and "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        expected = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise BadRowError(expected, tool, column=where)
    refuse_surrogates(tool, column=where)
    made: dict[str, Any] = json.loads(json.dumps(tool, default=_refuse(where)))
    return {"type": "function", **made}


def _refuse(where: str) -> Any:
    def refuse(value: object) -> None:
        raise BadRowError("JSON values", value, column=where)

    return refuse


def _is_blank(content: object) -> bool:
    return content is None or (isinstance(content, str) and not content.strip())
