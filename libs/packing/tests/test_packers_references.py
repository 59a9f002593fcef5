"""The placing rules against the textbook's loops: one sequence at a time, over a list of rooms."""

import subprocess
import sys

import numpy as np
import pytest
from burnish_packing import Packing, pack
from burnish_packing._heuristics import first_fit as first_fit_of_units
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(0, 24), max_size=60)
# Few distinct lengths make runs; 6, 8, 12 and 24 are the borders of the classes of size.
RUNS = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 16, 24]), max_size=60)


def contents(packing: Packing) -> list[list[int]]:
    """Lengths in each bin, descending."""
    return [sorted(packing.lengths[b].tolist(), reverse=True) for b in packing.bins]


def first_fit(lengths: list[int], capacity: int, seats: int = 10**9) -> list[list[int]]:
    bins: list[list[int]] = []
    for length in lengths:
        for content in bins:
            if sum(content) + length <= capacity and len(content) < seats:
                content.append(length)
                break
        else:
            bins.append([length])
    return bins


def best_fit(lengths: list[int], capacity: int, seats: int = 10**9) -> list[list[int]]:
    bins: list[list[int]] = []
    for length in lengths:
        fits = [b for b in bins if sum(b) + length <= capacity and len(b) < seats]
        if fits:
            max(fits, key=sum).append(length)
        else:
            bins.append([length])
    return bins


