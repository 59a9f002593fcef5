"""GSM8K's example solutions: right and wrong answers of models (Cobbe and others, 2021)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path

from burnish_data.files import open_rows
from burnish_data.messages import Message, PreferenceRow
from burnish_data.rows import BadRowError
from burnish_data.sources._records import Record, column, text
from burnish_data.sources.arithmetic import Split

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
_BUNDLED = "example_model_solutions.jsonl.gz"
_VALIDATION_PERCENT = 20


def gsm8k_preferences(
    source: str | Path = "bundled",
    *,
    split: Split = "train",
    max_pairs_per_problem: int | None = 1,
    seed: int = 0,
    system: str | None = None,
) -> list[PreferenceRow]:
    """Pairs of a right and a wrong solution to one problem, written by models of 6B and 175B.

    Of 1,319 problems with four solutions each, 731 have both kinds. A solution may come first in
    one pair and in others of its problem: a test on them counts problems, not pairs. Licence: MIT.

    Args:
        source: "bundled" (these 731, which come with this library), or OpenAI's
            file `example_model_solutions.jsonl`, also as `.gz`.
        split: "train", or "validation": a fifth of the problems, by a hash of the question.
        max_pairs_per_problem: drawn at random; None is every right one with every wrong one.
        seed: of that draw; it does not matter to the split.
        system: the system message; None leaves it out.

    Returns:
        Rows in the order of the problems; ``problem`` is equal for those of one problem.

    Raises:
        BadRowError: a ValueError; a bad row (file, line, column, what was expected).
        ValueError: no such file or split, or fewer than one pair per problem asked for.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split must be 'train' or 'validation', got {split!r}.")
    if max_pairs_per_problem is not None and max_pairs_per_problem < 1:
        raise ValueError(f"max_pairs_per_problem must be at least 1, got {max_pairs_per_problem}.")
    if source == "bundled":
        with as_file(files("burnish_data") / "bundled" / "gsm8k" / _BUNDLED) as path:
            return gsm8k_preferences(
                path,
                split=split,
                max_pairs_per_problem=max_pairs_per_problem,
                seed=seed,
                system=system,
            )
    records = open_rows(source, columns=("question", *MODELS))
    made: list[PreferenceRow] = []
    for index, record in enumerate(records):
        try:
            question, right, wrong = _solutions(record)
        except BadRowError as error:
            raise error.at(records.where(index)) from error
        if (_percentile(question) < _VALIDATION_PERCENT) != (split == "validation"):
            continue
        pairs = [(chosen, rejected) for chosen in right for rejected in wrong]
        if max_pairs_per_problem is not None and len(pairs) > max_pairs_per_problem:
            draw = random.Random(f"{seed}/{question}")
            pairs = draw.sample(pairs, max_pairs_per_problem)
        made += [_row(question, *pair, f"gsm8k_solutions/{index}", system) for pair in pairs]
    return made


def _solutions(record: Record) -> tuple[str, list[str], list[str]]:
    """The question, and the different solutions that are right, and wrong."""
    right: list[str] = []
    wrong: list[str] = []
    for model in MODELS:
        made = column(record, model)
        is_correct = made.get("is_correct") if isinstance(made, Mapping) else None
        if not isinstance(is_correct, bool):
            raise BadRowError("a solution with is_correct, true or false", made, column=model)
        (right if is_correct else wrong).append(text(made, "solution").strip())
    return text(record, "question"), list(dict.fromkeys(right)), list(dict.fromkeys(wrong))


def _row(
    question: str, chosen: str, rejected: str, problem: str, system: str | None
) -> PreferenceRow:
    prompt: list[Message] = [{"role": "user", "content": question}]
    if system is not None:
        prompt.insert(0, {"role": "system", "content": system})
    return {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "problem": problem,
    }


def _percentile(question: str) -> int:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100
