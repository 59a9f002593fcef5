"""Pictures of squares, and how many there are; recipes name ``tiny_shapes:rows``."""

from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (40, 40, 230)}
SIZE = 56  # four tokens of Qwen2-VL


def rows(num_rows: int, *, seed: int, text_rows: int = 0, broken: int = 0) -> list[dict[str, Any]]:
    """One to three squares of one colour; ``text_rows`` chats have no picture."""
    generator = np.random.default_rng(seed)
    made: list[dict[str, Any]] = []
    for i in range(num_rows):
        colour, count = str(generator.choice(list(COLOURS))), int(generator.integers(1, 4))
        picture = np.full((SIZE, SIZE, 3), 240, dtype=np.uint8)
        for place in generator.choice(4, count, replace=False):
            top, left = 28 * (place // 2) + 6, 28 * (place % 2) + 6
            picture[top : top + 16, left : left + 16] = COLOURS[colour]
        ask: list[dict[str, Any]] = [{"type": "text", "text": "What is there?"}]
        image: Any = "/nowhere.png" if i < broken else Image.fromarray(picture)
        if i >= num_rows - text_rows:
            colour = "no"
        else:
            ask.insert(0, {"type": "image", "image": image})
        answer = {"role": "assistant", "content": f"{colour} {count}"}
        made.append({"messages": [{"role": "user", "content": ask}, answer]})
    return made