def modified_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Johnson and Garey 1985, step by step."""
    descending = sorted(lengths, reverse=True)
    bins = [[length] for length in descending if length > capacity / 2]
    medium = [w for w in descending if capacity / 3 < w <= capacity / 2]
    small = [w for w in descending if capacity / 6 < w <= capacity / 3]
    tiny = [w for w in descending if w <= capacity / 6]
    without_medium = []
    for content in bins:
        room = capacity - sum(content)
        if medium and medium[-1] <= room:
            largest = max(w for w in medium if w <= room)
            content.append(largest)
            medium.remove(largest)
        else:
            without_medium.append(content)
    for content in reversed(without_medium):
        room = capacity - sum(content)
        if len(small) >= 2 and small[-1] + small[-2] <= room:
            smallest = small.pop()
            largest = max(w for w in small if w <= room - smallest)
            small.remove(largest)
            content += [smallest, largest]
    rest = medium + small + tiny
    for content in bins:
        while rest and rest[-1] <= capacity - sum(content):
            largest = max(w for w in rest if w <= capacity - sum(content))
            content.append(largest)
            rest.remove(largest)
    return bins + first_fit(rest, capacity)


@given(st.one_of(LENGTHS, RUNS), st.integers(1, 5) | st.just(10**9))
def test_first_fit_decreasing_is_the_textbooks(lengths, seats) -> None:
    expected = first_fit(sorted(lengths, reverse=True), 24, seats)
    packing = pack(
        lengths, 24, algorithm="first_fit_decreasing", max_sequences_per_bin=min(seats, 10**9)
    )
    assert contents(packing) == expected


@given(st.one_of(LENGTHS, RUNS))
def test_best_fit_decreasing_is_the_textbooks(lengths) -> None:
    # Which of several bins with equal room is taken may differ, and with it only their order.
    expected = best_fit(sorted(lengths, reverse=True), 24)
    assert sorted(map(sum, contents(pack(lengths, 24)))) == sorted(map(sum, expected))


@settings(max_examples=400)
@given(st.one_of(LENGTHS, RUNS), st.sampled_from([24, 25, 29]))
def test_modified_first_fit_decreasing_is_the_textbooks(lengths, capacity) -> None:
    packing = pack(lengths, capacity, algorithm="modified_first_fit_decreasing")
    expected = modified_first_fit_decreasing(lengths, capacity)
    assert contents(packing) == [sorted(content, reverse=True) for content in expected]


@given(LENGTHS, st.integers(0, 9), st.integers(1, 5) | st.just(10**9))
def test_first_fit_shuffle_is_first_fit_in_a_drawn_order(lengths, seed, seats) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths))
    expected = first_fit([lengths[i] for i in order], 24, seats)
    packing = pack(
        lengths, 24, algorithm="first_fit_shuffle", seed=seed, max_sequences_per_bin=seats
    )
    assert contents(packing) == [sorted(content, reverse=True) for content in expected]


def test_many_runs_of_bins_are_still_first_fit() -> None:
    lengths = np.random.default_rng(5).integers(1, 5000, 3000).tolist()
    packing = pack(lengths, 8192, algorithm="first_fit_decreasing")
    assert contents(packing) == first_fit(sorted(lengths, reverse=True), 8192)
    packing = pack(lengths, 8192, algorithm="modified_first_fit_decreasing")
    expected = modified_first_fit_decreasing(lengths, 8192)
    assert contents(packing) == [sorted(content, reverse=True) for content in expected]


def test_modified_first_fit_decreasing_beats_first_fit_where_11_bins_become_10() -> None:
    # The worst case of first-fit-decreasing (Johnson 1973), with 9 bins in the best packing:
    # six of 51 + 26 + 23 and three of 27 + 27 + 23 + 23.
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    num_bins = {
        algorithm: len(pack(lengths, 100, algorithm=algorithm).bins)
        for algorithm in ("first_fit_decreasing", "modified_first_fit_decreasing", "optimal")
    }
    assert num_bins == {
        "first_fit_decreasing": 11,
        "modified_first_fit_decreasing": 10,
        "optimal": 9,
    }


def test_small_sequences_go_in_pairs_backward() -> None:
    # The last large bin (room 49) takes the smallest small, 20, and the largest beside it, 29; the
    # one before (room 40) cannot hold 21 + 22, and takes 22 in the forward pass.
    packing = pack([60, 51, 29, 22, 21, 20], 100, algorithm="modified_first_fit_decreasing")
    assert contents(packing) == [[60, 22], [51, 29, 20], [21]]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([13, 8, 6, 5], [[13, 6, 5], [8]]),  # 8 is small: as a medium one it would go beside 13
        ([13, 7, 6, 5, 4], [[13, 6, 5], [7, 4]]),  # 4 is tiny: as a small one it would, with 7
        ([12, 12, 5, 5], [[12, 12], [5, 5]]),  # 12 is medium: large ones would have a bin each
    ],
)
def test_a_third_a_sixth_and_a_half_belong_to_the_smaller_class(lengths, expected) -> None:
    packing = pack(lengths, 24, algorithm="modified_first_fit_decreasing")
    assert contents(packing) == expected


def test_a_bin_that_had_too_few_seats_for_one_unit_is_open_to_the_next() -> None:
    # Units of 2, 2 and 1 sequences, 3 to a bin: the second finds no seats in the first bin.
    bins = first_fit_of_units(np.array([2, 2, 1]), np.array([2, 2, 1]), 10, 3)
    assert bins.tolist() == [0, 1, 0]


def test_next_fit_keeps_the_order_of_split_sequences() -> None:
    packing = pack([15, 5, 5], 10, algorithm="next_fit", too_long="split")
    segments = [packing.segments(k).tolist() for k in range(len(packing.bins))]
    assert segments == [[[0, 0, 10]], [[0, 10, 15], [1, 0, 5]], [[2, 0, 5]]]
    again = Packing.from_json(packing.to_json())
    assert [b.tolist() for b in again.bins] == [b.tolist() for b in packing.bins]


def test_next_fit_keeps_the_order_where_bins_are_divided() -> None:
    packing = pack([5, 5, 5, 5], 10, algorithm="next_fit", min_bins=4)
    assert [b.tolist() for b in packing.bins] == [[0], [1], [2], [3]]
    packing = pack([1, 1, 5, 15], 10, algorithm="next_fit", too_long="split", bins_multiple_of=4)
    assert [b.tolist() for b in packing.bins] == [[0, 1], [2], [3], [4]]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=40),
    st.sampled_from(["split", "truncate", "skip"]),
    st.integers(1, 12),
    st.integers(1, 5) | st.none(),
)
def test_next_fit_keeps_the_order(lengths, too_long, min_bins, seats) -> None:
    packing = pack(
        lengths,
        24,
        algorithm="next_fit",
        too_long=too_long,
        min_bins=min_bins,
        max_sequences_per_bin=seats,
    )
    held = [segment for k in range(len(packing.bins)) for segment in packing.segments(k).tolist()]
    assert held == sorted(held)
    again = Packing.from_json(packing.to_json())
    assert [b.tolist() for b in again.bins] == [b.tolist() for b in packing.bins]


def test_a_shuffle_is_the_same_in_another_process() -> None:
    code = (
        "import numpy as np; from burnish_packing import pack;"
        "np.random.seed(int(np.random.randint(99)));"
        "lengths = np.arange(1, 400) % 97;"
        "packing = pack(lengths, 100, algorithm='first_fit_shuffle', seed=3);"
        "print([b.tolist() for b in packing.bins])"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    lengths = np.arange(1, 400) % 97
    here = pack(lengths, 100, algorithm="first_fit_shuffle", seed=3)
    other = pack(lengths, 100, algorithm="first_fit_shuffle", seed=4)
    assert first.stdout == second.stdout
    assert first.stdout.strip() == str([b.tolist() for b in here.bins])
    assert first.stdout.strip() != str([b.tolist() for b in other.bins])


def test_a_shuffle_leaves_the_global_random_state_alone() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    pack([3, 4, 5], 9, algorithm="first_fit_shuffle", seed=0)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("seed", [None, -1, True, 1.5])
def test_a_shuffle_needs_a_seed(seed) -> None:
    with pytest.raises(ValueError, match=f"seed must be an integer >= 0 .* got {seed}; pass one"):
        pack([3, 4], 9, algorithm="first_fit_shuffle", seed=seed)


def test_multifit_beats_longest_first_where_it_should() -> None:
    # Longest first to the emptiest: 5, 5, 4, then 4 to the last, 3 + 3 to the others: 8, 8, 8, and
    # the last 3 makes 11. In two fives with fours and three threes, the fullest holds 9.
    packing = pack([5, 5, 4, 4, 3, 3, 3], 99, algorithm="balanced", min_bins=3)
    assert sorted(contents(packing)) == [[3, 3, 3], [5, 4], [5, 4]]


def test_longest_first_beats_multifit_where_it_should() -> None:
    # Best-fit-decreasing at capacity 15 opens a third bin after 7 + 7, and at 16 makes 7 + 7 + 2
    # and 6 + 5 + 3; longest first to the emptiest makes 7 + 5 + 3 and 7 + 6 + 2.
    packing = pack([7, 7, 6, 5, 3, 2], 99, algorithm="balanced", min_bins=2)
    assert sorted(contents(packing)) == [[7, 5, 3], [7, 6, 2]]


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_balanced_is_never_worse_than_longest_first(lengths, min_bins, multiple) -> None:
    fewest = len(pack(lengths, 24, min_bins=min_bins, bins_multiple_of=multiple).bins)
    packing = pack(lengths, 24, algorithm="balanced", min_bins=min_bins, bins_multiple_of=multiple)
    assert len(packing.bins) <= fewest
    sums = [0] * len(packing.bins)
    for length in sorted(lengths, reverse=True):
        sums[sums.index(min(sums))] += length
    fullest = max(map(sum, contents(packing)))
    assert fullest <= min(max(sums), 24) or max(sums) > 24
    assert fullest >= max(*lengths, -(-sum(lengths) // len(packing.bins)), 0)
