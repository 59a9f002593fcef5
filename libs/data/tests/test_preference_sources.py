"""Pairs of a right and a wrong answer: equal lengths, no problem in both splits, stable draws."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from burnish_data import BadRowError
from burnish_data.sources import arithmetic_pairs, gsm8k_preferences
from burnish_data.sources.gsm8k_preferences import MODELS

TASKS = ("max_lines", "addition_lines", "subtraction_lines", "addition_story")


@pytest.mark.parametrize("task", TASKS)
def test_a_wrong_answer_is_as_long_as_the_right_one_and_another(task: str) -> None:
    rows = arithmetic_pairs(200, seed=0, tasks={task: 1.0}, levels=[1, 2, 3])
    assert len({row["problem"] for row in rows}) == 200
    for row in rows:
        (chosen,), (rejected,) = row["chosen"], row["rejected"]
        assert chosen["role"] == rejected["role"] == "assistant"
        assert len(chosen["content"]) == len(rejected["content"])
        assert chosen["content"] != rejected["content"]
        assert rejected["content"] == str(int(str(rejected["content"])))


def test_the_right_answer_is_right() -> None:
    for row in arithmetic_pairs(50, seed=1, tasks={"max_lines": 1.0}, levels=[2]):
        last = str(row["prompt"][-1]["content"]).splitlines()[-1]
        numbers = [int(text) for text in last[4:-3].split(",")]
        assert int(str(row["chosen"][0]["content"])) == max(numbers)
        assert int(str(row["rejected"][0]["content"])) in numbers


def test_pairs_depend_on_the_seed_alone_and_validation_is_never_in_training() -> None:
    def questions(split: str, seed: int) -> set[str]:
        rows = arithmetic_pairs(300, seed=seed, split=split, tasks={"max_lines": 1.0})  # type: ignore[arg-type]
        assert rows == arithmetic_pairs(300, seed=seed, split=split, tasks={"max_lines": 1.0})  # type: ignore[arg-type]
        return {str(row["prompt"][-1]["content"]).splitlines()[-1] for row in rows}

    held_out = questions("validation", 0)
    assert not held_out & (questions("train", 0) | questions("train", 7))
    assert questions("train", 0) != questions("train", 7)


def test_gsm8k_has_731_problems_with_right_and_wrong_solutions() -> None:
    train, held_out = (gsm8k_preferences(split=split) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (573, 158)
    assert not {row["problem"] for row in train} & {row["problem"] for row in held_out}
    every = gsm8k_preferences(max_pairs_per_problem=None)
    assert len(every) == 1909
    assert len({row["problem"] for row in every}) == 573
    assert all(row["chosen"] != row["rejected"] for row in every)
    two = gsm8k_preferences(max_pairs_per_problem=2, seed=3)
    assert two == gsm8k_preferences(max_pairs_per_problem=2, seed=3)
    assert two != gsm8k_preferences(max_pairs_per_problem=2, seed=4)
    assert gsm8k_preferences(system="Think.")[0]["prompt"][0] == {
        "role": "system",
        "content": "Think.",
    }


def solutions(*right: bool) -> dict[str, object]:
    made = {
        model: {"is_correct": is_right, "solution": f"A: {i}"}
        for i, (model, is_right) in enumerate(zip(MODELS, right, strict=True))
    }
    return {"question": "How many?", **made}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Q"}, "6b_finetuning"),
        ({**solutions(True, False, True, True), MODELS[1]: None}, "line 1, column '6b_verif"),
        (
            {**solutions(True, False, True, True), MODELS[1]: {"solution": "A: 1"}},
            "is_correct, true or false",
        ),
        (
            {
                **solutions(True, False, True, True),
                MODELS[0]: {"is_correct": True, "solution": " "},
            },
            "column 'solution'",
        ),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: object, message: str) -> None:
    path = tmp_path / "solutions.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(BadRowError, match=message):
        gsm8k_preferences(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "solutions.jsonl.gz"
    lines = [solutions(True, False, False, True), solutions(True, True, True, True)]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    rows = [
        row
        for split in ("train", "validation")
        for row in gsm8k_preferences(path, split=split, max_pairs_per_problem=None)
    ]
    pairs = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows]
    assert pairs == [("A: 0", "A: 1"), ("A: 0", "A: 2"), ("A: 3", "A: 1"), ("A: 3", "A: 2")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "must be 'train' or 'validation', got 'test'"),
        ({"max_pairs_per_problem": 0}, "must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gsm8k_preferences(**arguments)  # type: ignore[arg-type]
