"""Rules that hold for every plan, over all options."""

from itertools import product

import numpy as np
import pytest
from burnish_packing import MicroBatchPlan, plan_micro_batches
from burnish_packing.balance import balance_slots, slot_targets
from burnish_packing.packers import pack
from hypothesis import given, settings
from hypothesis import strategies as st

MODES = ["packed", "padded", "fixed"]
MAX_TOKENS = 80


def rounded(value, multiple):
    return -(-value // multiple) * multiple


@st.composite
def arguments(draw) -> dict:
    """Lengths, and options of a plan that are possible for them."""
    lengths = draw(st.lists(st.integers(1, 20), max_size=40))
    mode = draw(st.sampled_from(MODES))
    unit_size = draw(st.integers(1, 3))
    power = draw(st.sampled_from([0.0, 1.0, 2.0]))
    scale = draw(st.sampled_from([0.0, 1.0, 1e12]))
    batch = draw(st.none() | st.integers(1, 5).map(lambda n: n * unit_size))
    return {
        "lengths": lengths,
        "mode": mode,
        "max_tokens": MAX_TOKENS,
        "num_ranks": draw(st.integers(1, 5)),
        "micro_batch_size": 3 if mode == "fixed" else None,
        "pad_multiple": draw(st.integers(1, 7)),
        "sequence_multiple": draw(st.integers(1, 4)) if mode == "packed" else 1,
        "cost": lambda lengths: scale * lengths**power,
        "global_batch_size": batch,
        "drop_last": batch is not None and draw(st.booleans()),
        "order": draw(st.sampled_from(["as_given", "largest_first"])),
        "units": None if unit_size == 1 else (np.arange(len(lengths)) // unit_size).tolist(),
    }


def slots_of(plan) -> list[tuple[int, ...]]:
    return [slot for rank in plan.ranks for slot in rank]


@settings(max_examples=300, deadline=None)
@given(arguments())
def test_nothing_is_lost_or_doubled_and_the_inverse_is_exact(options) -> None:
    plan = plan_micro_batches(**options)
    order = [i for slot in slots_of(plan) for i in slot]
    num_kept = len(order)
    assert sorted(order) == list(range(num_kept))
    assert plan.dropped == tuple(range(num_kept, len(options["lengths"])))
    short = len(options["lengths"]) % (options["global_batch_size"] or 1)
    assert len(plan.dropped) == (short if options["drop_last"] else 0)
    assert np.array(order, int)[plan.inverse()].tolist() == list(range(num_kept))
    assert MicroBatchPlan.from_json(plan.to_json()) == plan


@settings(max_examples=300, deadline=None)
@given(arguments())
def test_counts_are_equal_in_every_global_batch_and_no_sequence_leaves_its_own(options) -> None:
    plan = plan_micro_batches(**options)
    assert plan.num_ranks == options["num_ranks"]
    assert {len(rank) for rank in plan.ranks} == {plan.num_micro_batches}
    size = options["global_batch_size"] or max(len(options["lengths"]), 1)
    num_units = len(set(options["units"] or range(len(options["lengths"]))))
    one_step = options["global_batch_size"] is None
    if one_step and num_units >= plan.num_ranks:
        assert all(any(rank) for rank in plan.ranks)
    assert [i for start, end in plan.global_batches for i in range(start, end)] == list(
        range(plan.num_micro_batches)
    )
    for global_batch, (start, end) in enumerate(plan.global_batches):
        for slot in range(start, end):
            indices = [i for rank in plan.ranks for i in rank[slot]]
            assert indices
            assert {i // size for i in indices} == {global_batch}
        firsts = [min(i for rank in plan.ranks for i in rank[s]) for s in range(start, end)]
        costs = [max(rank[s] for rank in plan.costs) for s in range(start, end)]
        if options["order"] == "as_given":
            assert firsts == sorted(firsts)
        else:
            assert costs == sorted(costs, reverse=True)


@settings(max_examples=300, deadline=None)
@given(arguments())
def test_shapes_hold_their_sequences_within_the_budget(options) -> None:
    plan = plan_micro_batches(**options)
    lengths, pad = options["lengths"], options["pad_multiple"]
    all_batches = [list(plan.micro_batches(rank)) for rank in range(plan.num_ranks)]
    assert [tuple(b.indices for b in batches) for batches in all_batches] == list(plan.ranks)
    for rank, batches in enumerate(all_batches):
        for slot, batch in enumerate(batches):
            rows, positions = batch.shape
            assert rows * positions <= MAX_TOKENS
            assert batch.lengths == tuple(lengths[i] for i in batch.indices)
            assert batch.mode == options["mode"]
            start, end = plan.global_batches[batch.global_batch]
            assert start <= slot < end
            if batch.mode == "packed":
                held = sum(rounded(n, batch.sequence_multiple) for n in batch.lengths)
                held = held if batch.indices else batch.sequence_multiple
                assert batch.shape == (1, rounded(held, pad))
                assert batch.sequence_multiple == options["sequence_multiple"]
            elif batch.mode == "fixed":
                assert len(batch.indices) <= 3
                width = rounded(max(batch.lengths, default=0), pad)
                assert batch.shape == ((len(batch.indices), width) if batch.indices else (1, pad))
            else:
                together = [other[slot] for other in all_batches]
                assert {other.shape for other in together} == {batch.shape}
                assert rows == max(len(other.indices) for other in together)
                longest = max(n for other in together for n in other.lengths)
                assert positions == rounded(longest, pad)
                assert plan.costs[rank][slot] == pytest.approx(
                    rows * options["cost"](np.array(float(positions)))
                )


@settings(max_examples=200, deadline=None)
@given(arguments())
def test_units_stay_whole_and_costs_are_those_of_the_slots(options) -> None:
    plan = plan_micro_batches(**options)
    slot_of = {i: k for k, slot in enumerate(slots_of(plan)) for i in slot}
    units = options["units"] or list(range(len(options["lengths"])))
    for unit in {units[i] for i in slot_of}:
        assert len({slot_of[i] for i in slot_of if units[i] == unit}) == 1
    if plan.mode == "packed":
        padded = np.array(options["lengths"]) * 1.0
        padded = rounded(padded, options["sequence_multiple"])
        costs = options["cost"](padded)
        expected = [costs[list(slot)].sum() for slot in slots_of(plan)]
        assert [cost for rank in plan.costs for cost in rank] == pytest.approx(expected)
    assert plan.metrics()["rank_imbalance"] >= 1.0 - 1e-12


@settings(max_examples=50, deadline=None)
@given(arguments())
def test_a_plan_does_not_depend_on_the_container(options) -> None:
    torch = pytest.importorskip("torch")
    lengths = options.pop("lengths")
    plan = plan_micro_batches(lengths, **options)
    for other in (
        tuple(lengths),
        np.array(lengths, np.int32),
        np.array(lengths, np.uint16),
        torch.tensor(lengths, dtype=torch.int64),
    ):
        assert plan_micro_batches(other, **options) == plan
    assert plan.to_json() == plan_micro_batches(np.array(lengths, int), **options).to_json()


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.tuples(st.integers(-1, 4), st.integers(1, 12)), max_size=30),
    max_tokens=st.integers(20, 60),
    num_ranks=st.integers(1, 3),
    size=st.none() | st.integers(1, 12),
    drop_last=st.booleans(),
)
def test_a_prefix_is_counted_once_in_a_micro_batch(
    data, max_tokens, num_ranks, size, drop_last
) -> None:
    ids = [group for group, _ in data]
    shared = [group + 3 if group >= 0 else 0 for group in ids]
    plan = plan_micro_batches(
        [prefix + own for prefix, (_, own) in zip(shared, data, strict=True)],
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        global_batch_size=size,
        drop_last=drop_last and size is not None,
        prefix_ids=ids,
        prefix_lengths=shared,
    )
    num_tokens = 0
    for rank in range(num_ranks):
        for slot, batch in enumerate(plan.micro_batches(rank)):
            assert batch.prefix_ids == tuple(ids[i] for i in batch.indices)
            assert batch.prefix_lengths == tuple(shared[i] for i in batch.indices)
            own = sum(data[i][1] for i in batch.indices)
            prefixes = {ids[i]: shared[i] for i in batch.indices}
            stored = own + sum(prefixes.values())
            assert batch.shape == ((1, stored) if batch.indices else (1, 1))
            assert plan.costs[rank][slot] == stored <= max_tokens
            num_tokens += stored
    assert plan.metrics()["num_tokens"] == num_tokens
    assert MicroBatchPlan.from_json(plan.to_json()) == plan


def cheapest_step(tokens, costs, capacity, num_ranks, num_slots) -> float:
    """Of all ways to put units into bins: the least sum of the costliest bins of the slots."""
    best = np.inf
    for bins in product(range(num_ranks * num_slots), repeat=len(tokens)):
        held = np.bincount(bins, tokens, num_ranks * num_slots)
        if held.max() <= capacity:
            by_bin = np.bincount(bins, costs, num_ranks * num_slots)
            best = min(best, by_bin.reshape(num_slots, num_ranks).max(axis=1).sum())
    return best


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), min_size=1, max_size=6),
    capacity=st.integers(10, 30),
)
def test_no_step_costs_less_than_the_targets_and_none_much_more_than_the_best(
    units, capacity
) -> None:
    tokens, costs = (np.array(column) for column in zip(*units, strict=True))
    packed = pack(tokens, capacity, bins_multiple_of=2).bins
    slots = balance_slots(packed, tokens, costs.astype(float), capacity, 2)
    step = sum(max(costs[units].sum() for units in slot) for slot in slots)
    fewest = len(packed) // 2
    if fewest <= 2:
        best = cheapest_step(tokens, costs, capacity, 2, fewest)
        assert slot_targets(costs.astype(float), 2, fewest).sum() <= best + 1e-9
        assert step <= 1.5 * best + 1e-9
    assert sorted(i for slot in slots for units in slot for i in units) == list(range(len(units)))
    assert max(tokens[units].sum() for slot in slots for units in slot) <= capacity
