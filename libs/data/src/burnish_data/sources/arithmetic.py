"""Small problems that a small model gets right now and then, so that it can learn from rewards."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from burnish_data.messages import Message, ProblemRow
from burnish_data.mixture import share_out

Split = Literal["train", "validation"]

_VALIDATION_PERCENT = 20
_MAX_LEVEL = 5
_MAX_MISSES = 100_000  # draws without a new problem, until a level counts as used up

_NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma", "Leo", "Nora")
_THINGS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "stickers", "toys")
_VERBS = ("buys", "finds", "gets")


@dataclass(frozen=True)
class _Problem:
    """`key` decides the split: problems that are the same but for their order share it."""

    key: str
    question: str
    answer: str


def arithmetic(
    num_problems: int,
    *,
    seed: int,
    split: Split = "train",
    tasks: Mapping[str, float],
    levels: Sequence[int] = (1,),
    num_examples: int = 4,
) -> list[ProblemRow]:
    """Draw problems.

    Whether a problem belongs to training or validation is a stable hash of its numbers, so that no
    seed brings a validation problem into training, not as an example line and not with its numbers
    swapped. Training may hold a problem twice, validation does not.

    Tasks (the prompt, the answer, and what a level means):

    - max_lines: raw text, example lines and then `max(12, 45) =`; "45". Level + 1 numbers of
      two digits.
    - addition_lines: the same with `12 + 45 =`; "57". Two numbers of level + 1 digits.
    - subtraction_lines: the same with `45 - 12 =`; "33", never negative.
    - addition_story: a chat, "Tom has 3 apples and buys 4 more. How many apples does Tom have
      now?"; "7". Two numbers from 2 to 10 times the level.

    Args:
        num_problems: rows to return.
        seed: of the draw.
        split: "train" or "validation" (a fifth of all problems).
        tasks: weight of each task; the rows are shared out in this proportion, and evenly among the
            levels.
        levels: from 1 to 5.
        num_examples: example lines of the `_lines` tasks, drawn for each row, at least 1.

    Returns:
        Rows in random order. Those of the `_lines` tasks have `stop` = a line's end.

    Raises:
        ValueError: an unknown task, split or level, no example line, or too few problems for
            validation.
    """
    _check_arguments(num_problems, split, tasks, levels)
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {num_examples}.")
    cells = {(task, level): weight for task, weight in tasks.items() for level in levels}
    rng = random.Random(f"{seed}/{split}")
    rows: list[ProblemRow] = []
    for (task, level), count in share_out(num_problems, cells).items():
        problems = _draw(task, level, count, split, rng)
        rows += [_row(task, level, problem, num_examples, rng) for problem in problems]
    rng.shuffle(rows)
    for index, row in enumerate(rows):
        row["id"] = f"{row['task']}/{split}/{index}"
    return rows


def _draw(task: str, level: int, count: int, split: Split, rng: random.Random) -> list[_Problem]:
    problems = _problems(task, level, split, rng)
    if split == "train":
        return list(islice(problems, count))
    found: dict[str, _Problem] = {}
    num_misses = 0
    while len(found) < count:
        problem = next(problems)
        if problem.question not in found:
            found[problem.question] = problem
            num_misses = 0
        elif num_misses < _MAX_MISSES:
            num_misses += 1
        else:
            raise ValueError(
                f"Validation must hold {count} different problems of {task} at level {level}, but "
                f"there are only {len(found)}; ask for fewer or add levels."
            )
    return list(found.values())


def _row(
    task: str, level: int, problem: _Problem, num_examples: int, rng: random.Random
) -> ProblemRow:
    prompt: list[Message] | str
    if task == "addition_story":
        prompt = [
            {"role": "system", "content": "Answer with one number."},
            {"role": "user", "content": problem.question},
        ]
    else:
        prompt = _example_lines(task, level, problem, num_examples, rng) + problem.question
    row: ProblemRow = {
        "prompt": prompt,
        "answer": problem.answer,
        "task": task,
        "level": level,
        "id": "",  # given when the rows are in their order
    }
    if isinstance(prompt, str):
        row["stop"] = "\n"
    return row


def _example_lines(task: str, level: int, problem: _Problem, count: int, rng: random.Random) -> str:
    """Solved problems of the training split, none of them the one that is asked."""
    lines: list[str] = []
    for example in _problems(task, level, "train", rng):
        if example.key != problem.key:
            lines.append(f"{example.question} {example.answer}\n")
        if len(lines) == count:
            break
    return "".join(lines)


def _problems(task: str, level: int, split: Split, rng: random.Random) -> Iterator[_Problem]:
    while True:
        problem = _TASKS[task](level, rng)
        if (_percentile(problem.key) < _VALIDATION_PERCENT) == (split == "validation"):
            yield problem


def _percentile(key: str) -> int:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100


def _max_lines(level: int, rng: random.Random) -> _Problem:
    numbers = rng.sample(range(10, 100), level + 1)
    return _Problem(
        key=f"max {sorted(numbers)}",
        question=f"max({', '.join(map(str, numbers))}) =",
        answer=str(max(numbers)),
    )


def _addition_lines(level: int, rng: random.Random) -> _Problem:
    a, b = (rng.randrange(10**level, 10 ** (level + 1)) for _ in range(2))
    return _Problem(f"add {sorted((a, b))}", f"{a} + {b} =", str(a + b))


def _subtraction_lines(level: int, rng: random.Random) -> _Problem:
    b, a = sorted(rng.randrange(10**level, 10 ** (level + 1)) for _ in range(2))
    return _Problem(f"subtract {a} {b}", f"{a} - {b} =", str(a - b))


def _addition_story(level: int, rng: random.Random) -> _Problem:
    a, b = (rng.randrange(2, 10 * level + 1) for _ in range(2))
    name, things, verb = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_VERBS)
    return _Problem(
        key=f"story {sorted((a, b))}",
        question=f"{name} has {a} {things} and {verb} {b} more. "
        f"How many {things} does {name} have now?",
        answer=str(a + b),
    )


_TASKS: dict[str, Callable[[int, random.Random], _Problem]] = {
    "max_lines": _max_lines,
    "addition_lines": _addition_lines,
    "subtraction_lines": _subtraction_lines,
    "addition_story": _addition_story,
}


def _check_arguments(
    num_problems: int, split: str, tasks: Mapping[str, float], levels: Sequence[int]
) -> None:
    if num_problems < 0:
        raise ValueError(f"num_problems must not be negative, got {num_problems}.")
    if split not in ("train", "validation"):
        raise ValueError(f"split must be 'train' or 'validation', got {split!r}.")
    unknown = [task for task in tasks if task not in _TASKS]
    if unknown:
        raise ValueError(f"tasks must be among {list(_TASKS)}, got {unknown}.")
    if not tasks or min(tasks.values()) < 0 or not 0 < sum(tasks.values()) < float("inf"):
        raise ValueError(f"tasks must have weights of 0 or more, not all 0, got {dict(tasks)}.")
    if not levels or any(level not in range(1, _MAX_LEVEL + 1) for level in levels):
        raise ValueError(f"levels must be numbers from 1 to {_MAX_LEVEL}, got {list(levels)}.")
