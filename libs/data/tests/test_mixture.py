import pickle
from collections import Counter

import pytest
from burnish_data import BadRowError, ListRows
from burnish_data.mixture import mix, mix_streams, share_out
from burnish_data.stream import stream_of
from hypothesis import given, settings
from hypothesis import strategies as st


def rows(name, count):
    return ListRows([f"{name}{index}" for index in range(count)], name)


def letters(mixed):
    return Counter(row[0] for row in mixed)


def test_shares_are_exact_by_largest_remainders():
    sources = {"a": rows("a", 100), "b": rows("b", 100), "c": rows("c", 100)}
    mixed = mix(sources, {"a": 1, "b": 2, "c": 4}, num_rows=10, seed=0)
    # 10/7 = 1.43, 20/7 = 2.86, 40/7 = 5.71: the two largest remainders are rounded up.
    assert letters(mixed) == {"a": 1, "b": 3, "c": 6}
    assert mixed.counts == {"a": 1, "b": 3, "c": 6}
    assert mix(sources, {"a": 1, "b": 1, "c": 1}, num_rows=100, seed=0).counts == {
        "a": 34,
        "b": 33,
        "c": 33,
    }
    assert mix(sources, {"a": 0, "b": 0.5, "c": 0.5}, num_rows=2, seed=0).counts == {
        "a": 0,
        "b": 1,
        "c": 1,
    }


def test_no_row_comes_again_before_all_of_its_source_came():
    mixed = mix({"a": rows("a", 5), "b": rows("b", 40)}, {"a": 1, "b": 1}, num_rows=24, seed=3)
    from_a = [row for row in mixed if row[0] == "a"]
    assert sorted(from_a[:5]) == sorted(from_a[5:10]) == ["a0", "a1", "a2", "a3", "a4"]
    assert from_a[:5] != from_a[5:10]  # in another order
    assert len(set(from_a[10:])) == 2
    assert max(Counter(row for row in mixed if row[0] == "b").values()) == 1
    assert mixed.num_repeated == 7
    assert str(mixed) == "24 rows: 12 of 5 from a (2.40 times each), 12 of 40 from b"


def test_the_seed_decides_the_draw_and_the_order():
    sources = {"a": rows("a", 50), "b": rows("b", 50)}
    first = list(mix(sources, {"a": 1, "b": 1}, num_rows=20, seed=1))
    assert first == list(mix(sources, {"a": 1, "b": 1}, num_rows=20, seed=1))
    second = list(mix(sources, {"a": 1, "b": 1}, num_rows=20, seed=2))
    assert first != second
    assert set(first) != set(second)
    assert [row[0] for row in first] != sorted(row[0] for row in first)  # interleaved
    assert first[:6] == ["b30", "b25", "a39", "a8", "b49", "a1"]


def test_other_weights_draw_the_same_rows_of_a_source_more_or_fewer():
    sources = {"a": rows("a", 50), "b": rows("b", 50)}
    few = [row for row in mix(sources, {"a": 1, "b": 3}, num_rows=20, seed=1) if row[0] == "a"]
    many = [row for row in mix(sources, {"a": 3, "b": 1}, num_rows=20, seed=1) if row[0] == "a"]
    alone = list(mix({"a": sources["a"]}, {"a": 7.5}, num_rows=15, seed=1))
    assert (len(few), len(many)) == (5, 15)
    assert many[:5] == few
    assert alone == many


def test_rows_know_where_they_are_from_and_travel():
    mixed = mix({"a": rows("a", 3), "b": ["b0", "b1"]}, {"a": 1, "b": 1}, num_rows=4, seed=0)
    for index, row in enumerate(mixed):
        assert mixed.where(index) == f"{row[0]}, row {int(row[1:]) + 1}"
        assert mixed.source_of(index) == row[0]
    assert list(pickle.loads(pickle.dumps(mixed))) == list(mixed)
    assert list(mixed[1:3]) == list(mixed)[1:3]
    assert len(mix({"a": []}, {"a": 1}, num_rows=0, seed=0)) == 0


