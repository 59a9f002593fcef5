"""What many bins without seats, many distinct lengths and long divisions must not slow down.

The results are those of plain loops over all bins. The large cases below took minutes each when
bins without seats were looked at again for every unit; none has a time limit of its own.
"""

import numpy as np
import pytest
from burnish_packing import Packing, pack
from burnish_packing._heuristics import (
    best_fit_decreasing,
    classes_of,
    first_fit,
    first_fit_decreasing,
    longest_to_emptiest,
    multifit,
    place_units,
)
from burnish_packing._modified_first_fit import modified_first_fit_decreasing
from burnish_packing.balance import spread
from hypothesis import given, settings
from hypothesis import strategies as st

CAPACITY = 24
Unit = tuple[int, int]  # tokens, sequences
# More than eight sizes, so that trees with holes are met as well.
UNITS = st.lists(st.tuples(st.integers(0, CAPACITY), st.integers(1, 12)), min_size=1, max_size=50)
FEW_UNITS = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 14]), st.integers(1, 3)),
    min_size=1,
    max_size=60,
)
CASES = st.one_of(UNITS, FEW_UNITS), st.integers(0, 20)


def decreasing(units: list[Unit]) -> list[Unit]:
    return sorted(units, reverse=True)


def fits(content: list[Unit], unit: Unit, capacity: int, seats: int) -> bool:
    together = [*content, unit]
    return sum(w for w, _ in together) <= capacity and sum(n for _, n in together) <= seats


def any_fit(units, capacity, seats, bins=(), choose=lambda fitting: fitting[0]):
    """Each unit into one of the bins that it fits, by default the first, else into a new one."""
    bins = list(bins)
    for unit in units:
        fitting = [content for content in bins if fits(content, unit, capacity, seats)]
        if fitting:
            choose(fitting).append(unit)
        else:
            bins.append([unit])
    return bins


def modified(units: list[Unit], capacity: int, seats: int) -> list[list[Unit]]:
    """Johnson and Garey's steps with a second limit: a unit fits where its sequences do too."""
    rest = decreasing(units)
    bins = [[unit] for unit in rest if 2 * unit[0] > capacity]
    rest = rest[len(bins) :]

    def add_largest(content: list[Unit], among: list[Unit]) -> bool:
        for unit in among:
            if fits(content, unit, capacity, seats):
                content.append(unit)
                rest.remove(unit)
                return True
        return False

    without = []
    for content in bins:
        if not add_largest(content, [u for u in rest if 3 * u[0] > capacity]):
            without.append(content)
    for content in reversed(without):
        small = [u for u in rest if capacity < 6 * u[0] and 3 * u[0] <= capacity]
        if len(small) < 2:
            continue
        with_smallest = [*content, small[-1]]
        if any(fits(with_smallest, u, capacity, seats) for u in small[:-1]):
            content.append(small[-1])
            rest.remove(small[-1])
            add_largest(content, small[:-1])
    for content in bins:
        while add_largest(content, rest):
            pass
    return any_fit(rest, capacity, seats, bins)


def arrays(units: list[Unit], extra_seats: int):
    tokens, sizes = np.array(units, np.int64).T
    return tokens, sizes, int(sizes.max()) + extra_seats


def contents(labels, tokens, sizes) -> list[list[Unit]]:
    bins: list[list[Unit]] = [[] for _ in range(labels.max() + 1)]
    for label, *unit in zip(labels.tolist(), tokens.tolist(), sizes.tolist(), strict=True):
        bins[label].append(tuple(unit))
    return [decreasing(content) for content in bins]


@settings(max_examples=300)
@given(*CASES)
def test_first_fit_with_seats_is_the_plain_loop(units, extra_seats) -> None:
    tokens, sizes, seats = arrays(units, extra_seats)
    found = contents(first_fit(tokens, sizes, CAPACITY, seats), tokens, sizes)
    assert found == [decreasing(b) for b in any_fit(units, CAPACITY, seats)]


@settings(max_examples=300)
@given(*CASES)
def test_first_fit_decreasing_with_seats_is_the_plain_loop(units, extra_seats) -> None:
    tokens, sizes, seats = arrays(units, extra_seats)
    order, classes = classes_of(tokens, sizes)
    steps, num_bins = first_fit_decreasing(classes, CAPACITY, seats)
    found = contents(place_units(order, steps), tokens, sizes)
    expected = any_fit(decreasing(units), CAPACITY, seats)
    assert found == expected
    assert num_bins == len(expected)


@settings(max_examples=300)
@given(*CASES)
def test_best_fit_decreasing_with_seats_takes_the_fullest_bin(units, extra_seats) -> None:
    # Among bins of equal room the choice is free: each choice is checked, not the whole.
    tokens, sizes, seats = arrays(units, extra_seats)
    order, classes = classes_of(tokens, sizes)
    labels = place_units(order, best_fit_decreasing(classes, CAPACITY, seats)[0])
    bins: list[list[Unit]] = [[] for _ in range(labels.max() + 1)]
    for unit in order.tolist():
        this = (int(tokens[unit]), int(sizes[unit]))
        chosen = bins[labels[unit]]
        fitting = [b for b in bins if b and fits(b, this, CAPACITY, seats)]
        if chosen:
            assert any(chosen is content for content in fitting)
            assert sum(w for w, _ in chosen) == max(sum(w for w, _ in b) for b in fitting)
        else:
            assert not fitting
        chosen.append(this)


