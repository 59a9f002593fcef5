"""Libraries meet through plain types: what one makes, another takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from burnish_data import arithmetic, gsm8k
from burnish_envs import MathEnvironment, collect_groups, math_environment, training_rows
from burnish_generation import Completion, Replicas, Sampling

WEIGHTS = {"max_lines": 1.0, "addition_lines": 1.0, "subtraction_lines": 1.0, "addition_story": 1.0}


class Scripted:
    """An engine that answers with the bytes of given texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        texts = [self._texts.pop(0) for _ in prompts]
        return [Completion(tuple(t.encode()), (-1.0,) * len(t), "stop", 3) for t in texts]

    def update_weights(self, source: object, weight_version: int) -> int:
        return 0


def rewards_of(rows: list[dict], texts: Sequence[str]) -> list[float]:
    engines = Replicas([Scripted(texts)])
    sampling = Sampling(max_new_tokens=64)
    with math_environment() as environment:
        assert isinstance(environment, MathEnvironment)
        groups = collect_groups(
            rows,
            environment,
            lambda prompts, seeds: engines.generate(prompts, sampling, seeds),
            group_size=1,
            render=lambda prompt: list(str(prompt).encode()),
            decode=lambda token_ids: bytes(token_ids).decode(),
            seed=0,
        )
    columns = training_rows(groups)
    assert columns["weight_version"] == [3] * len(rows)
    assert [sum(mask) for mask in columns["token_mask"]] == [len(text) for text in texts]
    return list(columns["reward"])


@pytest.mark.parametrize("off_by", [0, 1])
def test_generated_problems_are_judged_by_their_answers(off_by: int) -> None:
    rows = arithmetic(32, seed=5, tasks=WEIGHTS, levels=(1, 2))
    texts = [f" {int(row['answer']) + off_by}" for row in rows]
    assert rewards_of(rows, texts) == [1.0 - off_by] * 32


def test_gsm8k_answers_are_judged_in_a_sentence() -> None:
    rows = gsm8k(num_rows=16)
    right = [f"So she has 3 + 4 and the answer is {row['answer']}." for row in rows]
    wrong = [f"So she has {row['answer']} less 1, the answer is 123456789." for row in rows]
    assert rewards_of(rows, right) == [1.0] * 16
    assert rewards_of(rows, wrong) == [0.0] * 16
