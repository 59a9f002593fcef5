"""JSON as it should be: objects, every key once, numbers that are numbers, text that is text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from burnish_data.rows import BadRowError


class _RefusedError(ValueError):
    """JSON that can be read, and should not be."""

    def __init__(self, expected: str, got: object, reason: str) -> None:
        super().__init__(f"expected {expected}, got {got!r}")
        self.expected, self.got, self.reason = expected, got, reason


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedError("each key of an object once", twice, "duplicate key")
    return made


def _constant(name: str) -> NoReturn:
    raise _RefusedError("JSON, which has no such number", name, "not JSON")


def _float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _RefusedError("a number that a float can hold", digits, "not JSON")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def decode(data: bytes, where: str) -> str:
    """The text of UTF-8.

    Raises:
        BadRowError: other bytes.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = data[max(0, error.start - 20) : error.start + 20]
        expected = f"UTF-8 (byte {error.start + 1} is none)"
        raise BadRowError(expected, got, where=where, reason="not UTF-8") from error


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """One JSON object from bytes, which may be followed by white space and a comma.

    Raises:
        BadRowError: it is none; with the line's character for JSON syntax.
    """
    text = decode(data, where).rstrip()
    try:
        value, end = _DECODER.raw_decode(text, len(text) - len(text.lstrip()))
    except json.JSONDecodeError as error:
        raise _syntax_error(text, error.msg, error.pos, where) from error
    except _RefusedError as error:
        raise BadRowError(error.expected, error.got, where=where, reason=error.reason) from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        expected = f"JSON of usual depth and numbers ({error})"
        raise BadRowError(expected, text, where=where, reason="not JSON") from error
    rest = text[end:].lstrip()
    if rest not in ("", ","):
        raise _syntax_error(text, "Extra data", len(text) - len(rest), where)
    if not isinstance(value, dict):
        raise BadRowError("a JSON object", value, where=where, reason="no object")
    if _may_have_halves(text):
        refuse_surrogates(value, where=where)
    return value


def _syntax_error(text: str, message: str, position: int, where: str) -> BadRowError:
    place = f"{where}, character {position + 1}"
    got = text[max(0, position - 20) : position + 40]
    return BadRowError(f"JSON ({message})", got, where=place, reason="not JSON")


def _may_have_halves(text: str) -> bool:
    return "\\ud" in text or "\\uD" in text


def refuse_surrogates(
    value: object, *, column: str | None = None, where: str | None = None
) -> None:
    """Whether all text in a value, at any depth, can be written as UTF-8.

    A half of a surrogate pair is what JSON can write and no tokenizer can read.

    Raises:
        BadRowError: some cannot.
    """
    left = [value]  # no recursion, since JSON may be nested more deeply than Python may
    while left:
        item = left.pop()
        if isinstance(item, str):
            if item.isascii():
                continue
            try:
                item.encode()
            except UnicodeEncodeError as error:
                got = item[max(0, error.start - 20) : error.end + 20]
                expected = "whole characters, no half of a surrogate pair"
                raise BadRowError(
                    expected, got, column=column, where=where, reason="not UTF-8"
                ) from error
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            left += item


def parse_json(text: str, column: str) -> Any:
    """The value of JSON text in a column.

    Raises:
        BadRowError: it is none.
    """
    try:
        value = _DECODER.decode(text)
    except _RefusedError as error:
        raise BadRowError(error.expected, error.got, column=column, reason=error.reason) from error
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"JSON ({error})", text, column=column, reason="not JSON") from error
    if _may_have_halves(text) or not text.isascii():
        refuse_surrogates(value, column=column)
    return value
