"""Preferences for a random model; recipes name ``tiny_pairs:rows``."""

from typing import Any


def rows(
    num_rows: int, *, seed: int, margin: float | None = None, same: int = 0
) -> list[dict[str, Any]]:
    """Polite answers are better, of any length; the sides of the first ``same`` rows are one."""
    made: list[dict[str, Any]] = []
    for i in range(num_rows):
        ask = [{"role": "user", "content": f"Say something {(seed + i) % 7}"}]
        tail = " to the assistant" * (i % 4)
        better = [{"role": "assistant", "content": "please say something" + tail}]
        worse = [{"role": "assistant", "content": "then say something else" + tail}]
        row = {"prompt": ask, "chosen": better, "rejected": better if i < same else worse}
        made.append(row if margin is None else {**row, "margin": margin})
    return made
