"""Plans behind a real DataLoader: coverage, one order everywhere, steps, shapes."""

import json
import subprocess
import sys
from itertools import groupby

import numpy as np
import pytest
import torch
from burnish_packing import plan_micro_batches
from burnish_packing.torch.loader import PlannedDataset, TokenBudgetBatchSampler
from burnish_packing.torch.rows import PackingCollator
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

LENGTHS = [5, 1, 9, 3, 3, 7, 2, 8, 4, 6, 1, 2, 5]


def rows_of(lengths) -> list[dict]:
    """Row i holds the token i + 1, so that a batch tells which rows it has."""
    return [{"token_ids": [i + 1] * n} for i, n in enumerate(lengths)]


def loader_of(sampler, lengths=LENGTHS, **arguments) -> DataLoader:
    dataset = PlannedDataset(rows_of(lengths))
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=PackingCollator(), **arguments)


def rows_in(batch) -> list[int]:
    """The data set indices that a batch holds, read from its tokens."""
    flat = batch.unpack(batch.token_ids).split(list(batch.lengths))
    return [int(tokens[0]) - 1 for tokens in flat]


@given(
    lengths=st.lists(st.integers(1, 16), max_size=30),
    num_ranks=st.integers(1, 3),
    mode=st.sampled_from(["packed", "padded"]),
    global_batch_size=st.none() | st.integers(1, 9),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_ranks_cover_everything_once_in_equal_numbers_of_batches(
    lengths, num_ranks, mode, global_batch_size, drop_last, shuffle, epoch
) -> None:
    samplers = [
        TokenBudgetBatchSampler(
            lengths,
            max_tokens=16,
            num_ranks=num_ranks,
            rank=rank,
            mode=mode,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last and global_batch_size is not None,
        )
        for rank in range(num_ranks)
    ]
    batches = []
    for sampler in samplers:
        sampler.set_epoch(epoch)
        batches.append(list(sampler))
    assert {len(sampler) for sampler in samplers} == {len(own) for own in batches}
    assert len({len(own) for own in batches}) == 1
    dropped = samplers[0].dropped
    assert sorted([*dropped, *(i for own in batches for batch in own for i in batch)]) == list(
        range(len(lengths))
    )
    assert len(dropped) == (len(lengths) % global_batch_size if samplers[0].plan.dropped else 0)
    # Every step but the last has exactly its number of sequences over the ranks.
    sizes = [
        sum(len(batch) for own in batches for batch in own[start:end])
        for start, end in samplers[0].global_batches
    ]
    full = global_batch_size or max(len(lengths), 1)
    assert sizes[:-1] == [full] * (len(sizes) - 1)
    for own in batches:
        for batch in own:
            assert batch.micro_batch.lengths == tuple(lengths[i] for i in batch)
            assert np.prod(batch.micro_batch.shape) <= 16
            start, end = samplers[0].global_batches[batch.micro_batch.global_batch]
            assert start <= own.index(batch) < end or not batch


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12), epoch=st.integers(0, 5))
def test_pairs_stay_together_and_are_shuffled_as_one(lengths, epoch) -> None:
    lengths = lengths + lengths  # row i and row i + N / 2 are chosen and rejected
    units = list(range(len(lengths) // 2)) * 2
    sampler = TokenBudgetBatchSampler(
        lengths, max_tokens=24, units=units, global_batch_size=4, seed=3
    )
    sampler.set_epoch(epoch)
    for batch in sampler:
        assert sorted(batch) == sorted(
            i for pair in {units[i] for i in batch} for i in (pair, pair + len(units) // 2)
        )


def test_epochs_and_seeds_give_different_orders() -> None:
    def order(seed: int, epoch: int, **arguments) -> list[list[int]]:
        sampler = TokenBudgetBatchSampler(LENGTHS, max_tokens=9, seed=seed, **arguments)
        sampler.set_epoch(epoch)
        return [list(batch) for batch in sampler]

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(0, 0) == orders[0]
    assert order(0, 0, shuffle=False) == order(1, 1, shuffle=False)


def test_two_processes_with_one_seed_have_one_order() -> None:
    code = (
        "import json, random, numpy, torch\n"
        "from burnish_packing.torch.loader import TokenBudgetBatchSampler\n"
        "numpy.random.seed({0}); random.seed({0}); torch.manual_seed({0})\n"
        "sampler = TokenBudgetBatchSampler([5, 1, 9, 3, 3, 7, 2, 8] * 9, max_tokens=16, seed=7)\n"
        "sampler.set_epoch(2)\n"
        "print(json.dumps([list(batch) for batch in sampler]))\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code.format(seed)],
            env={"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    ]
    assert printed[0] == printed[1]
    assert sorted(i for batch in json.loads(printed[0]) for i in batch) == list(range(72))


def test_global_random_states_stay_as_they_are() -> None:
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    list(TokenBudgetBatchSampler(LENGTHS, max_tokens=9))
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_short_last_batch_is_dropped_and_counted() -> None:
    sampler = TokenBudgetBatchSampler([9] * 3, max_tokens=9, global_batch_size=5, drop_last=True)
    assert list(sampler) == []
    assert len(sampler) == 0
    assert sorted(sampler.dropped) == [0, 1, 2]
    assert sampler.plan.metrics()["num_dropped"] == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_two_ranks_through_data_loaders_run_one_shape_and_every_row(mode, num_workers) -> None:
    batches = []
    for rank in range(2):
        sampler = TokenBudgetBatchSampler(
            LENGTHS,
            max_tokens=24,
            num_ranks=2,
            rank=rank,
            mode=mode,
            global_batch_size=5,
            pad_multiple=4,
        )
        loader = loader_of(sampler, num_workers=num_workers)
        batches.append(list(loader))
        assert len(loader) == len(batches[-1])
        assert [list(m.indices) for m in sampler.micro_batches()] == list(map(rows_in, batches[-1]))
    assert sorted(i for own in batches for b in own for i in rows_in(b)) == list(range(13))
    for one, other in zip(*batches, strict=True):
        assert one.micro_batch.global_batch == other.micro_batch.global_batch
        assert one.token_ids.shape[1] % 4 == 0 or not one.lengths
        if mode == "padded":
            assert one.token_ids.shape == other.token_ids.shape


def test_workers_that_persist_follow_the_epochs() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, max_tokens=10)
    loader = loader_of(sampler, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append([rows_in(batch) for batch in loader])
        assert epochs[-1] == [list(m.indices) for m in sampler.micro_batches()]
    assert epochs[0] != epochs[1] != epochs[2]


def step_gradients(model: nn.Module, num_ranks: int, drop_rank: int | None = None, **arguments):
    """The gradient of each step of an epoch, summed over the ranks: mean over trained tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"token_ids": torch.randint(0, 11, (n,), generator=generator)} for n in LENGTHS]
    ranks = []
    for rank in range(num_ranks):
        sampler = TokenBudgetBatchSampler(
            LENGTHS, num_ranks=num_ranks, rank=rank, global_batch_size=5, seed=1, **arguments
        )
        loader = DataLoader(
            PlannedDataset(rows), batch_sampler=sampler, collate_fn=PackingCollator()
        )
        by_step = groupby(loader, key=lambda batch: batch.micro_batch.global_batch)
        ranks.append([list(step) for _, step in by_step])
        assert [len(step) for step in ranks[-1]] == [b - a for a, b in sampler.global_batches]
    gradients = []
    for steps in zip(*ranks, strict=True):
        model.zero_grad()
        num_scored = sum(len(batch.labels) for step in steps for batch in step)
        for rank, step in enumerate(steps):
            for batch in step:
                # A model that sees the token before alone: no attention, hence no leak to hide.
                logits = model(batch.token_ids).flatten(0, 1)[batch.score_positions]
                loss = cross_entropy(logits, batch.labels, reduction="sum") / num_scored
                if rank != drop_rank:
                    loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return gradients


def test_a_step_is_the_same_on_any_number_of_ranks_in_any_mode() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)).double()
    expected = step_gradients(model, 1, max_tokens=9)
    assert len(expected) == 3
    for num_ranks, mode in [(1, "padded"), (2, "packed"), (4, "packed"), (4, "padded")]:
        actual = step_gradients(model, num_ranks, max_tokens=20, mode=mode, pad_multiple=4)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    wrong = step_gradients(model, 4, drop_rank=1, max_tokens=20)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(wrong, expected, strict=True))


def test_an_empty_slot_comes_through_a_data_loader() -> None:
    sampler = TokenBudgetBatchSampler([3, 2], max_tokens=8, num_ranks=3, rank=2, mode="padded")
    assert [list(batch) for batch in sampler] == [[]]
    (batch,) = loader_of(sampler, [3, 2])
    assert batch.token_ids.shape == (1, 3)
    assert batch.lengths == ()


def test_the_wrapped_data_set_fetches_a_batch_at_once_where_it_can() -> None:
    class Batched(list):
        def __getitems__(self, indices: list[int]) -> list[dict]:
            fetched.append(indices)
            return [self[i] for i in indices]

    fetched: list[list[int]] = []
    sampler = TokenBudgetBatchSampler([2, 2, 2], max_tokens=4, shuffle=False, num_ranks=4, rank=3)
    dataset = PlannedDataset(Batched(rows_of([2, 2, 2])))
    (batch,) = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackingCollator())
    assert batch.lengths == ()
    assert fetched == []  # nothing is asked for an empty slot
    sampler = TokenBudgetBatchSampler([2, 2], max_tokens=4, shuffle=False)
    subset = PlannedDataset(Subset(dataset.dataset, [2, 1]))
    (batch,) = DataLoader(subset, batch_sampler=sampler, collate_fn=PackingCollator())
    assert rows_in(batch) == [2, 1]
    assert fetched == [[2, 1]]
    assert len(subset) == 2
    assert subset[0] == {"token_ids": [3, 3]}
    with pytest.raises(ValueError, match="must get its batches from TokenBudgetBatchSampler"):
        list(DataLoader(dataset, batch_size=2, collate_fn=PackingCollator()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [1, 0]}, r"lengths must be >= 1, got lengths\[1\] = 0"),
        ({"rank": 1}, "rank must be an integer >= 0 and < 1, got 1"),
        ({"rank": -1}, "rank must be an integer >= 0 and < 1, got -1"),
        ({"num_ranks": 0}, "num_ranks must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"seed": 0.5}, "seed must be an integer >= 0, got 0.5"),
        ({"mode": "fixed"}, "mode must be packed or padded, got 'fixed'"),
        ({"max_tokens": 8}, r"max_tokens = 8, got length 9, padded 9 .* index"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"drop_last": True}, "drop_last must come with global_batch_size"),
        ({"units": [0, 0]}, "units must have one entry for each of 13 rows, got 2"),
        # Row 2, of 9 tokens, is in the last batch of this order but not of every one.
        (
            {"global_batch_size": 12, "drop_last": True, "max_tokens": 8},
            r"max_tokens = 8, got length 9, .* at index 2",
        ),
        (
            {"units": [0, 0, *range(2, 13)], "global_batch_size": 4},
            r"one size that divides global_batch_size = 4, got sizes \[1, 2\]",
        ),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(**{"lengths": LENGTHS, "max_tokens": 16, **arguments})


def test_groups_of_a_shared_prefix_are_packed_behind_it() -> None:
    prompts = [0, 1, 0, 1, 0, 1]
    rows = [
        {"token_ids": [90 + p, 91, i, i], "token_mask": [0, 0, 1, 1]} for i, p in enumerate(prompts)
    ]
    sampler = TokenBudgetBatchSampler(
        [4] * 6, max_tokens=8, prefix_ids=prompts, prefix_lengths=[2] * 6
    )
    loader = DataLoader(PlannedDataset(rows), batch_sampler=sampler, collate_fn=PackingCollator())
    batches = list(loader)
    assert [batch.token_ids.shape for batch in batches] == [(1, 8)] * 2
    assert {tuple(sorted(batch.micro_batch.indices)) for batch in batches} == {(0, 2, 4), (1, 3, 5)}


def test_the_plan_is_that_of_plan_micro_batches() -> None:
    sampler = TokenBudgetBatchSampler(
        LENGTHS, max_tokens=12, num_ranks=2, global_batch_size=6, shuffle=False, pad_multiple=2
    )
    plan = plan_micro_batches(
        LENGTHS, max_tokens=12, num_ranks=2, global_batch_size=6, pad_multiple=2
    )
    assert sampler.plan == plan
    assert sampler.micro_batches() == list(plan.micro_batches(0))
    assert sampler.global_batches == plan.global_batches
