"""Several engines as one: answers in prompt order, failures shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from burnish_generation import Completion, Replicas, Sampling, WeightSource

SAMPLING = Sampling(max_new_tokens=2)


class Echo:
    """An engine whose completion tells who was asked what, after a delay."""

    def __init__(self, number: int, delay_s: float = 0.0, count: int = 3) -> None:
        self.number, self.delay_s, self.count = number, delay_s, count
        self.calls: list[list[list[int]]] = []
        self.version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        self.calls.append([list(prompt) for prompt in prompts])
        time.sleep(self.delay_s)
        return [
            Completion((*prompt, seed), (-1.0,) * (len(prompt) + 1), "stop", self.version)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def update_weights(self, source: WeightSource, weight_version: int) -> int:
        time.sleep(self.delay_s)
        self.version = weight_version
        return self.count


class Broken(Echo):
    def generate(self, *args: Any) -> list[Completion]:
        raise RuntimeError("worker 0 of engine died")

    def update_weights(self, *args: Any) -> int:
        raise RuntimeError("worker 0 of engine died")


class Short(Echo):
    """Loses its last completion."""

    def generate(self, *args: Any) -> list[Completion]:
        return super().generate(*args)[:-1]


def prompts(count: int) -> list[list[int]]:
    return [[i] for i in range(count)]


def test_answers_come_in_prompt_order_whoever_is_first() -> None:
    replicas = Replicas([Echo(i, delay_s=0.1 * (3 - i)) for i in range(4)])
    completions = replicas.generate(prompts(8), SAMPLING, range(100, 108))
    assert [c.token_ids for c in completions] == [(i, 100 + i) for i in range(8)]


def test_engines_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=30)  # broken, were they asked one after the other

    class Meeting(Echo):
        def generate(self, *args: Any) -> list[Completion]:
            together.wait()
            return super().generate(*args)

    assert (
        len(Replicas([Meeting(i) for i in range(3)]).generate(prompts(3), SAMPLING, [0] * 3)) == 3
    )


@pytest.mark.parametrize(
    ("num_prompts", "num_engines", "runs"),
    [
        (5, 2, [[0, 1], [2, 3, 4]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (7, 1, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
def test_prompts_are_dealt_in_contiguous_runs(
    num_prompts: int, num_engines: int, runs: list[list[int]]
) -> None:
    engines = [Echo(i) for i in range(num_engines)]
    Replicas(engines).generate(prompts(num_prompts), SAMPLING, range(num_prompts))
    assert [engine.calls for engine in engines] == [[[[i] for i in run]] for run in runs]


def test_fewer_prompts_than_engines_leave_engines_alone() -> None:
    engines = [Echo(i) for i in range(4)]
    completions = Replicas(engines).generate(prompts(2), SAMPLING, [7, 8])
    assert [c.token_ids for c in completions] == [(0, 7), (1, 8)]
    assert sorted(len(engine.calls) for engine in engines) == [0, 0, 1, 1]


def test_no_prompts_give_no_completions() -> None:
    engine = Echo(0)
    assert Replicas([engine, Echo(1)]).generate([], SAMPLING, []) == []
    assert engine.calls == []


@pytest.mark.parametrize("short", [0, 1])
def test_a_lost_completion_is_an_error(short: int) -> None:
    engines: list[Echo] = [Echo(0), Echo(1)]
    engines[short] = Short(short)
    with pytest.raises(RuntimeError, match="one completion per prompt"):
        Replicas(engines).generate(prompts(4), SAMPLING, range(4))


def test_losses_that_cancel_out_are_an_error() -> None:
    """One completion too few here and one too many there would shift answers to other prompts."""

    class Long(Echo):
        def generate(self, *args: Any) -> list[Completion]:
            return [*super().generate(*args), Completion((0,), (0.0,), "stop", 0)]

    with pytest.raises(RuntimeError, match="one completion per prompt"):
        Replicas([Short(0), Long(1)]).generate(prompts(4), SAMPLING, range(4))


@pytest.mark.parametrize("seeds", [[1, 2, 3], [1, 2, 3, 4, 5]], ids=["few", "many"])
def test_wrong_number_of_seeds_is_refused(seeds: list[int]) -> None:
    with pytest.raises(ValueError, match=r"seed.*4 prompts"):
        Replicas([Echo(0), Echo(1)]).generate(prompts(4), SAMPLING, seeds)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_failing_engine_is_shown_without_waiting_for_the_others(broken: int) -> None:
    told = threading.Event()

    class Waiting(Echo):
        def generate(self, *args: Any) -> list[Completion]:
            assert told.wait(timeout=60)
            return super().generate(*args)

    engines: list[Echo] = [Waiting(0), Waiting(1)]
    engines[broken] = Broken(broken)
    with pytest.raises(RuntimeError, match="worker 0 of engine died"):
        Replicas(engines).generate(prompts(4), SAMPLING, range(4))
    told.set()


def test_every_engine_is_updated() -> None:
    engines = [Echo(i, delay_s=0.1) for i in range(3)]
    assert Replicas(engines).update_weights("module:function", 7) == 3
    assert [engine.version for engine in engines] == [7, 7, 7]


def test_updates_that_differ_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the same tensors, got counts \[3, 2\]"):
        Replicas([Echo(0), Echo(1, count=2)]).update_weights("module:function", 1)


def test_a_failing_update_is_shown() -> None:
    with pytest.raises(RuntimeError, match="worker 0 of engine died"):
        Replicas([Echo(0), Broken(1)]).update_weights("module:function", 1)


def test_replicas_of_replicas() -> None:
    replicas = Replicas([Replicas([Echo(0), Echo(1)]), Echo(2)])
    completions = replicas.generate(prompts(5), SAMPLING, range(5))
    assert [c.token_ids for c in completions] == [(i, i) for i in range(5)]


def test_no_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one engine"):
        Replicas([])
