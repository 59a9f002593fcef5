"""Code of others as it should not be; recipes name ``hostile_task:...``."""

from collections.abc import Sequence
from typing import Any

from tiny_task import EvenTokens


def a_string() -> str:
    return "rows"


def no_rows() -> None:
    return None


def strings() -> list[str]:
    return ["a", "b"]


def without_prompt() -> list[dict[str, str]]:
    return [{"question": "?"}]


def number_as_prompt() -> list[dict[str, int]]:
    return [{"prompt": 3}]


def no_messages() -> list[dict[str, list[Any]]]:
    return [{"prompt": []}]


def bad_role() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "usr", "content": "x"}]}]


def key_error() -> list[dict[str, str]]:
    return [{}["rows"]]


def leaves() -> None:
    raise SystemExit(3)


def plain_environment() -> EvenTokens:
    return EvenTokens(fail_on_call=0, pause_s=0)


class NoStep:
    """An environment that cannot judge."""

    def prompt(self, row: Any) -> Any:
        return row["prompt"]


class FailsToOpen:
    """A context manager that raises at its beginning."""

    def __enter__(self) -> None:
        raise KeyError("judge")

    def __exit__(self, *_: object) -> None: ...


class FailsAlways(EvenTokens):
    """Raises at every judgement."""

    def __init__(self) -> None:
        super().__init__(fail_on_call=0, pause_s=0)

    def step(self, rollouts: Sequence[Any]) -> Any:
        raise OSError("the judge is away")
