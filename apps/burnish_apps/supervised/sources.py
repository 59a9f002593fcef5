"""Rows of the recipes' own: GSM8K's problems with their worked solutions."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Literal

from burnish_data import ChatRow, Rows, open_rows, prompt_response

SYSTEM = "Reason step by step. End with #### and the answer as a number."


def gsm8k_solutions(
    source: str | Path = "bundled",
    *,
    split: Literal["train", "test"] = "train",
    system: str | None = SYSTEM,
) -> Rows[ChatRow]:
    """GSM8K as chats: a problem, and its worked solution with the answer after ``####``.

    Args:
        source: "bundled" (the first 256 training and 128 test problems, which come with
            burnish-data); a file or folder of them; or a hub id, such as "openai/gsm8k".
        split: "train" or "test".
        system: the system message; None leaves it out.
    """
    columns = ("question", "answer")
    as_chat = prompt_response(*columns, system=system)
    if source == "bundled":
        with as_file(files("burnish_data") / "bundled" / "gsm8k" / f"{split}.jsonl") as path:
            return open_rows(path, columns=columns).map(as_chat)
    return open_rows(source, split=split, config="main", columns=columns).map(as_chat)
