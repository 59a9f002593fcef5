"""Plans for ranks: the cases users reported, rules that hold for all inputs, clear errors."""

import json

import numpy as np
import pytest
from burnish_packing import MicroBatchPlan, plan_micro_batches
from hypothesis import given, settings
from hypothesis import strategies as st

MODES = ["packed", "padded", "fixed"]


def plan(lengths, mode="packed", **arguments) -> MicroBatchPlan:
    if mode == "fixed":
        arguments.setdefault("micro_batch_size", 3)
    return plan_micro_batches(lengths, mode=mode, **{"max_tokens": 64, **arguments})


def stored_tokens(indices, lengths, prefix_ids, prefix_lengths) -> int:
    """Tokens of a pack that holds every prefix once."""
    prefixes = {prefix_ids[i]: prefix_lengths[i] for i in indices if prefix_ids[i] >= 0}
    own = [lengths[i] - (prefix_lengths[i] if prefix_ids[i] >= 0 else 0) for i in indices]
    return sum(own) + sum(prefixes.values())


@pytest.mark.parametrize("mode", MODES)
def test_eight_short_sequences_give_four_ranks_one_micro_batch_each(mode) -> None:
    ranks = plan([3] * 8, mode, num_ranks=4).ranks
    assert [[len(slot) for slot in rank] for rank in ranks] == [[2]] * 4


def test_capacity_holds_while_balancing() -> None:
    ranks = plan([7] * 8, max_tokens=8, num_ranks=4).ranks
    assert [[len(slot) for slot in rank] for rank in ranks] == [[1, 1]] * 4


@pytest.mark.parametrize(
    ("size", "expected"), [(2, [[2], [1], [1], [1]]), (1, [[1, 1]] + [[1, 0]] * 3)]
)
def test_five_sequences_on_four_ranks_are_two_one_one_one(size, expected) -> None:
    ranks = plan([4] * 5, "fixed", num_ranks=4, micro_batch_size=size).ranks
    assert [[len(slot) for slot in rank] for rank in ranks] == expected


def test_fixed_keeps_the_order_and_needs_no_max_tokens() -> None:
    fixed = plan([9, 1, 5, 2, 7, 3, 8], "fixed", num_ranks=2, micro_batch_size=3, max_tokens=None)
    assert fixed.ranks == (((0, 1, 2), (3,)), ((4, 5, 6), ()))
    assert fixed.costs == ((27.0, 2.0), (24.0, 0.0))
    assert "fill_ratio" not in fixed.metrics()


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_without_a_sequence_gets_explicit_empty_slots(mode) -> None:
    assert plan([5, 5, 5], mode, num_ranks=4).ranks == (((0,),), ((1,),), ((2,),), ((),))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_planned_and_zeros_are_refused(mode) -> None:
    nothing = plan([], mode, num_ranks=2)
    assert nothing.ranks == ((), ())
    assert nothing.num_micro_batches == 0
    assert nothing.metrics()["rank_imbalance"] == 1.0
    with pytest.raises(ValueError, match="at least one token, got length 0 at index 1"):
        plan([3, 0], mode, num_ranks=2)


def test_the_steps_of_a_rank_are_its_global_batches() -> None:
    result = plan([4, 4, 4, 4, 4], num_ranks=2, max_tokens=4, global_batch_size=4)
    for rank in range(2):
        steps = list(result.steps(rank))
        assert [m.global_batch for step in steps for m in step] == [0, 0, 1]
        assert [m for step in steps for m in step] == list(result.micro_batches(rank))
    with pytest.raises(ValueError, match="rank must be one of the plan's 2, got 2"):
        next(result.steps(2))


def test_cost_is_balanced_slot_by_slot() -> None:
    # By tokens 6 | 3 + 3; by squares 36 | 9 + 9, so that nothing may join the 6.
    lengths = [6, 3, 3, 1, 1, 1, 1]
    by_tokens = plan(lengths, num_ranks=2)
    assert by_tokens.costs == ((8.0,), (8.0,))
    squares = plan(lengths, num_ranks=2, cost=lambda lengths: lengths**2)
    assert squares.ranks == (((0,),), ((1, 2, 3, 4, 5, 6),))
    assert squares.costs == ((36.0,), (22.0,))
    # Two slots: the costliest two micro-batches run side by side, not one after the other.
    two_slots = plan([8, 7, 2, 1], num_ranks=2, max_tokens=8)
    assert two_slots.costs == ((8.0, 1.0), (7.0, 2.0))


