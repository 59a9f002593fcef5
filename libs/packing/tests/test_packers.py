"""Packings: literal cases, the naive algorithms, rules that hold for all inputs, clear errors."""

import json

import numpy as np
import pytest
from burnish_packing import Packing, lower_bound, pack
from hypothesis import given, settings
from hypothesis import strategies as st

ALGORITHMS = ["best_fit_decreasing", "first_fit_decreasing", "next_fit"]
LENGTHS = st.lists(st.integers(0, 20), max_size=60)


def contents(packing: Packing) -> list[list[int]]:
    return [indices.tolist() for indices in packing.bins]


def naive_decreasing(lengths: list[int], capacity: int, *, best: bool) -> list[int]:
    """Room left in every bin, one sequence at a time: the textbook's best fit or first fit."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity - length)
        else:
            rooms[min(fitting, key=lambda i: rooms[i]) if best else fitting[0]] -= length
    return rooms


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sequences_that_fill_more_than_half_get_a_bin_each(algorithm) -> None:
    packing = pack([7] * 8, 8, algorithm=algorithm)
    assert sorted(contents(packing)) == [[i] for i in range(8)]
    assert packing.lower_bound == 8


def test_best_fit_takes_the_fullest_bin_and_first_fit_the_first() -> None:
    # 12 leaves 8 in the first bin, 10 + 9 leave 1 in the second; the last 1 fits both.
    lengths = [12, 10, 9, 1]
    assert contents(pack(lengths, 20)) == [[0], [1, 2, 3]]
    first_fit = pack(lengths, 20, algorithm="first_fit_decreasing")
    assert contents(first_fit) == [[0, 3], [1, 2]]


def test_next_fit_keeps_the_order() -> None:
    packing = pack([3, 4, 5, 1, 1, 9, 2], 9, algorithm="next_fit")
    assert contents(packing) == [[0, 1], [2, 3, 4], [5], [6]]


@given(LENGTHS)
def test_best_fit_decreasing_is_the_textbooks(lengths) -> None:
    packing = pack(lengths, 20)
    rooms = [20 - packing.lengths[indices].sum() for indices in packing.bins]
    assert sorted(rooms) == sorted(naive_decreasing(lengths, 20, best=True))


@given(LENGTHS)
def test_first_fit_decreasing_is_the_textbooks(lengths) -> None:
    packing = pack(lengths, 20, algorithm="first_fit_decreasing")
    rooms = [20 - packing.lengths[indices].sum() for indices in packing.bins]
    assert rooms == naive_decreasing(lengths, 20, best=False)


@settings(max_examples=300)
@given(
    lengths=LENGTHS,
    algorithm=st.sampled_from(ALGORITHMS),
    min_bins=st.integers(1, 9),
    multiple=st.integers(1, 5),
    max_sequences=st.none() | st.integers(3, 6),
    unit_size=st.integers(1, 3),
)
def test_every_rule_holds(lengths, algorithm, min_bins, multiple, max_sequences, unit_size) -> None:
    units = np.arange(len(lengths)) // unit_size
    packing = pack(
        lengths,
        60,
        algorithm=algorithm,
        min_bins=min_bins,
        bins_multiple_of=multiple,
        max_sequences_per_bin=max_sequences,
        units=units,
    )
    indices = np.concatenate([np.zeros(0, int), *packing.bins])
    assert sorted(indices.tolist()) == list(range(len(lengths)))
    assert all(packing.lengths[b].sum() <= 60 for b in packing.bins)
    assert all((np.diff(b) > 0).all() for b in packing.bins)
    if max_sequences:
        assert all(len(b) <= max_sequences for b in packing.bins)
    bin_of = {int(i): k for k, b in enumerate(packing.bins) for i in b}
    assert all(bin_of[i] == bin_of[i - i % unit_size] for i in bin_of)
    assert len(packing.bins) % multiple == 0
    if lengths:
        assert len(packing.bins) >= max(min_bins, packing.lower_bound)
        filled = sum(len(b) > 0 for b in packing.bins)
        assert filled >= min(min_bins, len(set(units.tolist())))


def optimal_bins(lengths: list[int], rooms: tuple[int, ...] = ()) -> int:
    """The fewest bins of 10, by trying every bin for the first length, then for the others."""
    if not lengths:
        return len(rooms)
    length, *others = lengths
    choices = [(*rooms[:i], room - length, *rooms[i + 1 :]) for i, room in enumerate(rooms)]
    choices = [choice for choice in choices if min(choice) >= 0] + [(*rooms, 10 - length)]
    return min(optimal_bins(others, choice) for choice in choices)


@given(st.lists(st.integers(1, 10), max_size=6))
def test_the_lower_bound_never_exceeds_the_optimum(lengths) -> None:
    assert -(-sum(lengths) // 10) <= lower_bound(lengths, 10) <= optimal_bins(lengths)


def test_the_lower_bound_sees_more_than_the_total() -> None:
    assert lower_bound([6] * 5, 10) == 5  # the total alone says 3
    assert lower_bound([7, 7, 7, 4, 4, 4], 10) == 5  # no 4 fits behind a 7; two 4s share a bin
    assert lower_bound([], 10) == 0
    assert lower_bound([0, 0], 10) == 1


def test_more_bins_are_made_by_dividing_full_ones() -> None:
    assert sorted(map(len, contents(pack([1] * 8, 100, min_bins=4)))) == [2, 2, 2, 2]
    packing = pack([1] * 3, 100, bins_multiple_of=4)
    assert sorted(map(len, contents(packing))) == [0, 1, 1, 1]
    assert packing.lower_bound == 4


def test_units_stay_together() -> None:
    # Without units 6 + 4 and 5 + 5 fill two bins; the pairs (0, 2) and (1, 3) need 11, then 9.
    assert len(pack([6, 5, 5, 4], 11).bins) == 2
    assert contents(pack([6, 5, 5, 4], 11, units=[8, 3, 8, 3])) == [[0, 2], [1, 3]]


def test_zeros_and_nothing() -> None:
    assert contents(pack([0, 0, 0], 4)) == [[0, 1, 2]]
    assert pack([0, 0, 0], 4).metrics()["fill_ratio"] == 0.0
    assert contents(pack([], 4)) == []
    assert pack([], 4, min_bins=3).metrics() == {
        "num_sequences": 0,
        "num_bins": 0,
        "lower_bound": 0,
        "num_tokens": 0,
        "fill_ratio": 0.0,
    }
    assert contents(pack([0, 0, 0], 4, max_sequences_per_bin=2)) == [[0, 1], [2]]


def test_metrics_by_hand() -> None:
    assert pack([6, 4, 5], 10).metrics() == {
        "num_sequences": 3,
        "num_bins": 2,
        "lower_bound": 2,
        "num_tokens": 15,
        "fill_ratio": 0.75,
    }


@pytest.mark.parametrize("container", [tuple, np.array, lambda x: np.array(x, np.uint16)])
def test_the_container_of_the_lengths_does_not_matter(container) -> None:
    lengths = [5, 9, 3, 3, 8, 1]
    assert contents(pack(container(lengths), 10)) == contents(pack(lengths, 10))


def test_a_packing_cannot_be_changed() -> None:
    lengths = np.array([3, 4])
    packing = pack(lengths, 10)
    lengths[0] = 9
    assert packing.lengths.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        packing.bins[0][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        packing.lengths[0] = 1


def test_json_both_ways() -> None:
    packing = pack([5, 9, 3, 3, 8, 1], 10, bins_multiple_of=4)
    again = Packing.from_json(packing.to_json())
    assert contents(again) == contents(packing)
    assert again.lengths.tolist() == packing.lengths.tolist()
    assert again.metrics() == packing.metrics()

    fields = json.loads(packing.to_json())
    with pytest.raises(ValueError, match="schema_version 1, got 2"):
        Packing.from_json(json.dumps({**fields, "schema_version": 2}))
    with pytest.raises(ValueError, match="each of 6 sequences once"):
        Packing.from_json(json.dumps({**fields, "bins": [[0, 0, 1, 2, 3, 4]]}))
    with pytest.raises(ValueError, match="capacity = 10, got 29 tokens"):
        Packing.from_json(json.dumps({**fields, "bins": [[0, 1, 2, 3, 4, 5]]}))
    for name in ("bins", "lengths", "capacity", "lower_bound"):
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ValueError, match=rf"got one with \['{name}'\] missing"):
            Packing.from_json(json.dumps(rest))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 21], "capacity": 20}, "capacity 20, got 21 tokens .* at index 1"),
        ({"lengths": [3, -1], "capacity": 20}, r"got lengths\[1\] = -1"),
        ({"lengths": [3.0, 2.5], "capacity": 20}, "lengths must be integers, got dtype float64"),
        ({"lengths": [[3]], "capacity": 20}, r"one-dimensional, got shape \(1, 1\)"),
        ({"lengths": [True], "capacity": 20}, "integers, got dtype bool"),
        ({"lengths": [3], "capacity": 0}, "capacity must be an integer >= 1, got 0"),
        ({"lengths": [3], "capacity": 8.5}, "capacity must be an integer >= 1, got 8.5"),
        ({"lengths": [3], "capacity": 9, "min_bins": 0}, "min_bins must be an integer >= 1"),
        ({"lengths": [3], "capacity": 9, "algorithm": "best"}, "got 'best'; choose one"),
        ({"lengths": [3], "capacity": 9, "units": [1, 2]}, "one entry per sequence, 1, got 2"),
        (
            {"lengths": [1, 9, 9], "capacity": 10, "units": [0, 7, 7]},
            "got 18 tokens for the unit of 2 sequences that begins at index 1",
        ),
        (
            {"lengths": [1, 1], "capacity": 9, "units": [0, 0], "max_sequences_per_bin": 1},
            "capacity 9 and 1 sequences, got 2 tokens for the unit of 2",
        ),
    ],
)
def test_errors_say_what_was_got(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**arguments)
