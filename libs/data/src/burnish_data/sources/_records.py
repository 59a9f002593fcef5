"""What the sources share: the columns of a record, and rows made of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from burnish_data.files import require_columns
from burnish_data.messages import ChatRow, ImagePart, Message, ProblemRow, TextPart
from burnish_data.rows import BadRowError

Record = Mapping[str, Any]

BOXED = "Reason step by step, and put the final answer within \\boxed{}."
LETTER = "Reason step by step. End with the letter of the right choice within \\boxed{}."


def column(record: Record, name: str) -> Any:
    """The value of a column that must be there and not be None.

    Raises:
        BadRowError: it is not; a missing one is named with the nearest that is there.
    """
    if not isinstance(record, Mapping):
        raise BadRowError(f"an object with a column {name!r}", record)
    require_columns(record, name)
    if record[name] is None:
        raise BadRowError("a value", None, column=name)
    return record[name]


def text(record: Record, name: str) -> str:
    """Text that is not empty, as it stands."""
    value = column(record, name)
    if not isinstance(value, str) or not value.strip():
        raise BadRowError("text", value, column=name)
    return value


def texts(record: Record, name: str) -> list[str]:
    """A list of texts."""
    value = column(record, name)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise BadRowError("a list of texts", value, column=name)
    if not value or not all(isinstance(one, str) and one.strip() for one in value):
        raise BadRowError("a list of texts, none of them empty", value, column=name)
    return list(value)


def whole_number(record: Record, name: str) -> int:
    """A whole number; one that is text (as CSV has it) is read."""
    value = column(record, name)
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRowError("a whole number", value, column=name)
    return value


def answer_text(record: Record, name: str) -> str:
    """An answer: text, or a number as text."""
    value = column(record, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return text(record, name).strip()


def digest(value: str | bytes) -> str:
    """16 hexadecimal digits, the same for the same text or bytes everywhere."""
    data = value.encode() if isinstance(value, str) else value
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def problem(
    task: str,
    question: str | list[TextPart | ImagePart],
    answer: str,
    *,
    system: str | None,
    level: int = 0,
    key: object = None,
) -> ProblemRow:
    """A problem that a user asks.

    `key` is what the data set calls it; without one, its text and images stand for it, so that the
    same question has the same id wherever it is read from.
    """
    asked: Message = {"role": "user", "content": question}
    prompt: list[Message] = [asked]
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
    if key is None:
        key = digest(question if isinstance(question, str) else "".join(map(_words, question)))
    return {
        "prompt": prompt,
        "answer": answer,
        "task": task,
        "level": level,
        "id": f"{task}/{key}",
    }


def _words(part: TextPart | ImagePart) -> str:
    if part["type"] == "text":
        return part["text"]
    image = part["image"]
    if not isinstance(image, str | bytes):
        image = image.tobytes()  # PIL's
    return f"<image {digest(image)}>"


def choice_problem(
    task: str,
    question: str,
    choices: Sequence[str],
    right: int,
    *,
    system: str | None,
    key: object = None,
) -> ProblemRow:
    """A question with lettered choices, of which `right` (from 0) is the answer."""
    if not 2 <= len(choices) <= len(ascii_uppercase):
        raise BadRowError(f"2 to {len(ascii_uppercase)} choices", list(choices))
    if not 0 <= right < len(choices):
        raise BadRowError(f"one of the {len(choices)} choices, counted from 0", right)
    lines = [
        f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)
    ]
    asked = "\n".join([f"{question.strip()}\n", *lines])
    row = problem(task, asked, ascii_uppercase[right], system=system, key=key)
    row["choices"] = list(choices)
    return row


def image_part(value: object, name: str) -> ImagePart:
    """An image as the readers give it: a path, bytes, a PIL image, or {"bytes": ..., "path": ...}.

    Bytes win over a path: the path of a data set's image is where it was, not where it is.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    is_picture = hasattr(value, "convert") and hasattr(value, "size")  # PIL's, not imported here
    if not value or not (isinstance(value, str | bytes) or is_picture):
        raise BadRowError("an image: a path, bytes, or a PIL image", value, column=name)
    return {"type": "image", "image": value}


def chat(user: str, assistant: str, *, system: str | None) -> ChatRow:
    """One question with its answer."""
    messages: list[Message] = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def boxed(solution: str) -> str | None:
    """What the last `\\boxed{...}` holds, braces balanced; None without one, or if it is cut."""
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        return None
    rest = re.sub(r"^\\[a-z]+\s*", "", solution[start:])
    if not rest.startswith("{"):  # TeX takes one token then
        token = re.match(r"\\[A-Za-z]+|\d+|\w", rest)
        return token.group() if token else None
    depth = 0
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # an escaped brace is one token
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return rest[1 : match.start()].strip()
    return None
