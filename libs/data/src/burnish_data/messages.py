"""Chat messages and rows: the plain types of this library."""

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypedDict, cast, get_args

Role = Literal["system", "user", "assistant", "tool"]

# Who may speak after whom; None is the beginning.
_FOLLOWS: dict[str, tuple[str | None, ...]] = {
    "system": (None,),
    "user": (None, "system", "user", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


class Message(TypedDict):
    """One message of a chat."""

    role: Role
    content: str


class Row(TypedDict):
    """One problem with its answer.

    `prompt` is a chat, or raw text to be continued. `stop`, if there, is where an answer ends: the
    model was shown lines and may go on with more of them.
    """

    prompt: list[Message] | str
    answer: str
    task: str
    level: int
    id: str
    stop: NotRequired[str]


def validate_messages(messages: object, *, where: str = "messages") -> list[Message]:
    """Check that `messages` is a chat, and return it.

    A chat is a list of messages with a known role and text. A system message stands first if at
    all, a user speaks first after it, an assistant answers a user or a tool, a tool an assistant.

    Args:
        messages: anything.
        where: begins the error message; a file and line, say.

    Raises:
        ValueError: what is wrong with which message.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{where}: expected a list of at least one message, got {messages!r}.")
    previous: str | None = None
    for index, message in enumerate(messages):
        previous = _validate_message(message, previous, f"{where}[{index}]")
    return cast(list[Message], messages)


def _validate_message(message: object, previous: str | None, where: str) -> str:
    if not isinstance(message, Mapping):
        raise ValueError(f'{where}: expected {{"role": ..., "content": ...}}, got {message!r}.')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _FOLLOWS:
        raise ValueError(f"{where}['role']: expected one of {get_args(Role)}, got {role!r}.")
    if not isinstance(content, str) or not content:
        raise ValueError(f"{where}['content']: expected text that is not empty, got {content!r}.")
    if previous not in _FOLLOWS[role]:
        place = "first" if previous is None else f"after a message of role {previous!r}"
        raise ValueError(f"{where}['role']: {role!r} may not stand {place}; reorder the messages.")
    return role
