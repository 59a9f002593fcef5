"""The forms of rows that people have, each a function from a record to this library's row.

They are used with `Rows.map`, which gives their errors a place:
`open_rows("chats.json").map(sharegpt)`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from burnish_data._message_forms import (
    loose_messages,
    read_images,
    read_messages,
    read_tools,
)
from burnish_data.files import require_columns
from burnish_data.messages import (
    ChatRow,
    LabelledRow,
    Message,
    PreferenceRow,
    RankedRow,
    validate_messages,
)
from burnish_data.rows import BadRowError

Record = Mapping[str, Any]
AnyRow = ChatRow | PreferenceRow | RankedRow | LabelledRow
RowT = TypeVar("RowT", bound=AnyRow)

_CONVERSATIONS = ("conversations", "conversation", "messages")
# Columns whose names say which is the question and which the answer.
_PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("problem", "solution"),
    ("instruction", "response"),
    ("input", "output"),
)


def openai_chat(record: Record) -> ChatRow:
    """OpenAI's form: {"messages": [{"role", "content", "tool_calls"?, ...}], "tools"?}.

    `messages` and `tools` may be JSON text. "functions", "function_call" and the role "function",
    which came before tools, become tools. Content may be a list of parts: text, images, and also
    "reasoning" and "tool_call" parts with a "value". "loss_weight", or "loss" or "train" of true,
    false, 1 or 0, is the message's weight. Images in a column "images" take the places of "<image>"
    in the text.

    Raises:
        BadRowError: a column is missing, or `validate_messages` refuses the messages.
    """
    require_columns(record, "messages")
    messages = read_messages(record["messages"], "messages", read_images(record))
    return _with_tools(ChatRow(messages=messages), record)


def sharegpt(record: Record) -> ChatRow:
    """ShareGPT's form: {"conversations": [{"from", "value"}], "system"?, "tools"?: JSON text}.

    From "human" or "user"; "gpt", "assistant", "model", "chatgpt", "bing" or "bard"; "system";
    "function_call", whose value is JSON of one call or several; "observation", "tool" or
    "function_response". The rest is as in `openai_chat`.

    Raises:
        BadRowError: as `openai_chat`.
    """
    column = next((name for name in _CONVERSATIONS if name in record), _CONVERSATIONS[0])
    require_columns(record, column)
    messages = loose_messages(record[column], column, read_images(record))
    return _with_tools(ChatRow(messages=_with_system(messages, record, column)), record)


def alpaca(record: Record) -> ChatRow:
    """Alpaca's form: {"instruction", "input"?, "output", "system"?, "history"?}.

    Instruction and input are joined by a line break. The history is a list of
    [user's text, assistant's text].

    Raises:
        BadRowError: a column is missing, or no text.
    """
    require_columns(record, "instruction", "output")
    chat: list[dict[str, Any]] = []
    history = record.get("history") or []
    if not isinstance(history, list | tuple):
        raise BadRowError("a list of [user's text, assistant's text]", history, column="history")
    for index, turn in enumerate(history):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadRowError("[user's text, assistant's text]", turn, column=f"history[{index}]")
        chat += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    texts = [_text(record, name) for name in ("instruction", "input") if record.get(name)]
    if not texts:
        raise BadRowError("text that is not empty", record["instruction"], column="instruction")
    chat.append({"role": "user", "content": "\n".join(texts)})
    chat.append({"role": "assistant", "content": _text(record, "output")})
    messages = loose_messages(chat, "messages", read_images(record))
    return _with_tools(ChatRow(messages=_with_system(messages, record, "messages")), record)


def prompt_response(
    prompt: str = "prompt", response: str = "response", *, system: str | None = None
) -> Callable[[Record], ChatRow]:
    """A function for records with these two columns, each text or messages.

    Args:
        prompt: the column of the user's text, or of the messages before the answer.
        response: the column of the assistant's text, or of one message or several.
        system: a system message for every row. A column "system" has precedence.
    """
    return partial(_prompt_response, prompt=prompt, response=response, system=system)


def _prompt_response(record: Record, prompt: str, response: str, system: str | None) -> ChatRow:
    require_columns(record, prompt, response)
    if system is not None and not record.get("system"):
        record = {**record, "system": system}
    before = _prompt(record, prompt)
    answer = _completion(record, response, before)
    return _with_tools(ChatRow(messages=[*before, *answer]), record)


def preference(record: Record) -> PreferenceRow:
    """{"chosen", "rejected", "prompt"?, "system"?, "tools"?}, with "margin" or two scores if known.

    `prompt` is text or messages, also in "conversations" or "messages". `chosen` and `rejected` are
    text, a message or several; where they repeat the prompt it is left out. Without a prompt, both
    are whole conversations, and the prompt is what they begin with alike. The margin is the column
    "margin", or what "score_chosen" (or "chosen_score") is above the other.

    Raises:
        BadRowError: a column is missing or wrong, or the conversations do not differ.
    """
    chosen, rejected = (
        f"{side}_messages" if f"{side}_messages" in record and side not in record else side
        for side in ("chosen", "rejected")
    )
    column = next((name for name in ("prompt", *_CONVERSATIONS) if name in record), None)
    return _preference_columns(record, column, chosen, rejected)


def preference_columns(
    *, prompt: str | None = "prompt", chosen: str = "chosen", rejected: str = "rejected"
) -> Callable[[Record], PreferenceRow]:
    """`preference` for records whose columns have other names.

    Args:
        prompt: the column of the prompt, text or messages. None: `chosen` and `rejected` are whole
            conversations, which begin with it.
        chosen: the column of the better answer, text, a message or several.
        rejected: the column of the worse.
    """
    return partial(_preference_columns, prompt=prompt, chosen=chosen, rejected=rejected)


def _preference_columns(
    record: Record, prompt: str | None, chosen: str, rejected: str
) -> PreferenceRow:
    require_columns(record, *([] if prompt is None else [prompt]), chosen, rejected)
    row: PreferenceRow
    if prompt is None:
        row = _implicit_prompt(record, chosen, rejected)
    else:
        asked = _prompt(record, prompt)
        row = {
            "prompt": asked,
            "chosen": _completion(record, chosen, asked),
            "rejected": _completion(record, rejected, asked),
        }
    margin = _margin(record)
    if margin is not None:
        row["margin"] = margin
    return _with_tools(row, record)


def ranked(record: Record) -> RankedRow:
    """{"prompt", "completions" or "responses": [text or messages], "scores": [number]}.

    Raises:
        BadRowError: a column is missing or wrong, or there are less than two completions, or
            another number of scores.
    """
    column = "completions" if "completions" in record else "responses"
    require_columns(record, "prompt", column, "scores")
    prompt, completions, scores = _prompt(record, "prompt"), record[column], record["scores"]
    if not isinstance(completions, list | tuple) or len(completions) < 2:
        raise BadRowError("a list of at least two completions", completions, column=column)
    if not isinstance(scores, list | tuple) or len(scores) != len(completions):
        raise BadRowError(f"a list of {len(completions)} scores", scores, column="scores")
    made: RankedRow = {
        "prompt": prompt,
        "completions": [
            _completion_of(completion, f"{column}[{index}]", prompt)
            for index, completion in enumerate(completions)
        ],
        "scores": [number(score, f"scores[{index}]") for index, score in enumerate(scores)],
    }
    return _with_tools(made, record)


def labelled(record: Record) -> LabelledRow:
    """{"prompt", "completion", "label"}, as KTO learns from; or {"messages", "label"}.

    `label` (or "kto_tag") is true, false, 1 or 0. Of "messages" or "conversations" the last is the
    completion.

    Raises:
        BadRowError: a column is missing or wrong.
    """
    name = "kto_tag" if "kto_tag" in record and "label" not in record else "label"
    require_columns(record, name)
    label = record[name]
    if label not in (True, False, 0, 1):
        raise BadRowError("true, false, 1 or 0", label, column=name)
    column = next((each for each in _CONVERSATIONS if each in record), None)
    if column is None or "completion" in record:
        require_columns(record, "prompt", "completion")
        prompt = _prompt(record, "prompt")
        completion = _completion(record, "completion", prompt)
    else:
        loose = loose_messages(record[column], column, read_images(record))
        messages = _with_system(loose, record, column)
        prompt, completion = messages[:-1], messages[-1:]
        if completion[0]["role"] != "assistant":
            raise BadRowError("an assistant's message last", completion[0]["role"], column=column)
    made: LabelledRow = {"prompt": prompt, "completion": completion, "label": bool(label)}
    return _with_tools(made, record)


def guess_format(columns: Iterable[str]) -> Callable[[Record], AnyRow]:
    """The function for records with these columns.

    Raises:
        ValueError: none fits; the message lists what is known.
    """
    names = set(columns)
    for needed, function in _KNOWN:
        if names.issuperset(needed):
            return function
    choices = sorted(names & _CHOICES)
    if choices:
        raise ValueError(
            f"The columns must say the answer's text, got {sorted(names)}, in which it is one of "
            f"{' or '.join(choices)}; read multiple choice by sources.mmlu or sources.mmlu_pro, or "
            "name the two columns of prompt_response."
        )
    for prompt, response in _PAIRS:
        if names.issuperset((prompt, response)):
            return prompt_response(prompt, response)
    known = [" + ".join(needed) for needed in (*(needed for needed, _ in _KNOWN), *_PAIRS)]
    raise ValueError(
        f"The columns must be of a known form, which are {', '.join(known)}, got {sorted(names)}; "
        "name the form, or use prompt_response with the columns' names."
    )


# Columns of multiple choice, where "answer" is the number or the letter of one.
_CHOICES = frozenset(("choices", "options"))

_KNOWN: tuple[tuple[tuple[str, ...], Callable[[Record], AnyRow]], ...] = (
    (("chosen", "rejected"), preference),
    (("chosen_messages", "rejected_messages"), preference),
    (("completions", "scores"), ranked),
    (("responses", "scores"), ranked),
    (("prompt", "completion", "label"), labelled),
    (("messages", "label"), labelled),
    (("conversations", "label"), labelled),
    (("messages", "kto_tag"), labelled),
    (("conversations", "kto_tag"), labelled),
    (("messages",), openai_chat),
    (("conversations",), sharegpt),
    (("conversation",), sharegpt),
    (("instruction", "output"), alpaca),
)


def number(value: object, where: str) -> float:
    """A finite number.

    Raises:
        BadRowError: something else.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            made = float(value)
        except OverflowError:  # an integer of hundreds of digits
            made = math.inf
        if math.isfinite(made):
            return made
    raise BadRowError("a finite number", value, column=where)


