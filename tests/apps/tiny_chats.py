"""Chats for a random model; recipes name ``tiny_chats:rows``."""

from typing import Any


def rows(num_rows: int, *, seed: int, empty: int = 0) -> list[dict[str, Any]]:
    """Chats of different lengths, problems with answers among them; ``empty`` rows say nothing."""
    made: list[dict[str, Any]] = []
    for i in range(num_rows):
        ask = [{"role": "user", "content": f"Say something {(seed + i) % 7}"}]
        answer = "and then say something else" + " to the assistant" * (i % 4)
        if i % 3:
            made.append({"messages": [*ask, {"role": "assistant", "content": answer}]})
        else:
            made.append({"prompt": ask, "answer": answer})
    for row in made[:empty]:
        row["messages"] = [{"role": "user", "content": "nothing to learn"}]
    return made
