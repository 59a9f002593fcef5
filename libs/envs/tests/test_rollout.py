import logging
import math
from collections.abc import Sequence

import pytest
from burnish_envs import (
    Completion,
    Rollout,
    StepResult,
    collect_groups,
    sample_seed,
    training_rows,
)
from hypothesis import given
from hypothesis import strategies as st

ROWS = [{"id": "a", "prompt": "a?"}, {"id": "b", "prompt": "b?"}]


def encode(prompt) -> list[int]:
    text = prompt if isinstance(prompt, str) else "".join(m["content"] for m in prompt)
    return [ord(letter) for letter in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def completion(text: str, **changes) -> Completion:
    values = {
        "token_ids": tuple(map(ord, text)),
        "logprobs": (-0.5,) * len(text),
        "finish_reason": "stop",
        "weight_version": 3,
    }
    return Completion(**{**values, **changes})


class Script:
    """A generator that says what it is told to, and remembers what it was asked."""

    def __init__(self, *turns: list[Completion]) -> None:
        self.turns = list(turns)
        self.prompts: list[list[tuple[int, ...]]] = []
        self.seeds: list[list[int]] = []

    def __call__(self, prompts, seeds):
        self.prompts.append(list(prompts))
        self.seeds.append(list(seeds))
        return self.turns[len(self.prompts) - 1]


class Echo:
    """Rewards the length of each completion, and answers "ok" until `num_turns`."""

    def __init__(self, num_turns: int = 1) -> None:
        self.num_turns = num_turns

    def prompt(self, row):
        return row["prompt"]

    def step(self, rollouts: Sequence[Rollout]) -> list[StepResult]:
        return [
            StepResult(
                float(len(r.turns[-1].text)),
                done=len(r.turns) == self.num_turns,
                observation=[{"role": "user", "content": "ok"}],
                info={r.turns[-1].text: len(r.turns)},
            )
            for r in rollouts
        ]


def collect(generate, environment=None, rows=ROWS, **settings):
    settings = {"group_size": 2, "render": encode, "decode": decode, "seed": 1, **settings}
    return collect_groups(rows, environment or Echo(), generate, **settings)


def test_groups_come_in_the_order_of_the_rows():
    generate = Script([completion(text) for text in ("1", "22", "333", "4444")])
    groups = collect(generate)
    assert [group.group_id for group in groups] == [0, 1]
    assert [[r.row["id"] for r in group.rollouts] for group in groups] == [["a", "a"], ["b", "b"]]
    assert [[r.index for r in group.rollouts] for group in groups] == [[0, 1], [0, 1]]
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1.0, 2.0], [3.0, 4.0]]
    assert generate.prompts == [[(97, 63), (97, 63), (98, 63), (98, 63)]]
    assert groups[1].rollouts[1].turns[0].text == "4444"
    assert groups[1].rollouts[1].turns[0].weight_version == 3


def test_each_row_is_rendered_once():
    rendered = []

    def render(prompt):
        rendered.append(prompt)
        return encode(prompt)

    collect(Script([completion("1")] * 6), group_size=3, render=render)
    assert rendered == ["a?", "b?"]


def test_a_second_turn_keeps_the_sampled_ids():
    """A tokenizer would merge ("he", "llo") into one id; the model must see the two it sampled."""
    he_llo = completion("xy", token_ids=(1001, 1002))
    generate = Script([he_llo], [completion("!")])
    groups = collect(
        generate,
        Echo(num_turns=2),
        ROWS[:1],
        group_size=1,
        max_turns=2,
        render_observation=encode,
        decode=lambda token_ids: {(1001, 1002): "hello"}.get(tuple(token_ids), "!"),
    )
    o, k = ord("o"), ord("k")
    assert generate.prompts == [[(97, 63)], [(97, 63, 1001, 1002, o, k)]]
    (rollout,) = groups[0].rollouts
    assert [turn.prompt_token_ids for turn in rollout.turns] == [(97, 63), (o, k)]
    assert [turn.text for turn in rollout.turns] == ["hello", "!"]
    assert rollout.reward == 6.0
    assert rollout.status == "ok"
    assert rollout.info == {"hello": 1, "!": 2}


def test_only_rollouts_that_go_on_are_generated_again():
    class DoneAtX(Echo):
        def step(self, rollouts):
            return [
                StepResult(1.0, "x" in r.turns[-1].text, [{"role": "user", "content": "-"}])
                for r in rollouts
            ]

    generate = Script(
        [completion("x"), completion("o"), completion("o"), completion("x")],
        [completion("x"), completion("o")],
    )
    groups = collect(generate, DoneAtX(), max_turns=2, render_observation=encode)
    assert [decode(prompt) for prompt in generate.prompts[1]] == ["a?o-", "b?o-"]
    rollouts = [r for group in groups for r in group.rollouts]
    assert [len(r.turns) for r in rollouts] == [1, 2, 2, 1]
    assert [r.status for r in rollouts] == ["ok", "ok", "max_turns", "ok"]
    assert [r.reward for r in rollouts] == [1.0, 2.0, 2.0, 1.0]