def _text(record: Record, column: str) -> str:
    value = record[column]
    if not isinstance(value, str) or not value.strip():
        raise BadRowError("text that is not empty", value, column=column)
    return value


def _with_tools(row: RowT, record: Record) -> RowT:
    tools = read_tools(record)
    if tools:
        row["tools"] = tools
    return row


def _with_system(messages: list[Any], record: Record, where: str) -> list[Message]:
    """The messages with the column "system" before them, checked."""
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRowError("text", system, column="system")
    if system and system.strip():
        first = messages[0] if messages else None
        if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
            raise BadRowError(
                "a system message once, in the column 'system' or among the messages",
                first,
                column=f"{where}[0]",
            )
        checked = validate_messages(messages, where=where)
        return [{"role": "system", "content": system}, *checked]
    return validate_messages(messages, where=where)


def _prompt(record: Record, column: str) -> list[Message]:
    value = record[column]
    if isinstance(value, str):
        value = [{"role": "user", "content": _text(record, column)}]
    messages = _with_system(loose_messages(value, column, read_images(record)), record, column)
    if messages[-1]["role"] == "assistant":
        raise BadRowError(
            "a prompt that ends where the assistant is to speak",
            messages[-1],
            column=f"{column}[{len(messages) - 1}]",
        )
    return messages


