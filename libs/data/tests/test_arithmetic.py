import re
from collections import Counter

import pytest
from burnish_data import arithmetic
from hypothesis import given, settings
from hypothesis import strategies as st

LINES = ("max_lines", "addition_lines", "subtraction_lines")
TASKS = (*LINES, "addition_story")


def question(row) -> str:
    prompt = row["prompt"]
    return prompt.splitlines()[-1] if isinstance(prompt, str) else prompt[-1]["content"]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, re.findall(r"\d+", text))))


def right_answer(task: str, line: str) -> int:
    values = list(map(int, re.findall(r"\d+", line)))
    if task == "max_lines":
        return max(values)
    return values[0] - values[1] if task == "subtraction_lines" else sum(values)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_answers_are_right(task, level):
    rows = arithmetic(50, seed=0, tasks={task: 1.0}, levels=[level])
    assert len(rows) == 50
    for row in rows:
        assert row["answer"] == str(right_answer(task, question(row)))
        assert (row["task"], row["level"]) == (task, level)


@pytest.mark.parametrize("task", LINES)
def test_a_prompt_of_lines_shows_four_solved_ones_and_breaks_off(task):
    for row in arithmetic(50, seed=0, tasks={task: 1.0}):
        *examples, last = row["prompt"].split("\n")
        assert len(examples) == 4
        assert last.endswith(" =")
        assert row["stop"] == "\n"
        for line in examples:
            asked, _, answer = line.partition(" = ")
            assert answer == str(right_answer(task, asked))


def test_prompts_look_like_this():
    (line,) = arithmetic(1, seed=0, tasks={"max_lines": 1.0})
    assert line == {
        "prompt": (
            "max(78, 43) = 78\nmax(13, 84) = 84\nmax(73, 65) = 73\nmax(66, 75) = 75\nmax(61, 21) ="
        ),
        "answer": "61",
        "task": "max_lines",
        "level": 1,
        "id": "max_lines/train/0",
        "stop": "\n",
    }
    (story,) = arithmetic(1, seed=0, tasks={"addition_story": 1.0}, levels=[2])
    assert story == {
        "prompt": [
            {"role": "system", "content": "Answer with one number."},
            {
                "role": "user",
                "content": "Max has 8 books and gets 2 more. How many books does Max have now?",
            },
        ],
        "answer": "10",
        "task": "addition_story",
        "level": 2,
        "id": "addition_story/train/0",
    }


@pytest.mark.parametrize(
    ("task", "level", "num_numbers", "low", "high"),
    [
        ("max_lines", 1, 2, 10, 99),
        ("max_lines", 3, 4, 10, 99),
        ("addition_lines", 1, 2, 10, 99),
        ("addition_lines", 3, 2, 1000, 9999),
        ("subtraction_lines", 2, 2, 100, 999),
        ("addition_story", 1, 2, 2, 10),
        ("addition_story", 5, 2, 2, 50),
    ],
)
def test_levels(task, level, num_numbers, low, high):
    for row in arithmetic(100, seed=0, tasks={task: 1.0}, levels=[level]):
        found = numbers(question(row))
        assert len(found) == num_numbers
        assert low <= found[0] <= found[-1] <= high


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(TASKS), st.integers(), st.integers())
def test_a_validation_problem_is_never_in_training(task, seed, other_seed):
    """Not with its numbers swapped, and not as an example line, in training or validation."""
    tasks = {task: 1.0}
    train = arithmetic(300, seed=seed, tasks=tasks)
    validation = arithmetic(100, seed=other_seed, split="validation", tasks=tasks)
    asked = {numbers(question(row)) for row in validation}
    shown = {numbers(question(row)) for row in train}
    if task in LINES:
        for row in train + validation:
            lines = row["prompt"].splitlines()[:-1]
            shown |= {numbers(line.partition(" =")[0]) for line in lines}
    assert asked.isdisjoint(shown)


def test_an_example_line_never_gives_the_answer_away():
    for row in arithmetic(2000, seed=0, tasks={"subtraction_lines": 1.0}):
        *examples, last = row["prompt"].splitlines()
        assert numbers(last) not in {numbers(line.partition(" =")[0]) for line in examples}


@pytest.mark.parametrize("task", TASKS)
def test_validation_repeats_nothing(task):
    rows = arithmetic(400, seed=0, split="validation", tasks={task: 1.0})
    assert len({question(row) for row in rows}) == 400
    assert len({row["id"] for row in rows}) == 400


def test_too_few_validation_problems_are_an_error():
    with pytest.raises(ValueError, match="2000 different problems of subtraction_lines"):
        arithmetic(2000, seed=0, split="validation", tasks={"subtraction_lines": 1.0})


def test_training_may_repeat():
    rows = arithmetic(5000, seed=0, tasks={"subtraction_lines": 1.0})
    assert len({question(row) for row in rows}) < 5000


def test_the_same_seed_is_the_same_data():
    tasks = {"max_lines": 1.0, "addition_story": 1.0}
    assert arithmetic(50, seed=4, tasks=tasks) == arithmetic(50, seed=4, tasks=tasks)
    assert arithmetic(50, seed=4, tasks=tasks) != arithmetic(50, seed=5, tasks=tasks)


def test_weights_and_levels_share_the_rows_out():
    rows = arithmetic(
        101, seed=0, tasks={"max_lines": 3, "addition_story": 1, "addition_lines": 0}, levels=[1, 2]
    )
    counts = Counter((row["task"], row["level"]) for row in rows)
    # 101 * 3/8 = 37.875 twice and 101 / 8 = 12.625 twice; the largest remainders are rounded up.
    assert counts == {
        ("max_lines", 1): 38,
        ("max_lines", 2): 38,
        ("addition_story", 1): 13,
        ("addition_story", 2): 12,
    }
    assert len({row["task"] for row in rows[:25]}) == 2  # mixed, not one task after the other


def test_no_problems():
    assert arithmetic(0, seed=0, tasks={"max_lines": 1.0}) == []


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_problems": -1}, "num_problems must not be negative, got -1"),
        ({"split": "test"}, "split must be 'train' or 'validation', got 'test'"),
        ({"tasks": {"max_line": 1.0}}, r"tasks must be among .*'max_lines'.* got \['max_line'\]"),
        ({"tasks": {}}, "tasks must have weights"),
        ({"tasks": {"max_lines": 0.0}}, "tasks must have weights"),
        ({"tasks": {"max_lines": -1.0, "addition_story": 2.0}}, "tasks must have weights"),
        ({"tasks": {"max_lines": float("nan")}}, "tasks must have weights"),
        ({"levels": []}, r"levels must be numbers from 1 to 5, got \[\]"),
        ({"levels": [0]}, r"levels must be numbers from 1 to 5, got \[0\]"),
        ({"levels": [6]}, r"levels must be numbers from 1 to 5, got \[6\]"),
    ],
)
def test_bad_arguments_are_named(changes, error):
    arguments = {"num_problems": 1, "seed": 0, "tasks": {"max_lines": 1.0}, **changes}
    with pytest.raises(ValueError, match=error):
        arithmetic(**arguments)
