"""Plans over several optimizer steps, the order of slots, their shapes and their balance."""

import json

import numpy as np
import pytest
from burnish_packing import MicroBatchPlan, plan_micro_batches
from burnish_packing.balance import slot_targets


def squares(lengths):
    return lengths**2


def test_a_global_batch_is_planned_alone() -> None:
    # As one step [4, 4] and [1, 1] would share packs; as two steps of 2 nothing moves across.
    lengths = [4, 1, 4, 1, 2]
    one = plan_micro_batches(lengths, max_tokens=8)
    assert one.global_batches == ((0, 2),)
    assert any({i // 2 for i in slot} != {slot[0] // 2} for slot in one.ranks[0])
    three = plan_micro_batches(lengths, max_tokens=8, global_batch_size=2)
    assert three.ranks == (((0, 1), (2, 3), (4,)),)
    assert three.global_batches == ((0, 1), (1, 2), (2, 3))
    assert [batch.global_batch for batch in three.micro_batches(0)] == [0, 1, 2]
    assert three.inverse().tolist() == [0, 1, 2, 3, 4]
    assert MicroBatchPlan.from_json(three.to_json()) == three


@pytest.mark.parametrize("mode", ["packed", "padded", "fixed"])
def test_every_global_batch_has_equal_counts_on_all_ranks(mode) -> None:
    size = 1 if mode == "fixed" else None
    plan = plan_micro_batches(
        [8, 8, 8, 3, 3],
        max_tokens=8,
        num_ranks=2,
        mode=mode,
        micro_batch_size=size,
        global_batch_size=3,
    )
    assert plan.global_batches == ((0, 2), (2, 3))
    assert [sum(map(len, rank[:2])) for rank in plan.ranks] == [2, 1]
    assert [rank[2] for rank in plan.ranks] == [(3,), (4,)]


def test_a_short_last_batch_is_dropped_and_counted() -> None:
    nothing = plan_micro_batches(
        [9] * 3, max_tokens=20, num_ranks=2, global_batch_size=5, drop_last=True
    )
    assert nothing.ranks == ((), ())
    assert nothing.dropped == (0, 1, 2)
    assert nothing.metrics()["num_dropped"] == 3
    assert nothing.metrics()["num_sequences"] == 0
    assert nothing.inverse().tolist() == []
    assert list(nothing.micro_batches(1)) == []
    # A dropped sequence need not fit; the kept ones come back in order.
    some = plan_micro_batches(
        [2, 9, 4, 50], max_tokens=11, num_ranks=2, global_batch_size=3, drop_last=True
    )
    assert some.ranks == (((1,),), ((0, 2),))
    assert some.dropped == (3,)
    assert np.array([1, 0, 2])[some.inverse()].tolist() == [0, 1, 2]
    for plan in (nothing, some):
        assert MicroBatchPlan.from_json(plan.to_json()) == plan
    kept = plan_micro_batches([9] * 3, max_tokens=20, global_batch_size=5)
    assert kept.ranks == (((0, 2), (1,)),)
    whole = plan_micro_batches([9] * 4, max_tokens=20, global_batch_size=2, drop_last=True)
    assert whole.dropped == ()


def test_a_prefix_group_is_cut_at_the_end_of_a_global_batch() -> None:
    plan = plan_micro_batches(
        [5, 6, 7, 3],
        max_tokens=20,
        global_batch_size=2,
        prefix_ids=[4, 4, 4, -1],
        prefix_lengths=[3, 3, 3, 0],
    )
    assert plan.ranks == (((0, 1), (2, 3)),)
    first, second = plan.micro_batches(0)
    assert (first.shape, second.shape) == ((1, 8), (1, 10))  # 3 + 2 + 3; 3 + 4 and 3
    assert (second.prefix_ids, second.prefix_lengths) == ((4, -1), (3, 0))
    assert second.lengths == (7, 3)


def test_order_of_slots() -> None:
    lengths = [2, 8, 5, 4, 7]
    arguments = {"max_tokens": 8, "cost": squares}
    as_given = plan_micro_batches(lengths, **arguments)
    assert as_given.ranks == (((0, 3), (1,), (2,), (4,)),)
    largest = plan_micro_batches(lengths, order="largest_first", **arguments)
    assert largest.ranks == (((1,), (4,), (2,), (0, 3)),)
    assert largest.costs == ((64.0, 49.0, 25.0, 20.0),)
    # Each global batch has its own order; fixed batches keep their sequences.
    fixed = plan_micro_batches(
        [1, 9, 4, 2, 3, 8],
        max_tokens=None,
        mode="fixed",
        micro_batch_size=1,
        global_batch_size=3,
        order="largest_first",
    )
    assert fixed.ranks == (((1,), (2,), (0,), (5,), (4,), (3,)),)


def test_a_padded_slot_has_one_shape_on_all_ranks() -> None:
    # Sorted: 9 8 | 5 5 | 4. Two slots of [1, 9] and [2, 5]; rank 0 has a row of padding in the
    # second, and the slots cost both ranks the same.
    plan = plan_micro_batches([5, 9, 4, 8, 5], max_tokens=11, num_ranks=2, mode="padded")
    assert plan.ranks == (((4,), (1,)), ((0, 2), (3,)))
    shapes = [[batch.shape for batch in plan.micro_batches(rank)] for rank in (0, 1)]
    assert shapes == [[(2, 5), (1, 9)]] * 2
    assert plan.costs == ((10.0, 9.0),) * 2
    metrics = plan.metrics()
    assert metrics["num_model_tokens"] == 38
    assert metrics["padding_ratio"] == 1 - 31 / 38
    assert metrics["rank_imbalance"] == 1.0
    # An empty slot runs the slot's shape too.
    (empty,) = plan_micro_batches([7, 6], max_tokens=8, num_ranks=3, mode="padded").micro_batches(2)
    assert (empty.indices, empty.shape) == ((), (1, 7))


def test_padded_ranks_do_equal_real_work() -> None:
    # Snake by work: 8 + 5 against 7 + 6, never 8 + 6 against 7 + 5.
    plan = plan_micro_batches([8, 7, 6, 5], max_tokens=32, num_ranks=2, mode="padded")
    assert plan.ranks == (((0, 3),), ((1, 2),))


def test_units_of_unlike_rows_that_fit_alone_get_slots_of_their_own() -> None:
    # One row of 100, and four of 25: the shape that holds both would have 400 positions.
    plan = plan_micro_batches(
        [100, 25, 25, 25, 25],
        max_tokens=100,
        num_ranks=2,
        mode="padded",
        units=[0, 1, 1, 1, 1],
    )
    assert plan.ranks == (((0,), ()), ((), (1, 2, 3, 4)))
    assert [batch.shape for batch in plan.micro_batches(0)] == [(1, 100), (4, 25)]


def test_shapes_of_packed_and_fixed_slots() -> None:
    packed = plan_micro_batches(
        [5, 3, 6], max_tokens=16, num_ranks=2, sequence_multiple=4, pad_multiple=16
    )
    # 8 + 4 positions and 8, filled up to 16; 14 of 32 positions hold a token.
    assert packed.ranks == (((0, 1),), ((2,),))
    for rank in (0, 1):
        (batch,) = packed.micro_batches(rank)
        assert (batch.shape, batch.sequence_multiple) == ((1, 16), 4)
    assert packed.costs == ((12.0,), (8.0,))
    assert packed.metrics()["num_model_tokens"] == 32
    assert packed.metrics()["padding_ratio"] == 1 - 14 / 32
    assert packed.metrics()["fill_ratio"] == 14 / 32
    fixed = plan_micro_batches(
        [5, 3, 6], max_tokens=None, num_ranks=2, mode="fixed", micro_batch_size=2, pad_multiple=4
    )
    assert [b.shape for rank in (0, 1) for b in fixed.micro_batches(rank)] == [(2, 8), (1, 8)]
    packed = plan_micro_batches([5], max_tokens=8, num_ranks=2, pad_multiple=8)
    assert [b.shape for rank in (0, 1) for b in packed.micro_batches(rank)] == [(1, 8), (1, 8)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(rank) -> None:
    plan = plan_micro_batches([5], max_tokens=8, num_ranks=2)
    with pytest.raises(ValueError, match=f"rank must be one of the plan's 2, got {rank}"):
        plan.micro_batches(rank)


def test_broken_global_batches_are_refused() -> None:
    plan = plan_micro_batches([4, 1, 4, 1, 2], max_tokens=8, global_batch_size=2, drop_last=True)
    fields = json.loads(plan.to_json())
    for broken in (
        {"global_batches": [[0, 2]]},
        {"global_batches": [[0, 1], [1, 3]]},
        {"global_batches": [[0, 1], [0, 2]]},
        {"ranks": [[[0, 2], [1, 3]]]},  # sequence 2 would move to an earlier step
        {"global_batch_size": 3},
        {"ranks": [[[0, 1], [2, 4]]], "dropped": [3]},
    ):
        with pytest.raises(ValueError, match="global batches must be consecutive slots that hold"):
            MicroBatchPlan.from_json(json.dumps({**fields, **broken}))
    with pytest.raises(ValueError, match="each of 5 sequences once"):
        MicroBatchPlan.from_json(json.dumps({**fields, "dropped": []}))
    with pytest.raises(ValueError, match="and costs for them"):
        MicroBatchPlan.from_json(json.dumps({**fields, "costs": [[1.0]]}))
    with pytest.raises(ValueError, match="sequence_multiple must be an integer"):
        MicroBatchPlan.from_json(json.dumps({**fields, "sequence_multiple": 0}))
    for changed in ({"max_tokens": None}, {"max_tokens": "8"}, {"global_batch_size": 0}):
        with pytest.raises(ValueError, match=r"must be an integer >= 1"):
            MicroBatchPlan.from_json(json.dumps({**fields, **changed}))
    with pytest.raises(ValueError, match="mode must be"):
        MicroBatchPlan.from_json(json.dumps({**fields, "mode": "sorted"}))


def test_slot_targets_by_hand() -> None:
    # 2 ranks: 9 and 8 lead the first slot, 3 the second; 9 + 8 + 3 + 2 + 2 = 24, 12 for a rank,
    # so that the second slot, which has 3 of these left, is no higher than its leader.
    costs = np.array([2.0, 9.0, 3.0, 8.0, 2.0])
    assert slot_targets(costs, 2, 2).tolist() == [9.0, 3.0]
    assert slot_targets(costs, 2, 1).tolist() == [12.0]
    # 4 units of 5 for 2 ranks: the level is 10 / 2.
    assert slot_targets(np.full(4, 5.0), 2, 2).tolist() == [5.0, 5.0]
    # 2 | 1 + 1 in one slot costs the least, so that nothing is left for the second.
    assert slot_targets(np.array([2.0, 1.0, 1.0, 0.0]), 2, 2).tolist() == [2.0, 0.0]
    # More slots than units, and work for one rank only.
    assert slot_targets(np.array([6.0]), 2, 3).tolist() == [6.0, 0.0, 0.0]
    assert slot_targets(np.array([6.0, 1.0, 1.0, 1.0, 1.0]), 1, 3).tolist() == [6.0, 2.0, 2.0]


@pytest.mark.parametrize("cost", ["tokens", "attention"])
@pytest.mark.parametrize("kind", ["pareto", "long pareto", "lognormal", "uniform"])
def test_the_slowest_rank_takes_little_more_than_the_mean(kind, cost) -> None:
    rng = np.random.default_rng(7)
    lengths = {
        "pareto": 100 * (1 + rng.pareto(1.3, 512)),
        "long pareto": 300 * (1 + rng.pareto(1.3, 512)),
        "lognormal": rng.lognormal(6, 1, 512),
        "uniform": rng.integers(1, 4096, 512),
    }[kind]
    lengths = lengths.astype(int).clip(1, 4096)
    # At 4,096 tokens attention takes 8 % on top of the other layers, as in a model of 8 B.
    per_pair = 0.08 / 4096 if cost == "attention" else 0.0
    metrics = plan_micro_batches(
        lengths,
        max_tokens=4096,
        num_ranks=8,
        cost=lambda lengths: lengths + per_pair * lengths**2,
    ).metrics()
    fewest = -(-lengths.sum() // (8 * 4096))
    assert metrics["num_micro_batches"] <= fewest + 1
    assert metrics["rank_imbalance"] <= 1.02


@pytest.mark.parametrize(("cost_of_4", "num_slots"), [(4.0, 2), (0.05, 1)])
def test_a_slot_more_must_save_1_percent_of_the_step(cost_of_4, num_slots) -> None:
    # 6 + 4 | 5 + 5 fill one slot, at the cost of 6 and 4; 6 | 4 and 5 | 5 cost only that of 6.
    costs = np.array([0, 0, 0, 0, cost_of_4, 0, 10])
    plan = plan_micro_batches(
        [6, 5, 4, 5], max_tokens=10, num_ranks=2, cost=lambda lengths: costs[lengths]
    )
    assert plan.num_micro_batches == num_slots