def _completion(record: Record, column: str, prompt: list[Message]) -> list[Message]:
    return _completion_of(record[column], column, prompt)


def _completion_of(value: object, column: str, prompt: list[Message]) -> list[Message]:
    if isinstance(value, str):
        if not value.strip():
            reason = "empty message"
            raise BadRowError("text that is not empty", value, column=column, reason=reason)
        return [{"role": "assistant", "content": value}]
    messages = loose_messages(value, column)
    if not messages:
        raise BadRowError("text or messages", value, column=column, reason="empty message")
    if isinstance(messages[0], Mapping) and messages[0].get("role") != "assistant":
        return _without_prompt(validate_messages(messages, where=column), prompt, column)
    # An assistant's message may not stand first: it is checked after a user's.
    return _checked_after(prompt, messages, column)


def _checked_after(before: Sequence[Message], messages: list[Any], column: str) -> list[Message]:
    try:
        return validate_messages([*before, *messages], where=column)[len(before) :]
    except BadRowError as error:
        raise _renumbered(error, column, len(before)) from error


def _renumbered(error: BadRowError, column: str, num_before: int) -> BadRowError:
    """The same error with the index that the message has in its own column."""
    rest = (error.column or "").removeprefix(f"{column}[")
    index, _, field = rest.partition("]")
    own = f"{column}[{int(index) - num_before}]{field}" if index.isdigit() else error.column
    return BadRowError(error.expected, error.got, column=own, reason=error.reason, hint=error.hint)