def test_no_turn_begins_at_the_token_limit():
    turns = [[completion("1")], [completion("2")]]
    settings = {"rows": ROWS[:1], "group_size": 1, "max_turns": 2, "render_observation": encode}
    # "a?" + "1" + "ok" are 5 tokens.
    stopped = collect(Script(*turns), Echo(2), max_total_tokens=5, **settings)[0].rollouts[0]
    assert (stopped.status, len(stopped.turns)) == ("max_tokens", 1)
    finished = collect(Script(*turns), Echo(2), max_total_tokens=6, **settings)[0].rollouts[0]
    assert (finished.status, len(finished.turns)) == ("ok", 2)


def test_a_prompt_without_room_is_an_error_before_anything_is_generated():
    generate = Script()
    with pytest.raises(ValueError, match=r"max_total_tokens=2, but row 'a' renders to 2 tokens"):
        collect(generate, max_total_tokens=2)
    assert generate.prompts == []


def test_an_aborted_completion_is_not_judged_and_not_a_zero():
    class NeverAborted(Echo):
        def step(self, rollouts):
            assert all(r.turns[-1].finish_reason != "abort" for r in rollouts)
            return super().step(rollouts)

    aborted = completion("1", finish_reason="abort")
    groups = collect(Script([aborted, completion("22")]), NeverAborted(), ROWS[:1])
    assert [r.status for r in groups[0].rollouts] == ["abort", "ok"]
    assert math.isnan(groups[0].rollouts[0].reward)
    assert groups[0].rollouts[1].reward == 2.0

    all_aborted = collect(Script([aborted, aborted]), NeverAborted(), ROWS[:1])
    assert [r.status for r in all_aborted[0].rollouts] == ["abort", "abort"]


class FailsOnSecondCall(Echo):
    calls = 0

    def step(self, rollouts):
        self.calls += 1
        if self.calls == 2:
            raise KeyError("lost the board")
        return super().step(rollouts)


def test_a_failing_environment_is_a_status_that_shows_the_error(caplog):
    generate = Script([completion("1")] * 4, [completion("2")] * 4)
    with caplog.at_level(logging.ERROR):
        groups = collect(generate, FailsOnSecondCall(2), max_turns=2, render_observation=encode)
    rollouts = [r for group in groups for r in group.rollouts]
    assert [r.status for r in rollouts] == ["error"] * 4
    assert all(math.isnan(r.reward) for r in rollouts)
    assert all(r.info["error"] == "KeyError('lost the board')" for r in rollouts)
    assert "lost the board" in caplog.text
    assert not any(any(mask) for mask in training_rows(groups)["token_mask"])


def test_a_failing_environment_can_end_the_run():
    generate = Script([completion("1")] * 4, [completion("2")] * 4)
    with pytest.raises(KeyError, match="lost the board"):
        collect(
            generate,
            FailsOnSecondCall(2),
            max_turns=2,
            render_observation=encode,
            on_error="raise",
        )


def test_broken_contracts_are_errors():
    with pytest.raises(ValueError, match="generate must return one result for each of its 4 "):
        collect(Script([completion("1")] * 3))
    with pytest.raises(ValueError, match="one log-prob for each token, got 1 for 2 tokens"):
        collect(Script([completion("11", logprobs=(0.0,))] * 4))
    with pytest.raises(ValueError, match=r"finish_reason must be one of .* got 'eos'"):
        collect(Script([completion("1", finish_reason="eos")] * 4))
    with pytest.raises(ValueError, match="group_size and max_turns must be at least 1, got 0"):
        collect(Script(), group_size=0)
    with pytest.raises(ValueError, match="max_turns=2 needs render_observation"):
        collect(Script(), max_turns=2)


def test_a_short_answer_of_the_environment_is_an_error_even_if_errors_are_statuses():
    class Short(Echo):
        def step(self, rollouts):
            return super().step(rollouts)[1:]

    with pytest.raises(ValueError, match="step must return one result for each of its 4 inputs"):
        collect(Script([completion("1")] * 4), Short())


def test_going_on_without_an_observation_is_an_error():
    class Silent(Echo):
        def step(self, rollouts):
            return [StepResult(0.0, done=False) for _ in rollouts]

    generate = Script([completion("1")] * 4)
    with pytest.raises(ValueError, match="must have an observation"):
        collect(generate, Silent(), max_turns=2, render_observation=encode)


def test_no_rows_are_no_groups():
    assert collect(Script(), rows=[]) == []


def test_seeds_are_the_same_everywhere_and_all_different():
    # blake2b("0/0/0/0", 8 bytes), big-endian, without its last bit
    assert sample_seed(0, 0, 0, 0) == 8662518681111019217
    generate = Script([completion("1")] * 4, [completion("1")] * 4)
    collect(generate, Echo(2), max_turns=2, render_observation=encode, seed=5)
    used = [seed for seeds in generate.seeds for seed in seeds]
    assert used == [sample_seed(5, g, i, t) for t in (0, 1) for g in (0, 1) for i in (0, 1)]
    assert len(set(used)) == 8


small = st.integers(0, 10**6)


@given(st.tuples(small, small, small, small), st.tuples(small, small, small, small))
def test_different_samples_have_different_seeds(a, b):
    assert 0 <= sample_seed(*a) < 2**63
    assert (sample_seed(*a) == sample_seed(*b)) == (a == b)
