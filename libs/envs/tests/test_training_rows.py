import math

import pytest
from burnish_envs import Rollout, RolloutGroup, Turn, training_rows


def turn(prompt, sampled, version=1) -> Turn:
    logprobs = tuple(-token / 10 for token in sampled)
    return Turn(tuple(prompt), tuple(sampled), logprobs, "stop", version, "")


def test_columns():
    groups = [
        RolloutGroup(0, (Rollout({}, 0, 0, (turn([1, 2], [3, 4, 5]),), reward=1.0),)),
        RolloutGroup(
            1,
            (
                Rollout({}, 1, 0, (turn([1], [6], 4), turn([7, 8], [9], 2)), 0.5, "max_turns"),
                Rollout({}, 1, 1, (turn([1], []),), 0.0, "timeout"),
            ),
        ),
    ]
    assert training_rows(groups) == {
        "token_ids": [[1, 2, 3, 4, 5], [1, 6, 7, 8, 9], [1]],
        "token_mask": [
            [False, False, True, True, True],
            [False, True, False, False, True],
            [False],
        ],
        "sampled_logprobs": [[0.0, 0.0, -0.3, -0.4, -0.5], [0.0, -0.6, 0.0, 0.0, -0.9], [0.0]],
        "reward": [1.0, 0.5, 0.0],
        "group_id": [0, 1, 1],
        "prompt_length": [2, 1, 1],
        "status": ["ok", "max_turns", "timeout"],
        "weight_version": [1, 2, 1],
    }


def test_a_failed_rollout_keeps_its_row_and_trains_nothing():
    failed = Rollout({}, 0, 0, (turn([1, 2], [3]),), math.nan, "error")
    rows = training_rows([RolloutGroup(0, (failed,))])
    assert rows["token_ids"] == [[1, 2, 3]]
    assert rows["token_mask"] == [[False, False, False]]
    assert math.isnan(rows["reward"][0])
    assert rows["status"] == ["error"]


def test_no_groups_are_empty_columns():
    assert set(map(len, training_rows([]).values())) == {0}


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_trains_nothing(reward: float) -> None:
    turn = Turn((1, 2), (3, 4), (-0.1, -0.2), "stop", 0, "")
    rows = training_rows([RolloutGroup(0, (Rollout({}, 0, 0, (turn,), reward),))])
    assert rows["token_mask"] == [[False] * 4]
