"""Packing of a stream: bins by hand, nothing lost, batches and restarts leave no trace."""

import itertools
import json

import numpy as np
import pytest
from burnish_packing.streaming import StreamPacker, pack_stream
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(0, 12), max_size=60)


def sequences_of(lengths: list[int]) -> list[list[int]]:
    """Sequences whose tokens are all different."""
    tokens = itertools.count()
    return [[next(tokens) for _ in range(length)] for length in lengths]


def packed(lengths: list[int], capacity: int, **arguments) -> list[list[int]]:
    """Lengths in each bin."""
    return [[len(s) for s in b] for b in pack_stream(sequences_of(lengths), capacity, **arguments)]


def test_each_goes_to_the_fullest_open_bin_with_room() -> None:
    # 6 and 5 open bins; 3 fits both, and 6 is fuller; 5 fits 5 exactly, which closes that bin.
    assert packed([6, 5, 3, 5], 10) == [[5, 5], [6, 3]]


def test_a_full_bin_comes_out_at_once_and_the_fullest_when_the_buffer_is_full() -> None:
    packer: StreamPacker[list[int]] = StreamPacker(10, buffer_size=2)
    first, second, third, fourth = sequences_of([6, 8, 7, 3])
    assert packer.add(first) == []
    assert packer.add(second) == []
    assert packer.add(third) == [[second]]  # three are held: 8 of 10 is the fullest
    assert packer.add(fourth) == [[third, fourth]]  # 7 + 3 fill a bin
    assert packer.flush() == [[first]]
    assert packer.flush() == []
    assert packer.metrics() == {
        "num_items": 4,
        "num_bins": 3,
        "num_tokens": 24,
        "num_skipped": 0,
        "num_truncated": 0,
        "num_split": 0,
        "num_lost_tokens": 0,
        "fill_ratio": 0.8,
    }


def test_among_equal_bins_the_oldest_is_next() -> None:
    assert packed([6, 6, 4], 10) == [[6, 4], [6]]
    assert packed([6, 6, 7, 7], 10, buffer_size=3) == [[7], [6], [6], [7]]


def test_rows_that_came_in_batches_of_three_survive() -> None:
    rows = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    packer: StreamPacker[list[int]] = StreamPacker(4)
    bins = []
    for start in range(0, 6, 3):
        for row in rows[start : start + 3]:
            bins += packer.add(row)
    bins += packer.flush()
    assert bins == [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]]
    assert bins == list(pack_stream(rows, 4))


@settings(max_examples=300)
@given(LENGTHS, st.integers(1, 9), st.none() | st.integers(1, 4))
def test_every_rule_holds(lengths, buffer_size, seats) -> None:
    packer: StreamPacker[list[int]] = StreamPacker(
        12, buffer_size=buffer_size, max_sequences_per_bin=seats
    )
    sequences = sequences_of(lengths)
    bins: list[list[list[int]]] = []
    for i, sequence in enumerate(sequences):
        bins += packer.add(sequence)
        assert i + 1 - sum(map(len, bins)) <= buffer_size
    bins += packer.flush()
    given_out = [sequence for content in bins for sequence in content]
    assert sorted(given_out) == sorted(sequences)
    assert all(sum(map(len, content)) <= 12 for content in bins)
    assert all(len(content) <= (seats or 60) for content in bins)
    assert all(content == sorted(content) for content in bins if all(content))  # as they came
    assert packer.num_bins == len(bins)
    assert packer.num_tokens == sum(lengths)


@settings(max_examples=200)
@given(
    LENGTHS.map(lambda lengths: [3 * n for n in lengths]),
    st.integers(1, 9),
    st.integers(0, 30),
    st.sampled_from(["skip", "truncate", "split"]),
)
def test_a_run_that_stops_after_any_bin_goes_on_as_if_it_had_not(
    lengths, buffer_size, num_taken, too_long
) -> None:
    sequences = sequences_of(lengths)
    arguments = {"buffer_size": buffer_size, "too_long": too_long}
    whole: StreamPacker[list[int]] = StreamPacker(12, **arguments)
    expected = list(whole.pack(sequences))

    stopped: StreamPacker[list[int]] = StreamPacker(12, **arguments)
    bins = list(itertools.islice(stopped.pack(sequences), num_taken))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed: StreamPacker[list[int]] = StreamPacker(12, **arguments)
    resumed.load_state_dict(state)
    bins += resumed.pack(sequences[resumed.num_items :])
    assert bins == expected
    assert resumed.metrics() == whole.metrics()


def test_a_state_is_not_changed_by_what_comes_after() -> None:
    packer: StreamPacker[list[int]] = StreamPacker(10)
    packer.add([1, 2])
    state = packer.state_dict()
    packer.add([3])
    other: StreamPacker[list[int]] = StreamPacker(10)
    other.load_state_dict(state)
    assert other.flush() == [[[1, 2]]]


