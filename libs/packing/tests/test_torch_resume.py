"""A sampler goes on in the middle of an epoch exactly, or refuses to."""

import json
from itertools import islice

import pytest
from burnish_packing.torch.loader import PlannedDataset, TokenBudgetBatchSampler
from burnish_packing.torch.rows import PackingCollator
from torch.utils.data import DataLoader

LENGTHS = [5, 1, 9, 3, 3, 7, 2, 8, 4, 6, 1, 2, 5]


def batches_of(sampler: TokenBudgetBatchSampler, num_workers: int):
    """The data set indices in each batch of a DataLoader, read from the tokens."""
    dataset = PlannedDataset([{"token_ids": [i] * n} for i, n in enumerate(LENGTHS)])
    loader = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=PackingCollator(), num_workers=num_workers
    )
    for batch in loader:
        sequences = batch.unpack(batch.token_ids).split(list(batch.lengths))
        yield [int(tokens[0]) for tokens in sequences]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_used", [0, 3, "all"])
def test_resuming_in_the_middle_equals_going_on(num_workers, num_used) -> None:
    def sampler() -> TokenBudgetBatchSampler:
        return TokenBudgetBatchSampler(LENGTHS, max_tokens=10, global_batch_size=4, seed=5)

    uninterrupted = []
    reference = sampler()
    for epoch in range(3):
        reference.set_epoch(epoch)
        uninterrupted += list(batches_of(reference, 0))

    first = sampler()
    used = list(batches_of(first, num_workers))
    first.set_epoch(1)
    wanted = len(first) if num_used == "all" else num_used
    # Workers have fetched more by now than the loop has used.
    used += list(islice(batches_of(first, num_workers), wanted))
    state = json.loads(json.dumps(first.state_dict(wanted)))

    second = sampler()
    second.load_state_dict(state)
    assert (second.epoch, second.start) == (1, wanted)
    assert len(second) == len(first)  # of the whole epoch
    for epoch in range(second.epoch, 3):
        second.set_epoch(epoch)
        used += list(batches_of(second, num_workers))
    assert used == uninterrupted


def test_only_the_first_iteration_after_a_resume_is_short() -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, max_tokens=9, shuffle=False)
    everything = [list(batch) for batch in sampler]
    sampler.load_state_dict(sampler.state_dict(2))
    assert [list(batch) for batch in sampler] == everything[2:]
    assert [list(batch) for batch in sampler] == everything
    sampler.load_state_dict(sampler.state_dict(2))
    sampler.set_epoch(1)
    assert [list(batch) for batch in sampler] == everything


def test_one_ranks_state_serves_all() -> None:
    def sampler(rank: int) -> TokenBudgetBatchSampler:
        return TokenBudgetBatchSampler(LENGTHS, max_tokens=9, num_ranks=2, rank=rank)

    other = sampler(1)
    expected = [list(batch) for batch in other][1:]
    other.load_state_dict(sampler(0).state_dict(1))
    assert [list(batch) for batch in other] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "the seed of its state, got 0 in the state and 1 here"),
        ({"num_ranks": 2}, "the num_ranks of its state, got 1 in the state and 2 here"),
        ({"lengths": LENGTHS[:-1]}, "num_sequences of its state, got 13 in the state and 12 here"),
        (
            {"lengths": [*LENGTHS[:-1], 4]},
            r"the lengths of its state, got \w{16} in .* \w{16} here",
        ),
        ({"max_tokens": 12}, "the max_tokens of its state, got 9 in the state and 12 here"),
        ({"global_batch_size": 4}, "global_batch_size of its state, got None in the state and 4"),
        (
            {"cost": lambda lengths: lengths**4},
            "the plan of its state, got another one for epoch 2",
        ),
    ],
)
def test_a_state_of_another_run_is_refused(changes, message) -> None:
    arguments = {"lengths": LENGTHS, "max_tokens": 9}
    saved = TokenBudgetBatchSampler(**arguments)
    saved.set_epoch(2)
    sampler = TokenBudgetBatchSampler(**{**arguments, **changes})
    expected = [list(batch) for batch in sampler]
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(saved.state_dict(1))
    assert (sampler.epoch, sampler.start) == (0, 0)
    assert [list(batch) for batch in sampler] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "schema_version of its state, got 2"),
        ({"epoch": -1}, "epoch must be an integer >= 0, got -1"),
        ({"epoch": True}, "epoch must be an integer >= 0, got True"),
        ({"num_used": 99}, r"num_used must be an integer >= 0 and < \d+, got 99"),
        ({"num_used": None}, "num_used must be .* got None"),
        ({"plan": None}, "the plan of its state"),
    ],
)
def test_a_broken_state_is_refused(changes, message) -> None:
    sampler = TokenBudgetBatchSampler(LENGTHS, max_tokens=9)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(1), **changes})