def test_padded_batches_hold_similar_lengths() -> None:
    lengths = [2, 9, 3, 10, 2, 3]
    padded = plan(lengths, "padded", max_tokens=20, pad_multiple=2, order="largest_first")
    assert padded.ranks == (((1, 3), (2, 5), (0, 4)),)
    assert padded.costs == ((20.0, 8.0, 4.0),)
    assert [batch.shape for batch in padded.micro_batches(0)] == [(2, 10), (2, 4), (2, 2)]


def test_metrics_by_hand() -> None:
    assert plan([6, 3, 5], max_tokens=12, num_ranks=2, pad_multiple=4).metrics() == {
        "num_ranks": 2,
        "num_global_batches": 1,
        "num_micro_batches": 1,
        "num_empty_slots": 0,
        "num_sequences": 3,
        "num_dropped": 0,
        "num_tokens": 14,
        "num_model_tokens": 16,  # 6 on one rank and 5 + 3 on the other, to a multiple of 4
        "padding_ratio": 0.125,
        "rank_imbalance": 8 * 2 / 14,
        "fill_ratio": 14 / 24,
    }


def test_a_group_is_kept_whole_and_its_prefix_counted_once() -> None:
    # 4 completions of 5 tokens behind a prompt of 20: 40 tokens shared, 100 apart.
    lengths, ids, prefixes = [25] * 4, [7] * 4, [20] * 4
    whole = plan(lengths, max_tokens=40, prefix_ids=ids, prefix_lengths=prefixes)
    assert whole.ranks == (((0, 1, 2, 3),),)
    assert whole.costs == ((40.0,),)
    assert whole.metrics()["num_tokens"] == 40
    # One token less: pieces of 3 and 1 completions, or of 2 and 2, each with its prompt.
    cut = plan(lengths, max_tokens=39, prefix_ids=ids, prefix_lengths=prefixes)
    assert cut.num_micro_batches == 2
    assert cut.metrics()["num_tokens"] == 60
    # A group that fits is not divided to give every rank work.
    assert plan(
        lengths, max_tokens=40, num_ranks=2, prefix_ids=ids, prefix_lengths=prefixes
    ).ranks == (((0, 1, 2, 3),), ((),))


def test_a_sequence_behind_a_prefix_costs_what_it_adds() -> None:
    costs = plan(
        [5, 6], prefix_ids=[0, 0], prefix_lengths=[4, 4], cost=lambda lengths: lengths**2
    ).costs
    assert costs == ((16.0 + (25 - 16) + (36 - 16),),)


@settings(max_examples=200)
@given(
    data=st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 12)), max_size=30),
    max_tokens=st.integers(20, 60),
    num_ranks=st.integers(1, 3),
)
def test_shared_prefixes_fit_and_groups_that_fit_stay_whole(data, max_tokens, num_ranks) -> None:
    ids = [group for group, _ in data]
    prefixes = [group + 3 if group >= 0 else 0 for group in ids]
    lengths = [prefix + own for prefix, (_, own) in zip(prefixes, data, strict=True)]
    result = plan(
        lengths,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        prefix_ids=ids,
        prefix_lengths=prefixes,
    )
    slots = [slot for rank in result.ranks for slot in rank]
    assert sorted(i for slot in slots for i in slot) == list(range(len(lengths)))
    stored = [stored_tokens(slot, lengths, ids, prefixes) for slot in slots]
    assert max(stored, default=0) <= max_tokens
    assert [float(n) for n in stored] == [cost for rank in result.costs for cost in rank]
    for group in set(ids) - {-1}:
        members = [i for i, other in enumerate(ids) if other == group]
        if stored_tokens(members, lengths, ids, prefixes) <= max_tokens:
            assert sum(members[0] in slot for slot in slots) == 1
            assert any(set(members) <= set(slot) for slot in slots)
    assert MicroBatchPlan.from_json(result.to_json()) == result


