"""What a packer and a packing that is read refuse, and what their errors say."""

import json

import numpy as np
import pytest
import torch
from burnish_packing import Packing, lower_bound, pack


def contents(packing: Packing) -> list[list[int]]:
    return [indices.tolist() for indices in packing.bins]


JSON_NAMES = (
    "bins",
    "lengths",
    "capacity",
    "lower_bound",
    "piece_sequences",
    "piece_starts",
    "skipped",
    "truncated",
    "num_lost_tokens",
)


@pytest.mark.parametrize("too_long", ["skip", "truncate", "split"])
def test_json_both_ways(too_long) -> None:
    packing = pack([5, 9, 3, 23, 8, 1], 10, bins_multiple_of=4, too_long=too_long)
    again = Packing.from_json(packing.to_json())
    assert contents(again) == contents(packing)
    for name in JSON_NAMES[1:]:
        np.testing.assert_array_equal(getattr(again, name), getattr(packing, name))
    assert again.metrics() == packing.metrics()
    with pytest.raises(ValueError, match="read-only"):
        again.bins[0][0] = 1


def test_json_of_another_version_or_without_a_field_is_refused() -> None:
    fields = json.loads(pack([5, 9, 3, 3, 8, 1], 10).to_json())
    with pytest.raises(ValueError, match="schema_version 2, got 1; write it again"):
        Packing.from_json(json.dumps({**fields, "schema_version": 1}))
    for name in JSON_NAMES:
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ValueError, match=rf"got one with \['{name}'\] missing"):
            Packing.from_json(json.dumps(rest))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bins": [[0, 0, 1, 2, 3, 4]]}, "each of 6 sequences once"),
        ({"bins": [[0, 1, 2, 3, 4, 5]]}, "capacity = 10, got 29 tokens; pack again"),
        ({"bins": 5}, "bins must be a list of lists, got 5; pack again"),
        ({"bins": None}, "bins must be a list of lists, got None"),
        ({"bins": [0, 1, 2, 3, 4, 5]}, r"bins must be a list of lists, got \[0, 1"),
        ({"bins": [[1, 5], [4], [2, 0], [3]]}, "every bin must ascend"),
        ({"bins": [[1, 5.0], [4], [0, 2], [3]]}, "bins must be integers, got dtype float64"),
        ({"lower_bound": -5}, "lower_bound must be an integer from 1 to 4, got -5; pack again"),
        ({"lower_bound": 1000}, "lower_bound must be an integer from 1 to 4, got 1000"),
        ({"lower_bound": True}, "lower_bound must be an integer from 1 to 4, got True"),
        ({"num_lost_tokens": -7}, "num_lost_tokens must be an integer from 0 to 0, got -7"),
        ({"num_lost_tokens": 7}, "num_lost_tokens must be an integer from 0 to 0, got 7"),
        ({"num_lost_tokens": None}, "num_lost_tokens must be an integer from 0 to 0, got None"),
        ({"truncated": [2]}, "must have kept 10 tokens, the capacity, got 3 of sequence 2"),
        ({"skipped": [1, 0], "bins": [[5], [4], [2], [3]]}, r"skipped must ascend, got \[1, 0\]"),
        ({"skipped": None}, "skipped must be a list .* got NoneType"),
        ({"piece_sequences": [0, 1, 2, 3, 10**12, 5]}, f"of {10**12 + 1} sequences with some"),
        ({"piece_starts": [0, 0, 0, 0, 0, 2**63 - 1]}, "make up its sequences"),
        ({"capacity": 10**30}, "capacity must be at most"),
        ({"capacity": True}, "capacity must be an integer >= 1, got True"),
        ({"lengths": [[1], [2, 3]]}, "lengths must be numbers of tokens, got sequences"),
        ({"lengths": [2**62] * 6}, "lengths must sum to at most"),
        ({"capacity": 10.5}, "capacity must be an integer >= 1, got 10.5"),
        ({"skipped": [0]}, "each of 6 sequences once"),
        ({"skipped": [9]}, "make up its sequences"),
        ({"truncated": [-1]}, "make up its sequences"),
        ({"piece_sequences": [0, 1, 2, 3, 4, 4]}, "make up its sequences, got 6 pieces of 5"),
        ({"piece_starts": [0, 0, 1, 0, 0, 0]}, "make up its sequences"),
        ({"lengths": [5, 9, 3, 3, 8]}, "make up its sequences"),
        ({"lengths": [5, 9, 3, 3, 8, -1]}, r"got lengths\[5\] = -1"),
    ],
)
def test_a_broken_packing_is_refused(changed, message) -> None:
    fields = json.loads(pack([5, 9, 3, 3, 8, 1], 10).to_json())
    with pytest.raises(ValueError, match=message):
        Packing.from_json(json.dumps({**fields, **changed}))


