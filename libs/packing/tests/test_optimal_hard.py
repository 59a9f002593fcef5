"""Lengths of which few fit a bin and few are equal: the bound is reached, in bounded work."""

import time

import numpy as np
import pytest
from burnish_packing import Packing, lower_bound, pack
from burnish_packing._column_generation import solve_relaxation
from burnish_packing.bounds import lp_bound, patterns_of
from burnish_packing.optimal import _Grouped
from hypothesis import given, settings
from hypothesis import strategies as st

PRIMES = [n for n in range(2_000, 4_000) if all(n % d for d in range(2, 64))]


def drawn(seed: int, shortest: int, end: int, num: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(shortest, end, num)


def packed(lengths, capacity: int) -> Packing:
    packing = pack(lengths, capacity, algorithm="optimal")
    assert sorted(np.concatenate(packing.bins).tolist()) == list(range(len(lengths)))
    assert max(packing.lengths[b].sum() for b in packing.bins) <= capacity
    return packing


@pytest.mark.parametrize(
    ("lengths", "capacity", "num_bins"),
    [
        (drawn(0, 3_000, 4_500, 300), 10_000, 130),
        (drawn(1, 3_000, 4_500, 300), 10_000, 130),
        (drawn(2, 3_000, 4_500, 300), 10_000, 129),
        (PRIMES, 8_191, 93),
        (drawn(1, 2_048, 4_300, 300), 8_192, 122),
        (drawn(0, 1_500, 4_000, 300), 8_192, 104),
        (drawn(0, 20_000, 35_001, 200), 100_000, 57),  # as Scholl, Klein and Juergens drew them
    ],
)
def test_diving_reaches_the_bound(lengths, capacity, num_bins) -> None:
    packing = packed(lengths, capacity)
    assert (packing.lower_bound, len(packing.bins)) == (num_bins, num_bins)
    assert len(pack(lengths, capacity).bins) > num_bins + 2  # best-fit-decreasing is far from it


def test_it_is_the_same_again() -> None:
    lengths = drawn(0, 2_500, 5_000, 300)
    first, again = packed(lengths, 10_000), packed(lengths, 10_000)
    assert all(map(np.array_equal, first.bins, again.bins))


def test_counting_proves_that_two_fit_a_bin_at_any_capacity() -> None:
    for capacity in (131_072, 2**24, 2**44):
        lengths = drawn(0, capacity // 3 + 1, capacity // 2, 260)
        assert lower_bound(lengths, capacity) == 130
        packing = packed(lengths, capacity)
        assert (packing.lower_bound, len(packing.bins)) == (130, 130)


def test_the_lower_bound_counts_what_fits_a_bin() -> None:
    assert lower_bound([700] * 10**6, 8_192) == 90_910  # eleven each; the tokens alone say 85,450
    assert lower_bound([34] * 5, 100) == 3  # 170 tokens, but two a bin
    assert lower_bound([50] * 3 + [34, 33, 33], 100) == 3  # 50 and 33 count as themselves
    assert lower_bound([2**52, 2**51 + 1], 2**52 + 2**51) == 2  # exact beyond float64's integers
    start = time.perf_counter()
    lower_bound(np.arange(1_000_000), 2**30)
    assert time.perf_counter() - start < 5


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 45))
def test_the_lower_bound_is_one(lengths, capacity) -> None:
    assert lower_bound(lengths, capacity) <= lp_bound(lengths, capacity)
    assert lower_bound(lengths, capacity) <= len(pack(lengths, capacity).bins)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_units_of_several_sequences_are_packed_too(seed, size) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(60, 200, 24 * size)
    packing = pack(lengths, 1_000 * size, algorithm="optimal", units=np.arange(24 * size) // size)
    assert sorted(np.concatenate(packing.bins).tolist()) == list(range(24 * size))
    assert packing.lower_bound <= len(packing.bins) <= packing.lower_bound + 1
    for b in packing.bins:
        assert packing.lengths[b].sum() <= 1_000 * size
        assert set(np.bincount(b // size)) <= {0, size}


def test_a_grid_gives_bins_that_fit_and_a_bound_that_holds(monkeypatch) -> None:
    lengths = drawn(0, 2_500, 5_000, 100)
    exact = packed(lengths, 10_000)
    monkeypatch.setattr("burnish_packing.optimal._MAX_CELLS", 20_000)  # multiples of 32 or 64
    packing = packed(lengths, 10_000)
    assert packing.lower_bound <= exact.lower_bound
    assert len(packing.bins) - packing.lower_bound <= 3
    packed([0, 10_000, 9_999, 1, 2, *lengths], 10_000)
    packed(drawn(0, 2**42, 2**44, 40), 2**46)


def test_prices_between_knots_bound_a_little_less() -> None:
    lengths, counts = np.unique(drawn(0, 2_500, 5_000, 300), return_counts=True)
    patterns = patterns_of(lengths, counts, 10_000)
    exact = solve_relaxation(lengths, counts, 10_000, patterns=patterns)
    rough = solve_relaxation(lengths, counts, 10_000, patterns=patterns, max_rows=60)
    assert exact.is_solved
    assert exact.bound - 1 <= rough.bound <= exact.bound


def test_work_is_limited(monkeypatch) -> None:
    monkeypatch.setattr("burnish_packing.optimal._MAX_WORK", 1)
    monkeypatch.setattr("burnish_packing.optimal._MAX_DIVING", 1)
    lengths = drawn(0, 3_000, 4_500, 300)
    packing = packed(lengths, 10_000)  # from a single program
    assert packing.lower_bound <= 130 <= len(packing.bins) <= len(pack(lengths, 10_000).bins)


def test_of_equal_stand_ins_the_longest_are_placed_first() -> None:
    classes = [(9, 1, 2), (8, 1, 3), (4, 1, 1)]
    grouped = _Grouped(classes, np.array([1, 1, 0]), 10)
    assert grouped.rest(np.array([1, 2])).tolist() == [0, 2, 1]
    steps, num_bins = grouped.placing([{1: 1}, {1: 1}, {1: 1}], np.array([1, 2]))
    assert steps[:3] == [(0, 1, 0, 1), (0, 1, 1, 1), (1, 1, 2, 1)]
    assert num_bins == 3 + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shortest", "end", "capacity", "num", "most_apart"),
    [
        *[(3_000, 4_500, 10_000, num, 1) for num in (1_000, 5_000)],
        *[(2_500, 5_000, 10_000, num, 1) for num in (1_000, 5_000)],
        *[(2_048, 4_300, 8_192, num, 1) for num in (1_200, 2_000, 3_000)],
        (1_700, 4_500, 8_192, 20_000, 5),
        (500, 6_000, 8_192, 20_000, 5),
        (20_000, 60_000, 131_072, 2_000, 1),
        (35_000, 60_000, 131_072, 20_000, 6),
    ],
)
def test_thousands_of_lengths_end_near_the_bound(shortest, end, capacity, num, most_apart) -> None:
    lengths = drawn(0, shortest, end, num)
    start = time.perf_counter()
    packing = packed(lengths, capacity)
    took_s = time.perf_counter() - start
    assert len(packing.bins) - packing.lower_bound <= most_apart
    assert took_s < 60  # 10 to 20 s where nothing else runs
