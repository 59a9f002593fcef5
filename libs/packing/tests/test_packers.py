"""Packings: literal cases, the naive algorithms, rules that hold for all inputs, clear errors."""

import numpy as np
import pytest
import torch
from burnish_packing import Packing, lower_bound, pack
from hypothesis import given, settings
from hypothesis import strategies as st

ALGORITHMS = [
    "best_fit_decreasing",
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "optimal",
    "balanced",
    "next_fit",
    "first_fit_shuffle",
]
LENGTHS = st.lists(st.integers(0, 20), max_size=60)


def contents(packing: Packing) -> list[list[int]]:
    return [indices.tolist() for indices in packing.bins]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sequences_that_fill_more_than_half_get_a_bin_each(algorithm) -> None:
    packing = pack([7] * 8, 8, algorithm=algorithm, seed=0)
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


@settings(max_examples=400, deadline=None)
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
        seed=0,
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
        "num_skipped": 0,
        "num_truncated": 0,
        "num_split": 0,
        "num_lost_tokens": 0,
    }
    assert contents(pack([0, 0, 0], 4, max_sequences_per_bin=2)) == [[0, 1], [2]]


def test_metrics_by_hand() -> None:
    assert pack([6, 4, 5], 10).metrics() == {
        "num_sequences": 3,
        "num_bins": 2,
        "lower_bound": 2,
        "num_tokens": 15,
        "fill_ratio": 0.75,
        "num_skipped": 0,
        "num_truncated": 0,
        "num_split": 0,
        "num_lost_tokens": 0,
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


@pytest.mark.parametrize("too_long", ["skip", "truncate", "split"])
def test_no_array_of_a_packing_can_be_made_writable(too_long) -> None:
    packing = pack([5, 9, 3, 23, 8, 1], 10, too_long=too_long)
    for one in (packing, Packing.from_json(packing.to_json())):
        names = ("lengths", "piece_sequences", "piece_starts", "skipped", "truncated")
        for array in (*(getattr(one, name) for name in names), *one.bins):
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                array.flags.writeable = True


def test_what_is_too_long_is_skipped() -> None:
    packing = pack([3, 21, 20, 22], 20, too_long="skip")
    assert contents(packing) == [[2], [0]]
    assert packing.skipped.tolist() == [1, 3]
    assert packing.num_lost_tokens == 43
    assert packing.metrics() == {
        "num_sequences": 4,
        "num_bins": 2,
        "lower_bound": 2,
        "num_tokens": 23,
        "fill_ratio": 23 / 40,
        "num_skipped": 2,
        "num_truncated": 0,
        "num_split": 0,
        "num_lost_tokens": 43,
    }
    assert contents(pack([21, 22], 20, too_long="skip", min_bins=2)) == []


def test_what_is_too_long_is_truncated() -> None:
    packing = pack([3, 21, 17], 20, too_long="truncate")
    assert contents(packing) == [[1], [0, 2]]
    assert packing.lengths.tolist() == [3, 20, 17]
    assert packing.truncated.tolist() == [1]
    assert packing.num_lost_tokens == 1
    assert packing.segments(0).tolist() == [[1, 0, 20]]
    assert packing.segments(1).tolist() == [[0, 0, 3], [2, 0, 17]]


def test_what_is_too_long_is_split() -> None:
    # 45 of sequence 1 become 20 + 20 + 5, 40 of sequence 2 become 20 + 20; 5 and 15 share a bin.
    packing = pack([15, 45, 40, 0], 20, too_long="split")
    assert packing.lengths.tolist() == [15, 20, 20, 0, 20, 5, 20]
    assert packing.piece_sequences.tolist() == [0, 1, 2, 3, 1, 1, 2]
    assert packing.piece_starts.tolist() == [0, 0, 0, 0, 20, 40, 20]
    assert (packing.num_sequences, packing.num_lost_tokens) == (4, 0)
    assert packing.metrics()["num_split"] == 2
    segments = [packing.segments(k).tolist() for k in range(len(packing.bins))]
    assert [[0, 0, 15], [1, 40, 45]] in [rows[:1] + rows[-1:] for rows in segments]
    assert len(packing.bins) == packing.lower_bound == 5


@given(
    st.lists(st.integers(0, 50), max_size=30),
    st.sampled_from(ALGORITHMS),
    st.sampled_from(["skip", "truncate", "split"]),
)
@settings(max_examples=300, deadline=None)
def test_every_token_is_in_a_bin_once_or_counted_as_lost(lengths, algorithm, too_long) -> None:
    packing = pack(lengths, 16, algorithm=algorithm, too_long=too_long, seed=1)
    rows = [packing.segments(k) for k in range(len(packing.bins))]
    assert all((r[:, 2] - r[:, 1]).sum() <= 16 for r in rows)
    held = [(s, t) for r in rows for s, start, end in r.tolist() for t in range(start, end)]
    kept = {
        "skip": [n if n <= 16 else 0 for n in lengths],
        "truncate": [min(n, 16) for n in lengths],
        "split": lengths,
    }[too_long]
    assert sorted(held) == [(s, t) for s, n in enumerate(kept) for t in range(n)]
    assert packing.num_lost_tokens == sum(lengths) - sum(kept)
    assert packing.num_sequences == len(lengths)
    metrics = packing.metrics()
    assert metrics["num_tokens"] == sum(kept)
    names = {"skip": "num_skipped", "truncate": "num_truncated", "split": "num_split"}
    assert {name: metrics[name] for name in names.values()} == {
        name: sum(n > 16 for n in lengths) if mode == too_long else 0
        for mode, name in names.items()
    }
    assert Packing.from_json(packing.to_json()).metrics() == metrics


def test_a_unit_that_is_too_long_is_skipped_as_a_whole() -> None:
    packing = pack([3, 9, 2, 9], 12, too_long="skip", units=[0, 1, 0, 1])
    assert contents(packing) == [[0, 2]]
    assert packing.skipped.tolist() == [1, 3]
    assert packing.num_lost_tokens == 18
    packing = pack([1, 1, 1, 2], 12, too_long="skip", units=[0, 0, 0, 1], max_sequences_per_bin=2)
    assert (contents(packing), packing.skipped.tolist()) == ([[3]], [0, 1, 2])


@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_units_of_several_sequences_are_not_cut(too_long) -> None:
    message = f"got '{too_long}' and a unit of 2 that begins at index 1; choose skip"
    with pytest.raises(ValueError, match=message):
        pack([1, 2, 3], 9, too_long=too_long, units=[0, 7, 7])
    assert len(pack([1, 20, 3], 9, too_long=too_long, units=[0, 5, 7]).truncated) <= 1


def test_a_million_bins_share_their_memory() -> None:
    packing = pack(np.full(1000, 5), 8)
    assert all(b.base is packing.bins[0].base for b in packing.bins)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_largest_numbers_are_packed_exactly(algorithm) -> None:
    # Two halves and a token are one token too many for a bin of 2**52, as float32 would not see.
    half = 2**51
    packing = pack([half, half, 1, half - 1], 2**52, algorithm=algorithm, seed=0)
    assert len(packing.bins) == packing.lower_bound == 2
    assert sorted(int(packing.lengths[b].sum()) for b in packing.bins)[-1] <= 2**52
    assert packing.metrics()["num_tokens"] == 3 * half


def test_integers_of_numpy_are_integers() -> None:
    arguments = {"min_bins": 2, "bins_multiple_of": 2, "max_sequences_per_bin": 3}
    expected = pack([5, 9, 3, 3, 8, 1], 10, **arguments)
    for kind in (np.uint8, np.int8, np.uint64):
        given = {name: kind(value) for name, value in arguments.items()}
        packing = pack([5, 9, 3, 3, 8, 1], kind(10), **given)
        assert contents(packing) == contents(expected)
        assert packing.to_json() == expected.to_json()


@pytest.mark.parametrize("container", [range, lambda n: torch.arange(n, dtype=torch.int16)])
def test_other_containers_of_integers_are_read(container) -> None:
    assert contents(pack(container(4), 10)) == [[0, 1, 2, 3]]
