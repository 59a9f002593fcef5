import json
from itertools import islice

import pytest
from burnish_data import Loader, PromptLoader
from hypothesis import given
from hypothesis import strategies as st


def take(loader: PromptLoader, num_batches: int) -> list:
    return [row for batch in islice(loader, num_batches) for row in batch]


def test_unshuffled_batches_run_over_the_end_of_the_epoch():
    loader = PromptLoader("abcde", 2, seed=0, shuffle=False)
    assert list(islice(loader, 4)) == [["a", "b"], ["c", "d"], ["e", "a"], ["b", "c"]]


@given(st.integers(1, 12), st.integers(1, 30), st.integers())
def test_every_epoch_holds_every_row_once(num_rows, batch_size, seed):
    rows = take(PromptLoader(range(num_rows), batch_size, seed=seed), 3 * num_rows)
    for epoch in range(3):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_five_prompts_last_for_fifty_steps():
    loader = PromptLoader(range(5), 4, seed=0)
    rows = take(loader, 50)
    assert [rows.count(row) for row in range(5)] == [40] * 5
    assert loader.epoch == 40


def test_epochs_differ_and_are_the_same_on_every_rank():
    one = take(PromptLoader(range(20), 20, seed=1), 3)
    assert one == take(PromptLoader(range(20), 20, seed=1), 3)
    assert one == take(PromptLoader(range(20), 4, seed=1), 15)
    assert one[:20] != one[20:40] != one[40:]
    assert one[:20] != list(range(20))
    assert one != take(PromptLoader(range(20), 20, seed=2), 3)


def test_the_order_is_the_same_in_every_version():
    assert next(PromptLoader(range(8), 8, seed=0)) == [0, 2, 1, 4, 6, 7, 3, 5]
    assert next(PromptLoader(range(8), 8, seed=1)) == [1, 5, 4, 2, 7, 0, 3, 6]


def test_epoch_is_that_of_the_next_row():
    loader = PromptLoader(range(4), 2, seed=0)
    epochs = []
    for _ in range(5):
        epochs.append(loader.epoch)
        next(loader)
    assert epochs == [0, 0, 1, 1, 2]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 12), st.integers(1, 5))
def test_resuming_goes_on_exactly(num_rows, batch_size, num_batches, new_batch_size):
    loader = PromptLoader(range(num_rows), batch_size, seed=3)
    take(loader, num_batches)
    state = json.loads(json.dumps(loader.state_dict()))

    resumed = PromptLoader(range(num_rows), new_batch_size, seed=3)
    next(resumed)
    resumed.load_state_dict(state)
    assert resumed.epoch == loader.epoch
    num_left = 20 * batch_size * new_batch_size
    assert take(resumed, num_left // new_batch_size) == take(loader, num_left // batch_size)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (PromptLoader(range(9), 2, seed=0), "num_rows it was saved with, which was 10, .* has 9"),
        (PromptLoader(range(10), 2, seed=1), "seed it was saved with, which was 0, .* has 1"),
        (PromptLoader(range(10), 2, seed=0, shuffle=False), "shuffle .* was True, .* has False"),
    ],
)
def test_other_data_or_another_order_is_refused(other, error):
    state = PromptLoader(range(10), 2, seed=0).state_dict()
    with pytest.raises(ValueError, match=error):
        other.load_state_dict(state)


def test_another_schema_is_refused():
    loader = PromptLoader(range(10), 2, seed=0)
    with pytest.raises(ValueError, match=r"schema_version .* was 2, but this one has 1"):
        loader.load_state_dict({**loader.state_dict(), "schema_version": 2})


def test_a_loader_needs_rows_and_a_batch_size():
    with pytest.raises(ValueError, match="got 0 rows and batch_size=2"):
        PromptLoader([], 2, seed=0)
    with pytest.raises(ValueError, match="got 1 rows and batch_size=0"):
        PromptLoader(["a"], 0, seed=0)


@pytest.mark.parametrize("position", [-1, 2.5, None, True])
def test_a_position_that_cannot_be_is_refused(position):
    loader = PromptLoader(range(10), 3, seed=0)
    next(loader)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=f"position must be .* 0 or more, got {position}"):
        loader.load_state_dict({**before, "position": position})
    assert loader.state_dict() == before


@pytest.mark.parametrize("seed", [1.0, "1", None, True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=r"seed must be a whole number, got "):
        Loader(range(4), 2, seed=seed)
    with pytest.raises(ValueError, match=r"seed must be a whole number, got "):
        PromptLoader(range(4), 2, seed=seed)


def test_a_samplers_negative_index_is_refused():
    batches = iter(Loader(range(4), batch_sampler=[[0, 3], [1, -1]]))
    assert next(batches) == [0, 3]
    with pytest.raises(ValueError, match=r"indices of rows, 0 or more, got \[1, -1\] in epoch 0"):
        next(batches)
