"""Right and wrong answers of equal length: there is nothing to learn but which is right."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from burnish_data.messages import Message, PreferenceRow, ProblemRow
from burnish_data.sources.arithmetic import Split, arithmetic

_STEPS = (1, 2, 10, 20, 100)  # by which a wrong sum is off


def arithmetic_pairs(
    num_pairs: int,
    *,
    seed: int,
    split: Split = "train",
    tasks: Mapping[str, float],
    levels: Sequence[int] = (1,),
    num_examples: int = 4,
) -> list[PreferenceRow]:
    """Problems of `arithmetic` with a right and a wrong answer of as many digits.

    So a length says nothing. The wrong answer to `max_lines` is another of the numbers; otherwise
    it is one of them, or off by a little, or has two digits exchanged. Prompts are chats; those of
    the `_lines` tasks are one message of the user.

    Args: see `arithmetic`; `num_pairs` rows are returned.

    Returns:
        Rows in random order; ``problem`` is an id of its own for each. No problem of validation
        is ever in training.

    Raises:
        ValueError: see `arithmetic`.
    """
    problems = arithmetic(
        num_pairs,
        seed=seed,
        split=split,
        tasks=tasks,
        levels=levels,
        num_examples=num_examples,
    )
    rng = random.Random(f"{seed}/{split}/wrong answers")
    return [_pair(problem, rng) for problem in problems]


def _pair(problem: ProblemRow, rng: random.Random) -> PreferenceRow:
    prompt = problem["prompt"]
    messages: list[Message] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    )
    question = str(messages[-1]["content"]).splitlines()[-1]
    wrong = rng.choice(_wrong_answers(problem["task"], question, problem["answer"]))
    return {
        "prompt": messages,
        "chosen": [{"role": "assistant", "content": problem["answer"]}],
        "rejected": [{"role": "assistant", "content": wrong}],
        "problem": problem["id"],
    }


def _wrong_answers(task: str, question: str, answer: str) -> list[str]:
    """All there are, in a fixed order."""
    found = set(re.findall(r"\d+", question))
    if task != "max_lines":
        number = int(answer)
        found |= {str(number + sign * step) for step in _STEPS for sign in (1, -1)}
        for i in range(len(answer) - 1):
            found.add(answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :])
    plausible = {wrong for wrong in found if len(wrong) == len(answer) and wrong.isdecimal()}
    return sorted(wrong for wrong in plausible - {answer} if wrong == str(int(wrong)))