def test_a_state_of_other_settings_or_versions_is_refused() -> None:
    state = StreamPacker(10).state_dict()
    with pytest.raises(ValueError, match="got capacity = 12 for 10; make the packer with these"):
        StreamPacker(12).load_state_dict(state)
    with pytest.raises(ValueError, match="schema_version 1, got 7"):
        StreamPacker(10).load_state_dict({**state, "schema_version": 7})
    with pytest.raises(ValueError, match="schema_version 1, got None"):
        StreamPacker(10).load_state_dict({})


def changed_state(**changed) -> dict:
    """The state of a packer of capacity 10 that holds items of 3 and 8, with a change."""
    packer: StreamPacker[list[int]] = StreamPacker(10, buffer_size=3, max_sequences_per_bin=3)
    for item in sequences_of([3, 8]):
        packer.add(item)
    return {**json.loads(json.dumps(packer.state_dict())), **changed}


ONE = {"number": 0, "room": 7, "items": [[0, 1, 2]]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"open_bins": [{**ONE, "room": 99}]}, "got room 99 beside 3 tokens; save the state"),
        ({"open_bins": [{**ONE, "room": "7"}]}, "got room '7' beside 3 tokens"),
        ({"open_bins": [{**ONE, "room": 0, "items": [[1] * 10]}]}, "got room 0 beside 10 tokens"),
        ({"open_bins": [{**ONE, "items": []}]}, "the bins of a state must be lists of items"),
        ({"open_bins": [{**ONE, "items": [[0]] * 3}]}, "the bins of a state must be lists of"),
        ({"open_bins": [{"number": 0, "room": 7}]}, "the bins of a state must be lists of items"),
        ({"open_bins": None}, "the bins of a state must be lists of items"),
        ({"open_bins": [{**ONE, "number": 7}]}, "number of an open bin must be .* 0 to 1, got 7"),
        ({"open_bins": [ONE, ONE]}, r"different numbers, got \[0, 0\]"),
        ({"ready_bins": [[]]}, "the bins of a state must be lists of items"),
        ({"ready_bins": [[[1] * 11]]}, "ready bins of a state must hold at most 10 tokens, got 11"),
        ({"num_items": -1}, "num_items must be an integer from 0 to .* got -1; save the state"),
        ({"num_tokens": True}, "num_tokens must be an integer from 0 to .* got True"),
        ({"num_opened": None}, "num_opened must be an integer from 0 to .* got None"),
    ],
)
def test_a_broken_state_is_refused_and_changes_nothing(changed, message) -> None:
    packer: StreamPacker[list[int]] = StreamPacker(10, buffer_size=3, max_sequences_per_bin=3)
    packer.add([1])
    before = packer.state_dict()
    with pytest.raises(ValueError, match=message):
        packer.load_state_dict(changed_state(**changed))
    assert packer.state_dict() == before
    packer.load_state_dict(changed_state())
    assert [list(map(len, content)) for content in packer.flush()] == [[3], [8]]


def test_a_state_without_a_field_is_refused_and_changes_nothing() -> None:
    packer: StreamPacker[list[int]] = StreamPacker(10, buffer_size=3, max_sequences_per_bin=3)
    before = packer.state_dict()
    for name in before.keys() - {"schema_version"}:
        state = changed_state()
        del state[name]
        with pytest.raises(ValueError, match=rf"got \['{name}'\] missing; save the state again"):
            packer.load_state_dict(state)
        assert packer.state_dict() == before


def test_a_state_is_plain_whatever_the_integers_were() -> None:
    packer: StreamPacker[list[int]] = StreamPacker(
        np.int64(10), buffer_size=np.int32(4), max_sequences_per_bin=np.int64(3)
    )
    state = json.loads(json.dumps(packer.state_dict()))
    plain: StreamPacker[list[int]] = StreamPacker(10, buffer_size=4, max_sequences_per_bin=3)
    plain.load_state_dict(state)
    assert plain.state_dict() == state


def test_bins_that_wait_are_not_counted_as_given_out() -> None:
    packer: StreamPacker[list[int]] = StreamPacker(2, too_long="split")
    bins = packer.pack([[1, 2, 3, 4, 5]])  # two full bins at once, and one of a token
    assert packer.metrics()["num_bins"] == 0
    next(bins)
    assert (packer.num_bins, packer.num_tokens) == (1, 2)
    assert len(packer.state_dict()["ready_bins"]) == 1
    assert list(bins) == [[[3, 4]], [[5]]]
    assert (packer.num_bins, packer.num_tokens) == (3, 5)


@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_a_cut_that_returns_more_or_less_is_refused(too_long) -> None:
    for cut, length in ((lambda row, start, end: row, 3), (lambda row, start, end: row[:1], 1)):
        packer: StreamPacker[list[int]] = StreamPacker(2, too_long=too_long, cut=cut)
        before = packer.state_dict()
        with pytest.raises(ValueError, match=f"2 tokens from 0 to 2, got {length} at item 0; corr"):
            packer.add([1, 2, 3])
        assert packer.state_dict() == before