def test_a_bad_row_keeps_its_place():
    def refuse(row):
        raise BadRowError("a better row", row)

    mixed = mix({"a": rows("a", 3).map(refuse)}, {"a": 1}, num_rows=1, seed=0)
    with pytest.raises(BadRowError, match=r"^a, row \d: expected a better row, got 'a\d'\.$"):
        mixed[0]


@pytest.mark.parametrize(
    ("weights", "num_rows", "error"),
    [
        ({"a": 1}, 1, r"the same names, got \['a', 'b'\] and \['a'\]"),
        ({"a": 1, "c": 1}, 1, r"the same names, got \['a', 'b'\] and \['a', 'c'\]"),
        ({"a": 0, "b": 0}, 1, r"0 or more, not all of them 0, got \{'a': 0, 'b': 0\}"),
        ({"a": 1, "b": -1}, 1, r"finite numbers of 0 or more, .*'b': -1"),
        ({"a": 1, "b": float("nan")}, 1, r"finite numbers of 0 or more, .*'b': nan"),
        ({"a": 1, "b": float("inf")}, 1, r"finite numbers of 0 or more, .*'b': inf"),
        ({"a": 1e308, "b": 1e308}, 1, r"finite numbers of 0 or more, .*'b': 1e\+308"),
        ({"a": 1, "b": 1}, -1, r"num_rows must be a whole number, 0 or more, got -1"),
        ({"a": 1, "b": 1}, 2.0, r"num_rows must be a whole number, 0 or more, got 2\.0"),
        ({"a": 1, "b": 1}, True, r"num_rows must be a whole number, 0 or more, got True"),
        ({"a": 1, "b": 1}, 2, r"Source 'b' must have rows, since its share is 1 of them"),
    ],
)
def test_what_cannot_be_mixed(weights, num_rows, error):
    with pytest.raises(ValueError, match=error):
        mix({"a": rows("a", 3), "b": []}, weights, num_rows=num_rows, seed=0)


def test_a_seed_is_a_whole_number():
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 1\.0"):
        mix({"a": rows("a", 3)}, {"a": 1}, num_rows=1, seed=1.0)


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 1e-3),
)
def test_shares_add_up_and_are_right_to_one_row(total, weights):
    counts = share_out(total, dict(enumerate(weights)))
    assert sum(counts.values()) == total
    for name, count in counts.items():
        assert abs(count - total * weights[name] / sum(weights)) < 1 + 1e-6


# Streams


def test_streams_are_taken_in_turn_and_begin_anew():
    streams = {"a": stream_of(rows("a", 2)), "b": stream_of(rows("b", 100))}
    mixed = mix_streams(streams, {"a": 1, "b": 3}, num_rows=12)
    expected = ["b0", "a0", "b1", "b2", "b3", "a1", "b4", "b5", "b6", "a0", "b7", "b8"]
    assert list(mixed) == expected
    assert list(mixed) == expected
    for length in range(1, 12):
        assert abs(letters(expected[:length])["a"] - length / 4) < 1


def test_bad_rows_of_a_mixed_stream_are_counted():
    def refuse(row):
        if row == "a1":
            raise BadRowError("a better row", row, reason="poor")
        return row

    streams = {"a": stream_of(rows("a", 2)).map(refuse), "b": stream_of(rows("b", 9))}
    mixed = mix_streams(streams, {"a": 1, "b": 1}, num_rows=4)
    with pytest.raises(BadRowError, match="a, row 2: expected a better row, got 'a1'"):
        list(mixed)
    lenient = mixed.handle_bad_rows("skip")
    assert list(lenient) == ["a0", "b0", "b1"]
    assert lenient.skipped.counts == {"poor": 1}


def test_streams_that_cannot_be_mixed():
    empty = stream_of(ListRows([]))
    with pytest.raises(ValueError, match="the same names, got"):
        mix_streams({"a": empty}, {"b": 1}, num_rows=1)
    with pytest.raises(ValueError, match="Stream 'a' must have rows, since it has a share"):
        list(mix_streams({"a": empty}, {"a": 1}, num_rows=1))
    assert list(mix_streams({"a": empty}, {"a": 1}, num_rows=0)) == []