def test_a_piece_of_no_sequence_is_refused() -> None:
    fields = json.loads(pack([0], 10).to_json())
    assert Packing.from_json(json.dumps(fields)).num_sequences == 1
    with pytest.raises(ValueError, match="got 1 pieces of 0 sequences"):
        Packing.from_json(json.dumps({**fields, "piece_sequences": [-1]}))


def test_the_tokens_that_were_lost_must_agree_with_the_sequences() -> None:
    skipped = json.loads(pack([5, 23], 10, too_long="skip").to_json())
    with pytest.raises(ValueError, match="from 23 to 23, got 22; pack again"):
        Packing.from_json(json.dumps({**skipped, "num_lost_tokens": 22}))
    truncated = json.loads(pack([12, 23], 10, too_long="truncate").to_json())
    with pytest.raises(ValueError, match=r"num_lost_tokens must be an integer from 2 .* got 1;"):
        Packing.from_json(json.dumps({**truncated, "num_lost_tokens": 1}))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"capacity": ' + "9" * 5000 + "}"])
def test_what_is_no_json_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"a packing must be read from JSON, got .*; pass what to"):
        Packing.from_json(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 21], "capacity": 20}, "capacity 20, got 21 tokens .* at index 1"),
        ({"lengths": [3, -1], "capacity": 20}, r"got lengths\[1\] = -1"),
        ({"lengths": [3.0, 2.5], "capacity": 20}, "lengths must be integers, got dtype float64"),
        ({"lengths": np.array([[3]]), "capacity": 20}, r"one-dimensional, got shape \(1, 1\)"),
        ({"lengths": [2, True], "capacity": 20}, r"integers, got lengths\[1\] = True"),
        ({"lengths": np.array([True]), "capacity": 20}, "integers, got dtype bool"),
        ({"lengths": [3], "capacity": 0}, "capacity must be an integer >= 1, got 0"),
        ({"lengths": [3], "capacity": 8.5}, "capacity must be an integer >= 1, got 8.5"),
        ({"lengths": [3], "capacity": 9, "min_bins": 0}, "min_bins must be an integer >= 1"),
        ({"lengths": [3], "capacity": 9, "algorithm": "best"}, "got 'best'; choose one"),
        ({"lengths": [3], "capacity": 9, "too_long": "cut"}, "truncate, split, got 'cut'"),
        ({"lengths": [3], "capacity": 9, "max_sequences_per_bin": 0}, "max_sequences_per_bin must"),
        ({"lengths": 3, "capacity": 9}, r"one-dimensional, got shape \(\)"),
        ({"lengths": [float("nan")], "capacity": 9}, "integers, got dtype float64"),
        ({"lengths": ["3"], "capacity": 9}, "integers, got dtype"),
        ({"lengths": [3], "capacity": True}, "capacity must be an integer >= 1, got True"),
        ({"lengths": [3], "capacity": 9, "units": [1, 2]}, "one entry per sequence, 1, got 2"),
        (
            {"lengths": [1, 9, 9], "capacity": 10, "units": [0, 7, 7]},
            "got 18 tokens for the unit of 2 sequences that begins at index 1",
        ),
        (
            {"lengths": [1, 1, 1], "capacity": 9, "units": [5, 4, 4], "max_sequences_per_bin": 1},
            "max_sequences_per_bin = 1 sequences, got 2 in the unit that begins at index 1; "
            "raise max_sequences_per_bin, drop the unit or choose too_long skip",
        ),
        (
            {"lengths": [8], "capacity": 7, "units": [4]},
            "got 8 tokens for the sequence at index 0; raise the capacity, .* choose too_long$",
        ),
        (
            {"lengths": [8, 1], "capacity": 7, "units": [4, 4], "max_sequences_per_bin": 1},
            "got 9 tokens for the unit of 2 sequences .* raise the capacity.* too_long skip",
        ),
        ({"lengths": [3], "capacity": 9, "algorithm": np.array(["a", "b"])}, "got array"),
        ({"lengths": [3], "capacity": 9, "too_long": ["skip"]}, r"got \['skip'\]; choose one"),
        ({"lengths": [3], "capacity": 9, "seed": np.array([1, 2])}, "seed must be an integer"),
    ],
)
def test_errors_say_what_was_got(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([[1, 2, 3], [1, 2]], r"got sequences; pass \[len\(row\) for row in rows\]"),
        ([[1, 2], [1, 2]], r"got sequences; pass \[len\(row\) for row in rows\]"),
        ([torch.arange(3), torch.arange(2)], "numbers of tokens, got sequences"),
        (np.array([[1], [2, 3]], dtype=object), "numbers of tokens, got sequences"),
        ([{"token_ids": [1]}], "numbers of tokens, got sequences"),
        ((n for n in [1, 2]), r"a list or an array of integers, got generator; pass list\(...\)"),
        ({1, 2}, r"got set; pass list\(...\) of it"),
        ({0: 1}, r"got dict; pass list\(...\) of its values"),
        (None, "got NoneType; pass one integer for each sequence"),
        ("12", "got str; pass one integer"),
        ([1, None], r"integers, got lengths\[1\] = None"),
        (np.ma.masked_array([3, 99], [False, True]), "without a mask, .* pass its compressed"),
        (torch.tensor([1], dtype=torch.bfloat16), "got Tensor, torch.bfloat16, cpu; pass integers"),
        (torch.tensor([1], device="meta"), "got Tensor, torch.int64, meta; pass integers on the"),
        (torch.tensor([1.0], requires_grad=True), "got Tensor, torch.float32, cpu"),
        (torch.tensor(3), r"one-dimensional, got shape \(\); pass a list"),
    ],
)
def test_what_is_no_list_of_integers_is_named(lengths, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, 8)