def test_what_is_too_long() -> None:
    rows = [[1, 2, 3], list(range(10, 19)), [4]]  # 9 tokens for 4
    with pytest.raises(ValueError, match="capacity 4, got 9 tokens for item 1; raise"):
        list(pack_stream(rows, 4))

    expected = {
        "skip": ([[[1, 2, 3], [4]]], (1, 0, 0, 9)),
        "truncate": ([[[10, 11, 12, 13]], [[1, 2, 3], [4]]], (0, 1, 0, 5)),
        "split": (
            [[[10, 11, 12, 13]], [[14, 15, 16, 17]], [[1, 2, 3], [18]], [[4]]],
            (0, 0, 1, 0),
        ),
    }
    for too_long, (bins, counts) in expected.items():
        packer: StreamPacker[list[int]] = StreamPacker(4, too_long=too_long)
        assert list(packer.pack(rows)) == bins
        found = (packer.num_skipped, packer.num_truncated, packer.num_split)
        assert (*found, packer.num_lost_tokens) == counts
        assert packer.num_items == 3


def test_an_item_that_is_refused_leaves_the_packer_as_it_was() -> None:
    packer: StreamPacker[list[int]] = StreamPacker(4)
    packer.add([1])
    state = packer.state_dict()
    with pytest.raises(ValueError, match="got 5 tokens for item 1"):
        packer.add([1, 2, 3, 4, 5])
    assert packer.state_dict() == state


def test_rows_of_columns_are_cut_in_every_column() -> None:
    rows = [{"token_ids": [1, 2, 3], "token_mask": [0, 1, 1]}]
    assert list(pack_stream(rows, 2, too_long="split")) == [
        [{"token_ids": [1, 2], "token_mask": [0, 1]}],
        [{"token_ids": [3], "token_mask": [1]}],
    ]
    named = [{"token_ids": [1, 2, 3], "source": "web"}]
    bins = pack_stream(
        named,
        2,
        too_long="truncate",
        length=lambda row: len(row["token_ids"]),
        cut=lambda row, start, end: {**row, "token_ids": row["token_ids"][start:end]},
    )
    assert list(bins) == [[{"token_ids": [1, 2], "source": "web"}]]


def test_arrays_are_items_too() -> None:
    (content,) = pack_stream([np.arange(3), np.arange(2)], 5)
    assert [array.tolist() for array in content] == [[0, 1, 2], [0, 1]]


def test_zero_lengths_and_nothing() -> None:
    assert packed([], 4) == []
    assert packed([0, 0], 4) == [[0, 0]]
    assert StreamPacker(4).metrics()["fill_ratio"] == 0.0


@pytest.mark.parametrize(
    ("items", "arguments", "message"),
    [
        ([{"token_ids": [1], "source": "web"}], {}, "got lengths {'token_ids': 1} of .*source"),
        ([{"a": [1], "b": [1, 2]}], {}, "got lengths {'a': 1, 'b': 2}"),
        ([{}], {}, "columns of an item must be equally long"),
        (["text"], {}, "got str; tokenise it first"),
        ([3], {}, "got int; tokenise it first"),
        ([np.array(3)], {}, "got ndarray; tokenise it first"),
        ([{"a": np.array(3)}], {}, "got lengths {} of columns"),
        ([[1]], {"length": lambda item: -1}, "integer >= 0, got -1 at item 0"),
        ([[1]], {"length": lambda item: 1.0}, "integer >= 0, got 1.0 at item 0"),
        (
            [{"token_ids": [1] * 5, "source": "thing"}],
            {"too_long": "truncate", "length": lambda row: 5},
            "equally long to be cut, got columns .*source.*; pass `cut`",
        ),
        ([], {"capacity": 0}, "capacity must be an integer >= 1, got 0"),
        ([], {"buffer_size": 0}, "buffer_size must be an integer >= 1, got 0"),
        ([], {"max_sequences_per_bin": 0}, "max_sequences_per_bin must be an integer >= 1"),
        ([], {"too_long": "drop"}, "one of error, skip, truncate, split, got 'drop'"),
        ([], {"too_long": np.array(["skip", "split"])}, "split, got array"),
        ([], {"capacity": 10**30}, "capacity must be at most"),
    ],
)
def test_errors_say_what_was_got(items, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        list(pack_stream(items, **{"capacity": 4, **arguments}))


def test_more_buffer_fills_the_bins_better() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 3000).astype(int).clip(1, 2048)
    items = [range(n) for n in lengths.tolist()]
    num_bins = [len(list(pack_stream(items, 2048, buffer_size=n))) for n in (1, 16, 1024)]
    bound = -(-int(lengths.sum()) // 2048)
    assert num_bins[0] > num_bins[1] > num_bins[2]
    assert num_bins[2] <= 1.01 * bound + 1