def test_a_plan_of_many_skewed_lengths_is_balanced() -> None:
    lengths = (300 * (1 + np.random.default_rng(0).pareto(1.5, 512))).astype(int).clip(1, 4096)
    metrics = plan(lengths, max_tokens=4096, num_ranks=8).metrics()
    fewest = -(-lengths.sum() // (8 * 4096))
    assert metrics["num_micro_batches"] <= fewest + 1
    assert metrics["rank_imbalance"] <= 1.02


def test_a_broken_plan_is_refused() -> None:
    fields = json.loads(plan([3, 4], num_ranks=2).to_json())
    with pytest.raises(ValueError, match="schema_version 2, got None"):
        MicroBatchPlan.from_json("[]")
    with pytest.raises(ValueError, match=r"schema_version 2, got 1; write it again with this"):
        MicroBatchPlan.from_json(json.dumps({**fields, "schema_version": 1}))
    with pytest.raises(ValueError, match="each of 2 sequences once"):
        MicroBatchPlan.from_json(json.dumps({**fields, "ranks": [[[0]], [[0]]]}))
    with pytest.raises(
        ValueError, match=r"same number of micro-batches, and costs for them, got \[2, 0\]"
    ):
        MicroBatchPlan.from_json(json.dumps({**fields, "ranks": [[[0], [1]], []]}))
    for name in fields.keys() - {"schema_version", "prefix_ids", "prefix_lengths"}:
        rest = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ValueError, match=rf"got one with \['{name}'\] missing"):
            MicroBatchPlan.from_json(json.dumps(rest))
    with pytest.raises(ValueError, match=r"\[\] missing and \['rank'\] unknown"):
        MicroBatchPlan.from_json(json.dumps({**fields, "rank": 0}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 5}, "ranks must be a list of lists, got 5; plan again"),
        ({"ranks": []}, "same number of micro-batches"),
        ({"ranks": [[0], [1]]}, "ranks must be a list of lists, got"),
        ({"ranks": [[[0.0]], [[1]]]}, "ranks must be integers, got dtype float64"),
        ({"ranks": [[[True]], [[0]]]}, r"ranks must be integers, got ranks\[0\] = True"),
        ({"ranks": [[[10**30]], [[1]]]}, "ranks must be integers of 64 bits"),
        ({"costs": None}, "costs must be a list of lists, got None"),
        ({"costs": [[None], [1.0]]}, "costs must be finite and >= 0, got None; plan again"),
        ({"costs": [[-1.0], [1.0]]}, "costs must be finite and >= 0, got -1.0"),
        ({"costs": [[float("nan")], [1.0]]}, "costs must be finite and >= 0, got nan"),
        ({"global_batches": 5}, "global_batches must be a list of lists, got 5"),
        ({"global_batches": [[0]]}, r"global_batches must be pairs of slots, got \[\[0\]\]"),
        ({"global_batches": [[0, 2]]}, "global batches must be consecutive slots"),
        ({"dropped": None}, "dropped must be a list or an array of integers, got NoneType"),
        ({"lengths": [3.0, 4]}, "lengths must be integers, got dtype float64"),
        ({"lengths": [True, 4]}, r"lengths must be integers, got lengths\[0\] = True"),
        ({"lengths": [2**62] * 2}, "lengths must sum to at most"),
        ({"max_tokens": 10**30}, "max_tokens must be at most"),
        ({"mode": None}, "mode must be one of packed, padded, fixed, got None"),
        ({"mode": "padded", "sequence_multiple": 2}, "sequence_multiple must come with mode"),
        (
            {"mode": "padded", "prefix_ids": [0, 0], "prefix_lengths": [1, 1]},
            "prefix_ids must come with mode packed",
        ),
    ],
)
def test_a_plan_of_another_form_is_refused(changed, message) -> None:
    fields = json.loads(plan([3, 4], num_ranks=2).to_json())
    assert fields["ranks"] == [[[1]], [[0]]]
    with pytest.raises(ValueError, match=message):
        MicroBatchPlan.from_json(json.dumps({**fields, **changed}))


