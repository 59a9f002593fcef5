import pytest
from burnish_tracking import Timers


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nested_stages_add_up(clock: Clock) -> None:
    timers = Timers(clock)
    for _ in range(2):
        with timers("generation"):
            clock.now_s += 1
            with timers("weight_sync"):
                clock.now_s += 2
    with timers("train"):
        clock.now_s += 4
    expected = {"generation/weight_sync": 4.0, "generation": 6.0, "train": 4.0}
    assert timers.summary() == expected


def test_a_stage_that_raises_is_counted_and_closed(clock: Clock) -> None:
    timers = Timers(clock)

    def fail() -> None:
        with timers("train"):
            clock.now_s += 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with timers("train"):
        clock.now_s += 1
    assert timers.summary() == {"train": 4.0}


def test_take_starts_the_next_step_at_nothing(clock: Clock) -> None:
    timers = Timers(clock)
    with timers("train"):
        clock.now_s += 3
    assert timers.take() == {"train": 3.0}
    assert timers.summary() == {}


def test_a_reset_inside_a_stage_is_refused(clock: Clock) -> None:
    timers = Timers(clock)
    with timers("step"), pytest.raises(ValueError, match=r"\['step'\] is still open"):
        timers.take()