def _without_prompt(messages: list[Message], prompt: list[Message], column: str) -> list[Message]:
    bare = [message for message in prompt if message["role"] != "system"]
    for start in (prompt, bare):  # a data set may leave the system message out
        if messages[: len(start)] == start and len(messages) > len(start):
            return _answer(messages[len(start) :], column, len(start))
    raise BadRowError(
        "an assistant's answer, or the prompt followed by one",
        messages[0],
        column=f"{column}[0]",
        reason="another prompt",
    )


def _answer(messages: list[Message], column: str, index: int) -> list[Message]:
    if messages[0]["role"] != "assistant":
        raise BadRowError(
            "the assistant's answer here", messages[0]["role"], column=f"{column}[{index}].role"
        )
    return messages


def _implicit_prompt(record: Record, chosen: str, rejected: str) -> PreferenceRow:
    sides: list[list[Message]] = []
    for column in (chosen, rejected):
        if isinstance(record[column], str):
            raise BadRowError(
                "a column of this name, since chosen and rejected are text",
                list(record),
                column="prompt",
                reason="missing column",
            )
        sides.append(_with_system(loose_messages(record[column], column), record, column))
    shared = 0
    for one, other in zip(*sides, strict=False):
        if one != other:
            break
        shared += 1
    if shared == 0 or shared == min(map(len, sides)):
        raise BadRowError(
            "two conversations that begin alike and then differ",
            sides[1],
            column=rejected,
            reason="no implicit prompt",
        )
    prompt = sides[0][:shared]
    return {
        "prompt": prompt,
        "chosen": _answer(sides[0][shared:], chosen, shared),
        "rejected": _answer(sides[1][shared:], rejected, shared),
    }


def _margin(record: Record) -> float | None:
    if record.get("margin") is not None:
        return number(record["margin"], "margin")
    for one, other in (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score")):
        if record.get(one) is not None and record.get(other) is not None:
            return number(record[one], one) - number(record[other], other)
    return None
