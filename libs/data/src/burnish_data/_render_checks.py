"""Whether a chat template rendered what a row says: one that leaves things out says nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from burnish_data._template_spans import Rendered, places_of
from burnish_data.rows import BadRowError


def check_rendered(messages: Sequence[Mapping[str, Any]], rendered: Rendered) -> None:
    """What every message says, and all tool calls, must stand in the text.

    Templates may trim what is said, move the system's message into the user's, write a tool's
    answer as JSON, and leave out thoughts. So of content its last line is looked for (of others
    than the assistant: its first or its last, anywhere), and of a thought nothing, unless nothing
    else is said.

    Args:
        messages: checked ones, as the row has them.
        rendered: where a message's place is not known, the whole text is searched.

    Raises:
        BadRowError: the template left something out.
    """
    places = places_of(rendered, len(messages))
    for number, message in enumerate(messages):
        turns = places[number]
        text = "".join([rendered.text[turn.start : turn.end] for turn in turns]) or rendered.text
        if "tool_calls" in message:
            _check_calls(message, text, f"messages[{number}]")
        if message["role"] == "assistant":
            is_there = _is_said(message, text)
        else:
            is_there = all(_has_trace(said, rendered.text) for said in _texts(message))
        if not is_there:
            beside = " beside tool calls" if "tool_calls" in message else ""
            raise BadRowError(
                f"content that the chat template renders{beside}, but it leaves this out",
                message["content"],
                column=f"messages[{number}].content",
                reason="content not rendered",
            )


def check_reasoning(
    messages: Sequence[Mapping[str, Any]], rendered: Rendered, *, is_known: bool
) -> None:
    """What the assistant thought in its last turn must stand in the text.

    Templates leave out thoughts of earlier turns by design, once a user has spoken after them.

    Args:
        messages: checked ones, as the row has them.
        rendered: all of them.
        is_known: whether the template renders thoughts of any name at all; if not, none may be in
            the row.

    Raises:
        BadRowError: the thought is left out.
    """
    last_user = max((n for n, m in enumerate(messages) if m["role"] == "user"), default=-1)
    lost = [n for n, m in enumerate(messages) if m.get("reasoning_content", "").strip()]
    if is_known:
        last = max((n for n, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        lost = [
            n
            for n in lost
            if n == last > last_user
            and not _is_in(_last_line(messages[n]["reasoning_content"]), rendered.text)
        ]
    if lost:
        raise BadRowError(
            "reasoning that the chat template renders, but it leaves this out; drop "
            "reasoning_content from the messages, or pass a template that renders it",
            messages[lost[0]]["reasoning_content"],
            column=f"messages[{lost[0]}].reasoning_content",
            reason="reasoning not rendered",
        )


def _check_calls(message: Mapping[str, Any], text: str, where: str) -> None:
    """Every call's name as often as it is called, and its arguments' values."""
    # What is said or thought may name the function.
    spoken = [*_texts(message), message.get("reasoning_content", "")]
    spoken = [words for words in spoken if words in text]
    names = [call["function"]["name"] for call in message["tool_calls"]]
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        name = function["name"]
        calls = text.count(name) - sum(words.count(name) for words in spoken)
        if calls < names[: index + 1].count(name):
            raise BadRowError(
                "tool calls that the chat template renders, but it leaves this one out",
                name,
                column=f"{where}.tool_calls[{index}]",
                reason="tool calls not rendered",
            )
        lost = [value for value in _values(function["arguments"]) if not _is_value_in(value, text)]
        if lost:
            raise BadRowError(
                "arguments of tool calls that the chat template renders, but it leaves this value "
                "out",
                lost[0],
                column=f"{where}.tool_calls[{index}].function.arguments",
                reason="tool calls not rendered",
            )


def _values(argument: object) -> Iterator[object]:
    """All that is in objects and lists, down to texts, numbers, truth values and None."""
    if isinstance(argument, Mapping):
        for value in argument.values():
            yield from _values(value)
    elif isinstance(argument, list | tuple):
        for value in argument:
            yield from _values(value)
    else:
        yield argument


def _is_value_in(value: object, text: str) -> bool:
    if not isinstance(value, str):
        return str(value) in text or json.dumps(value) in text
    # Arguments may be JSON within JSON, or within what Python writes: all but backslashes stays.
    value = value.strip()
    bare = text.replace("\\", "")
    return _is_in(value, text) or any(form.replace("\\", "") in bare for form in _json_forms(value))


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _has_trace(said: str, text: str) -> bool:
    first = said.lstrip().partition("\n")[0].rstrip()
    return _is_in(_last_line(said), text) or _is_in(first, text)


def _is_said(message: Mapping[str, Any], text: str) -> bool:
    thought, _, said = "\n".join(_texts(message)).rpartition("</think>")
    line = _last_line(said)
    if line:
        return _is_in(line, text)
    if "tool_calls" in message:
        return True
    # A turn of thoughts alone: without them, its end alone would be trained.
    thoughts = (thought.replace("<think>", ""), message.get("reasoning_content", ""))
    lines = [line for line in map(_last_line, thoughts) if line]
    return not lines or any(_is_in(line, text) for line in lines)


def _last_line(text: str) -> str:
    """The last line that is not blank, without white space around it."""
    return text.rstrip().rpartition("\n")[2].lstrip()


def _is_in(line: str, text: str) -> bool:
    return line in text or any(form in text for form in _json_forms(line))


def _json_forms(line: str) -> Iterable[str]:
    """The line within JSON, which some templates write."""
    return (json.dumps(line, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
