"""The fewest bins: against exhaustive search, the full linear program, and on real lengths."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from burnish_packing import lower_bound, pack
from burnish_packing.bounds import lp_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

LENGTHS = Path(__file__).parents[1] / "benchmarks" / "lengths"
SMALL = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def fewest_bins(lengths: list[int], capacity: int, rooms: tuple[int, ...] = ()) -> int:
    """By trying every bin for the first length, then for the others."""
    if not lengths:
        return len(rooms)
    length, *others = lengths
    choices = {(*rooms[:i], r - length, *rooms[i + 1 :]) for i, r in enumerate(rooms)}
    choices = {tuple(sorted(choice)) for choice in choices if min(choice) >= 0}
    choices.add((*rooms, capacity - length))
    return min(fewest_bins(others, capacity, choice) for choice in choices)


def relaxation_over_all_patterns(lengths: list[int], capacity: int) -> float:
    """The whole linear program: every way to fill a bin is a column."""
    distinct = sorted(set(lengths))
    ranges = [range(capacity // w + 1) for w in distinct]
    patterns = [p for p in itertools.product(*ranges) if np.dot(p, distinct) <= capacity]
    result = linprog(
        np.ones(len(patterns)),
        A_ub=-np.array(patterns).T,
        b_ub=[-lengths.count(w) for w in distinct],
    )
    return result.fun


@settings(max_examples=150, deadline=None)
@given(SMALL)
def test_a_few_sequences_are_packed_into_the_fewest_bins(lengths) -> None:
    packing = pack(lengths, 12, algorithm="optimal")
    fewest = fewest_bins(sorted(lengths, reverse=True), 12)
    assert lower_bound(lengths, 12) <= packing.lower_bound <= fewest == len(packing.bins)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([3, 4, 5, 7, 9, 11, 15, 20]), min_size=1, max_size=30))
def test_the_bound_is_the_linear_programs(lengths) -> None:
    value = relaxation_over_all_patterns(lengths, 20)
    bound = lp_bound(lengths, 20)
    assert value - 1e-6 <= bound < max(value + 1, lower_bound(lengths, 20) + 1e-6)
    assert bound >= lower_bound(lengths, 20)
    assert lp_bound([0, *lengths], 20) == bound


def test_bounds_by_hand() -> None:
    assert (lower_bound([4] * 5, 10), lp_bound([4] * 5, 10)) == (3, 3)  # two share a bin: 2.5
    lengths = [6, 7, 8, 8, 10]  # 39 tokens, no three of them in a bin: 2.5
    assert (lower_bound(lengths, 20), lp_bound(lengths, 20)) == (2, 3)
    assert lp_bound([7, 7, 7, 4, 4, 4], 10) == 5
    assert (lp_bound([], 10), lp_bound([0, 0], 10), lp_bound([10], 10)) == (0, 1, 1)


def test_the_best_packing_may_need_one_bin_more_than_the_linear_program() -> None:
    # 259 of 264 tokens: fractions of 44 * 3, 33 * 4 and 12 * 11 hold them in 1.96 bins, but no two
    # bins do.
    lengths = [44] * 2 + [33] * 3 + [12] * 6
    packing = pack(lengths, 132, algorithm="optimal")
    assert (packing.lower_bound, len(packing.bins)) == (2, 3)
    assert fewest_bins(lengths, 132) == 3
    assert lp_bound(lengths, 132) == 2


@pytest.mark.parametrize("call", [lower_bound, lp_bound])
def test_bounds_refuse_what_does_not_fit(call) -> None:
    with pytest.raises(ValueError, match=r"fit capacity 20, got lengths\[1\] = 21"):
        call([3, 21], 20)
    with pytest.raises(ValueError, match="capacity must be an integer >= 1, got 0"):
        call([3], 0)


def test_the_linear_program_refuses_what_it_cannot_table() -> None:
    with pytest.raises(ValueError, match="capacity at most 16777216, got 1 times 16777217; divide"):
        lp_bound([1], (1 << 24) + 1)
    lengths = np.random.default_rng(0).integers(2**20, 2**22, 300)
    with pytest.raises(ValueError, match=r"must be at most 1073741824 .* got 300 times 16777216;"):
        lp_bound(lengths, 1 << 24)
    assert lp_bound([3 << 40] * 7, 10 << 40) == 3  # in multiples of their common divisor


@pytest.mark.parametrize("capacity", [2048, 4096, 8192])
@pytest.mark.parametrize("name", sorted(path.name for path in LENGTHS.glob("*.qwen3.total.npy")))
def test_real_lengths_are_packed_within_one_bin_of_the_linear_program(name, capacity) -> None:
    lengths = np.load(LENGTHS / name)
    packing = pack(lengths, capacity, algorithm="optimal", too_long="truncate")
    # The bound is at most the linear program's, rounded up, so that this is the stronger claim.
    assert len(packing.bins) - packing.lower_bound <= 1
    assert packing.lower_bound >= -(-int(packing.lengths.sum()) // capacity)
    assert max(packing.lengths[b].sum() for b in packing.bins) <= capacity
    again = pack(lengths, capacity, algorithm="optimal", too_long="truncate")
    assert all(map(np.array_equal, packing.bins, again.bins))


def synthetic(name: str, num_sequences: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = {
        "lognormal": rng.lognormal(6, 1, num_sequences),
        "uniform": rng.uniform(1, 8192, num_sequences),
        "pareto": 200 * (1 + rng.pareto(1.5, num_sequences)),
    }
    return values[name].astype(np.int64).clip(1, 8192)


@pytest.mark.parametrize("name", ["lognormal", "uniform", "pareto"])
def test_ten_thousand_skewed_lengths_are_within_a_thousandth(name) -> None:
    packing = pack(synthetic(name, 10_000), 8192, algorithm="optimal")
    assert len(packing.bins) <= packing.lower_bound * 1.001


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lognormal", "uniform", "pareto"])
def test_a_million_skewed_lengths_are_within_a_thousandth(name) -> None:
    for num_sequences in (100_000, 1_000_000):
        packing = pack(synthetic(name, num_sequences), 8192, algorithm="optimal")
        assert len(packing.bins) <= packing.lower_bound * 1.001


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=50),
    st.integers(2, 6),
    st.integers(1, 2),
)
def test_with_a_limit_on_sequences_it_is_no_worse_than_best_fit(lengths, seats, size) -> None:
    arguments = {"max_sequences_per_bin": seats, "units": np.arange(len(lengths)) // size}
    packing = pack(lengths, 60, algorithm="optimal", **arguments)
    assert packing.lower_bound <= len(packing.bins) <= len(pack(lengths, 60, **arguments).bins)
    assert all(len(b) <= seats for b in packing.bins)


def test_the_linear_programs_patterns_can_beat_every_placing_rule() -> None:
    lengths = [18, 22, 22, 31, 33, 37, 38, 39, 42, 51, 53]  # 386 tokens
    for algorithm in ("best_fit_decreasing", "modified_first_fit_decreasing", "balanced"):
        assert len(pack(lengths, 100, algorithm=algorithm).bins) == 5
    packing = pack(lengths, 100, algorithm="optimal")
    assert (packing.lower_bound, len(packing.bins)) == (4, 4)
    # Beside a pair that fills a bin, and sequences of no tokens.
    packing = pack([0, *lengths, 60, 40, 0], 100, algorithm="optimal")
    assert (packing.lower_bound, len(packing.bins)) == (5, 5)
    assert sorted(np.concatenate(packing.bins).tolist()) == list(range(15))
    assert max(packing.lengths[b].sum() for b in packing.bins) <= 100


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0, *range(18, 60)]), min_size=8, max_size=40))
def test_it_stays_within_one_bin_of_the_linear_program(lengths) -> None:
    packing = pack(lengths, 100, algorithm="optimal")
    assert 0 <= len(packing.bins) - max(packing.lower_bound, lp_bound(lengths, 100)) <= 1
    assert sorted(np.concatenate(packing.bins).tolist()) == list(range(len(lengths)))
    assert max(packing.lengths[b].sum() for b in packing.bins) <= 100


def test_without_scipy_the_error_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "burnish-packing\[optimal\]"'):
        lp_bound([4] * 5, 10)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "burnish-packing\[optimal\]"'):
        pack([18, 22, 22, 31, 33, 37, 38, 39, 42, 51, 53], 100, algorithm="optimal")
    assert len(pack([5] * 5, 10, algorithm="optimal").bins) == 3  # proven by the other bound