@settings(max_examples=500)
@given(*CASES)
def test_modified_first_fit_decreasing_with_seats_is_the_plain_loop(units, extra_seats) -> None:
    tokens, sizes, seats = arrays(units, extra_seats)
    order, classes = classes_of(tokens, sizes)
    steps, num_bins = modified_first_fit_decreasing(classes, CAPACITY, seats)
    found = contents(place_units(order, steps), tokens, sizes)
    expected = modified(units, CAPACITY, seats)
    assert found == [decreasing(content) for content in expected]
    assert num_bins == len(expected)


@settings(max_examples=300)
@given(*CASES, st.integers(1, 30))
def test_longest_to_emptiest_with_seats_is_the_plain_loop(units, extra_seats, num_bins) -> None:
    tokens, sizes, seats = arrays(units, extra_seats)
    found = longest_to_emptiest(tokens, sizes, num_bins, CAPACITY, seats)
    held = [(0, 0, k) for k in range(num_bins)]
    expected = np.full(len(tokens), -1)
    for unit in np.argsort(-tokens, kind="stable").tolist():
        with_seats = [entry for entry in held if entry[1] + sizes[unit] <= seats]
        if not with_seats or min(with_seats)[0] + tokens[unit] > CAPACITY:
            assert found is None
            return
        used, count, k = min(with_seats)
        held[k] = (used + tokens[unit], count + sizes[unit], k)
        expected[unit] = k
    assert found is not None
    np.testing.assert_array_equal(found, expected)


@given(
    st.lists(st.sampled_from([0, 0, 0, 1, 2, 5, 40]), max_size=40),
    st.lists(st.integers(0, 5), min_size=40, max_size=40),
    st.integers(1, 50),
)
def test_bins_are_divided_where_their_halves_are_closest(costs, labels, num_bins) -> None:
    costs_array = np.array(costs, np.int64)
    given_bins = [[i for i in range(len(costs)) if labels[i] == k] for k in range(6)]
    expected = [list(b) for b in given_bins]
    while len(expected) < num_bins and any(len(b) > 1 for b in expected):
        several = [i for i, b in enumerate(expected) if len(b) > 1]
        widest = max(several, key=lambda i: (sum(costs[j] for j in expected[i]), -i))
        members = expected[widest]
        total = sum(costs[j] for j in members)
        cuts = range(1, len(members))
        cut = min(cuts, key=lambda c: abs(2 * sum(costs[j] for j in members[:c]) - total))
        expected[widest] = members[:cut]
        expected.append(members[cut:])
    expected += [[]] * (num_bins - len(expected))
    found = spread([np.array(b, np.int64) for b in given_bins], num_bins, costs_array)
    assert [b.tolist() for b in found] == expected


def test_a_search_for_few_bins_ends_as_soon_as_there_are_more() -> None:
    classes = [(7, 1, 5)]
    assert best_fit_decreasing(classes, 10, 9, max_bins=5)[1] == 5
    assert best_fit_decreasing(classes, 10, 9, max_bins=4)[1] > 4
    assert multifit(classes, 4, 10, 9) is None


def test_the_bisection_comes_close_to_the_fullest_bin_there_must_be() -> None:
    lengths = np.random.default_rng(0).integers(1, 10**6, 3_000)
    _, classes = classes_of(lengths, np.ones_like(lengths))
    placing = multifit(classes, 30, 10**9, 3_000)
    assert placing is not None
    order, _ = classes_of(lengths, np.ones_like(lengths))
    held = np.bincount(place_units(order, placing[0]), weights=lengths)
    assert len(held) <= 30
    assert held.max() <= lengths.sum() / 30 * (1 + 2**-13)


ALGORITHMS = (
    "best_fit_decreasing",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "balanced",
    "first_fit_shuffle",
)


def check(packing: Packing, num_sequences: int, seats: int) -> None:
    everything = np.sort(np.concatenate(packing.bins))
    np.testing.assert_array_equal(everything, np.arange(num_sequences))
    assert max(len(b) for b in packing.bins) <= seats
    assert max(int(packing.lengths[b].sum()) for b in packing.bins) <= packing.capacity


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_bins_with_room_and_too_few_seats(algorithm) -> None:
    lengths = np.random.default_rng(0).integers(1, 10**6, 20_000)
    pairs = np.arange(20_000) // 2
    options = {"units": pairs, "max_sequences_per_bin": 3, "seed": 0}
    packing = pack(lengths, 10**7, algorithm=algorithm, **options)
    check(packing, 20_000, 3)
    assert len(packing.bins) == 10_000  # no two pairs share three seats


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_distinct_lengths(algorithm) -> None:
    lengths = np.random.default_rng(0).choice(10**9, 30_000, replace=False) + 1
    packing = pack(lengths, 10**9, algorithm=algorithm, seed=0)
    check(packing, 30_000, 30_000)
    assert len(packing.bins) <= 1.03 * packing.lower_bound


def test_many_tiny_lengths_under_a_large_one() -> None:
    lengths = np.r_[10**9 // 2 + 1, np.arange(1, 5_001)]
    packing = pack(lengths, 10**9, algorithm="modified_first_fit_decreasing")
    assert len(packing.bins) == 1


def test_a_bin_of_very_many_is_divided() -> None:
    lengths = np.r_[np.zeros(50_000, np.int64), 2 ** np.arange(30)]
    packing = pack(lengths, 2**30, min_bins=50_000)
    check(packing, 50_030, 50_030)
    assert len(packing.bins) == 50_000
    assert all(len(b) for b in packing.bins)