HUGE = 2**62


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [HUGE] * 4, "algorithm": "next_fit"}, f"sum to at most .* got {4 * HUGE}"),
        ({"lengths": [HUGE] * 4, "units": [0] * 4}, f"sum to at most .* got {4 * HUGE}"),
        ({"lengths": [2**52, 2**52, 1], "too_long": "skip"}, f"got {2**53 + 1}; correct them"),
        ({"lengths": [3], "capacity": 2**53 + 1}, f"capacity must be at most {2**53}"),
        ({"lengths": [3], "capacity": 10**30}, f"at most {2**53} .*, got {10**30}; pass a smaller"),
        ({"lengths": [3], "min_bins": 10**30}, "min_bins must be at most"),
        ({"lengths": [3], "max_sequences_per_bin": np.uint64(2**63)}, "must be at most"),
        ({"lengths": np.array([2**63 + 5], np.uint64)}, rf"lengths\[0\] = {2**63 + 5}; pass"),
        ({"lengths": [1, 10**30]}, rf"integers of 64 bits .* got lengths\[1\] = {10**30}"),
        ({"lengths": [1], "units": np.array([2**64 - 1], np.uint64)}, f"= {2**64 - 1}; pass"),
        (
            {
                "lengths": [2**52] + [0] * 2048,
                "units": [0] * 2049,
                "max_sequences_per_bin": 4000,
            },
            r"sequences of the largest must be at most 2\*\*62, got",
        ),
    ],
)
def test_numbers_that_would_overflow_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack(**{"capacity": 2**53, **arguments})
    if "capacity" in arguments:
        with pytest.raises(ValueError, match=message):
            lower_bound([5, 3], arguments["capacity"])
