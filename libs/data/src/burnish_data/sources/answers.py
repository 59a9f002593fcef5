"""Problems as chats, to learn their answers from."""

from __future__ import annotations

from burnish_data.messages import ChatRow, ProblemRow
from burnish_data.rows import BadRowError


def with_answer(row: ProblemRow) -> ChatRow:
    """A problem as a chat whose last message is its answer: `clevr().map(with_answer)`.

    Raises:
        BadRowError: the prompt is raw text, which has no chat.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        raise BadRowError("a prompt of messages", prompt, column="prompt")
    return {"messages": [*prompt, {"role": "assistant", "content": row["answer"]}]}