@pytest.mark.parametrize(
    ("mode", "changed", "num_tokens"),
    [
        ("packed", {"max_tokens": 6}, 7),
        ("packed", {"max_tokens": 7, "pad_multiple": 8}, 8),
        ("padded", {"max_tokens": 7}, 8),
        ("fixed", {"max_tokens": 7}, 8),
    ],
)
def test_a_plan_over_its_budget_is_refused(mode, changed, num_tokens) -> None:
    fields = json.loads(plan([3, 4], mode).to_json())
    with pytest.raises(ValueError, match=f"= {changed['max_tokens']}, got {num_tokens} tokens"):
        MicroBatchPlan.from_json(json.dumps({**fields, **changed}))


def test_a_plan_whose_shared_prefix_makes_it_fit_is_read() -> None:
    shared = plan([6, 7], max_tokens=8, prefix_ids=[0, 0], prefix_lengths=[5, 5])
    assert shared.ranks == (((0, 1),),)
    assert MicroBatchPlan.from_json(shared.to_json()) == shared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"lengths": [9, 10], "max_tokens": 10, "pad_multiple": 4},
            r"max_tokens = 10, got length 9, padded 12 \(pad_multiple 4\), at index 0",
        ),
        (
            {"lengths": [10], "max_tokens": 10, "sequence_multiple": 4},
            r"got length 10, padded 12 \(sequence_multiple 4, pad_multiple 1\), at index 0",
        ),
        ({"lengths": [3, 21], "max_tokens": 20}, "got length 21, padded 21 .* at index 1"),
        ({"lengths": [9, 9], "max_tokens": 17, "units": [1, 1]}, r"got 18 .* sequences \[0, 1\]"),
        (
            {"lengths": [9, 1], "max_tokens": 17, "units": [1, 1], "mode": "padded"},
            r"max_tokens = 17, got 18 for the unit of sequences \[0, 1\]",
        ),
        (
            {"lengths": [1] * 4, "units": [1] * 4, "mode": "fixed"},
            "micro_batch_size = 3, got 4 for the unit",
        ),
        (
            {"lengths": [1, 9, 1], "mode": "fixed", "max_tokens": 20},
            r"max_tokens = 20, got 27 padded tokens for sequences \[0, 1, 2\]",
        ),
        ({"lengths": [1], "mode": "sorted"}, "got 'sorted'; choose one"),
        ({"lengths": [1], "order": "random"}, "got 'random'; choose one"),
        ({"lengths": [1.5]}, "lengths must be integers, got dtype float64"),
        ({"lengths": [3, -1]}, r"got lengths\[1\] = -1"),
        ({"lengths": [1], "global_batch_size": 0}, "global_batch_size must be an integer >= 1"),
        ({"lengths": [1], "drop_last": True}, "drop_last must come with global_batch_size"),
        ({"lengths": [1], "sequence_multiple": 2.0}, "sequence_multiple must be an integer"),
        (
            {"lengths": [1], "mode": "padded", "sequence_multiple": 2},
            "sequence_multiple must come with mode packed, got 2 in mode padded; use pad_multiple",
        ),
        (
            {
                "lengths": [4],
                "sequence_multiple": 2,
                "prefix_ids": [0],
                "prefix_lengths": [2],
            },
            "sequence_multiple must be 1 with prefix_ids, .* got 2; leave out one",
        ),
        (
            {"lengths": [1] * 6, "units": [7, 7, 3, 3, 5, 5], "global_batch_size": 3},
            r"batch of 3 sequences, got unit 3 with sequences \[2, 3\]",
        ),
        ({"lengths": [1], "units": [1, 2]}, "one entry per sequence, 1, got 2"),
        ({"lengths": [1], "units": [1, 2], "global_batch_size": 1}, "per sequence, 1, got 2"),
        (
            {"lengths": [1], "cost": lambda lengths: lengths * np.nan},
            r"costs \[N\] from 0 to 1e100",
        ),
        ({"lengths": [1], "micro_batch_size": 2}, "only there, got 2 in mode packed"),
        ({"lengths": [1], "mode": "fixed", "micro_batch_size": None}, "got None in mode fixed"),
        ({"lengths": [1], "max_tokens": None}, "max_tokens must be given in mode packed"),
        ({"lengths": [1], "num_ranks": 0}, "num_ranks must be an integer >= 1, got 0"),
        ({"lengths": [1], "cost": lambda lengths: lengths - 2.0}, r"costs \[N\] from 0 to 1e100"),
        ({"lengths": [1], "cost": lambda lengths: lengths * 2e307}, r"costs \[N\] from 0 to 1e100"),
        (
            {"lengths": [1, 2], "cost": lambda lengths: lengths.sum()},
            r"costs \[N\] from 0 to 1e100",
        ),
        (
            {"lengths": [4], "prefix_ids": [0], "prefix_lengths": [2], "mode": "padded"},
            "prefix_ids must come with mode packed, got mode padded; choose mode packed",
        ),
        (
            {"lengths": [4], "prefix_ids": [0], "prefix_lengths": [2], "units": [0]},
            "prefix_ids must come without units, got both; leave out units",
        ),
        ({"lengths": [1], "cost": "flops"}, r"function of lengths, got 'flops'; .* flops_cost\("),
        ({"lengths": [1], "mode": ["packed"]}, r"mode must be one of .* got \['packed'\]"),
        ({"lengths": [1], "order": ["as_given"]}, r"order must be one of .* got \['as_given'\]"),
        ({"lengths": [1], "max_tokens": 10**30}, "max_tokens must be at most"),
        ({"lengths": [1], "num_ranks": 10**30}, "num_ranks must be at most"),
        ({"lengths": [1], "pad_multiple": 2**62}, "pad_multiple must be at most"),
        ({"lengths": [2**62] * 3}, "lengths must sum to at most"),
        (
            {"lengths": [1, 1], "mode": "fixed", "max_tokens": None, "pad_multiple": 2**53},
            f"padded lengths must sum to at most .* got {2**54}",
        ),
        (
            {"lengths": [2**52] + [1] * 2048, "mode": "fixed", "max_tokens": None},
            r"times the longest one must be at most 2\*\*62",
        ),
        ({"lengths": [4], "prefix_ids": [0]}, "must come together"),
        ({"lengths": [4], "prefix_ids": [0, 1], "prefix_lengths": [1]}, "1, got 2 and 1"),
        ({"lengths": [4], "prefix_ids": [0], "prefix_lengths": [5]}, "prefix length 5, length 4"),
        ({"lengths": [4], "prefix_ids": [0], "prefix_lengths": [0]}, "prefix length 0, length 4"),
        ({"lengths": [4], "prefix_ids": [-2], "prefix_lengths": [0]}, "got id -2"),
        (
            {"lengths": [4, 4], "prefix_ids": [6, 6], "prefix_lengths": [1, 2]},
            "share one prefix length, got 1 and others in group 6",
        ),
    ],
)
def test_errors_say_what_was_got(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_there_is_no_rank_between_two() -> None:
    with pytest.raises(ValueError, match=r"one of the plan's 2, got 0\.5"):
        plan([3, 4], num_ranks=2).micro_batches(0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64])
def test_integers_of_numpy_are_integers(mode, kind) -> None:
    arguments = {"max_tokens": 24, "num_ranks": 2, "pad_multiple": 4, "global_batch_size": 3}
    if mode == "packed":
        arguments["sequence_multiple"] = 2
    if mode == "fixed":
        arguments["micro_batch_size"] = 2
    given = {name: kind(value) for name, value in arguments.items()}
    lengths = [5, 3, 7, 2, 9]
    assert plan(lengths, mode, **given).to_json() == plan(lengths, mode, **arguments).to_json()


def test_counts_beyond_int64_are_summed_exactly() -> None:
    wide = plan([1] * 600, "fixed", max_tokens=None, micro_batch_size=600, pad_multiple=2**43)
    assert wide.metrics()["num_model_tokens"] == 600 * 2**43
    assert MicroBatchPlan.from_json(wide.to_json()) == wide
    fields = json.loads(wide.to_json())  # as no planner plans it
    wider = MicroBatchPlan.from_json(json.dumps({**fields, "pad_multiple": 2**53}))
    assert wider.metrics()["num_model_tokens"] == 600 * 2**53
