"""PackedBatch, packed and padded, by hand."""

import pytest
import torch
from burnish_packing import plan_micro_batches
from burnish_packing.torch import Span, empty_batch, pack_sequences, pad_sequences
from hypothesis import given
from hypothesis import strategies as st

TOKENS = torch.tensor([11, 12, 13, 21, 31, 32])
LENGTHS = [3, 1, 2]


def test_packed_by_hand() -> None:
    batch = pack_sequences(TOKENS, LENGTHS, pad_multiple=4, pad_token_id=9)
    assert batch.token_ids.tolist() == [[11, 12, 13, 21, 31, 32, 9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch.spans == (Span(0, 3), Span(3, 4), Span(4, 6), Span(6, 8))
    # Three sequences: three first tokens without a score.
    assert batch.target_positions.tolist() == [1, 2, 5]
    assert batch.score_positions.tolist() == [0, 1, 4]
    assert batch.labels.tolist() == [12, 13, 32]
    assert batch.lengths == (3, 1, 2)


def test_padded_by_hand() -> None:
    mask = torch.tensor([False, False, True, False, False, True])
    batch = pad_sequences(TOKENS, LENGTHS, token_mask=mask, pad_multiple=4, pad_token_id=9)
    assert batch.token_ids.tolist() == [[11, 12, 13, 9], [21, 9, 9, 9], [31, 32, 9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.spans is None
    assert batch.target_positions.tolist() == [2, 5]
    assert batch.score_positions.tolist() == [1, 8]
    assert batch.labels.tolist() == [13, 32]


def test_a_shared_prefix_by_hand() -> None:
    # Sequences 0 and 2 begin with 1, 2; sequence 1 stands alone; sequence 3 is the prefix itself.
    token_ids = torch.tensor([1, 2, 3, 4, 7, 8, 1, 2, 5, 1, 2])
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0], dtype=torch.bool)
    batch = pack_sequences(
        token_ids,
        [4, 2, 3, 2],
        token_mask=mask,
        prefix_ids=[5, -1, 5, 5],
        prefix_lengths=[2, 0, 2, 2],
    )
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 7, 8, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.spans == (Span(0, 2), Span(2, 4, 0, 2), Span(4, 6), Span(6, 7, 0, 2))
    # The prefix's last position scores the first token of both completions, 3 and 5.
    assert batch.score_positions.tolist() == [1, 2, 4, 1]
    assert batch.labels.tolist() == [3, 4, 8, 5]
    assert batch.target_positions.tolist() == [2, 3, 5, 8]
    scattered = batch.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert scattered.tolist() == [0, 0, 1, 2, 0, 3, 0, 0, 4, 0, 0]


def test_scatter_is_differentiable() -> None:
    batch = pack_sequences(TOKENS, LENGTHS)
    scored = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    flat = batch.scatter(scored)
    assert flat.tolist() == [0, 1, 2, 0, 0, 3]
    (flat * torch.arange(6)).sum().backward()
    assert scored.grad.tolist() == [1, 2, 5]
    with pytest.raises(ValueError, match=r"\(3,\), got \(2,\)"):
        batch.scatter(scored[:2])


def test_an_empty_batch_is_one_token_that_counts_nothing() -> None:
    batch = empty_batch(pad_token_id=9)
    assert batch.token_ids.tolist() == [[9]]
    assert batch.position_ids.tolist() == [[0]]
    assert batch.spans == (Span(0, 1),)
    assert batch.lengths == ()
    flat = batch.scatter(torch.zeros(0, requires_grad=True))
    assert flat.shape == (0,)
    assert flat.requires_grad


def test_to_moves_every_tensor() -> None:
    moved = pack_sequences(TOKENS, LENGTHS).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert all(tensor.is_meta for tensor in tensors)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    collate=st.sampled_from([pack_sequences, pad_sequences]),
    pad_multiple=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_every_trained_token_is_scored_by_the_token_before_it(
    lengths, collate, pad_multiple, seed
) -> None:
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randperm(num_tokens, generator=generator) + 1
    mask = torch.rand(num_tokens, generator=generator) < 0.5
    mask[torch.tensor([0, *lengths]).cumsum(0)[:-1]] = False
    batch = collate(token_ids, lengths, token_mask=mask, pad_multiple=pad_multiple)
    assert batch.token_ids.shape[1] % pad_multiple == 0
    before = batch.token_ids.flatten()[batch.score_positions]
    assert torch.equal(before, token_ids[mask.nonzero().squeeze(1) - 1])
    assert torch.equal(batch.scatter(batch.labels), torch.where(mask, token_ids, 0))


@pytest.mark.parametrize("collate", [pack_sequences, pad_sequences])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 2]}, r"shape \(5,\), the sum of lengths, got torch.int64 of shape \(6,\)"),
        ({"lengths": []}, r"at least one sequence .* use empty_batch\(\)"),
        ({"lengths": [3, 0, 3]}, r"each at least one token, got \[3, 0, 3\]"),
        ({"token_ids": TOKENS.float()}, "must be int64 .* got torch.float32"),
        ({"token_mask": torch.ones(6)}, "token_mask must be bool .* got torch.float32"),
        (
            {"token_mask": torch.ones(5, dtype=torch.bool)},
            r"\(6,\), got torch.bool of shape \(5,\)",
        ),
        ({"token_mask": torch.arange(6) == 3}, "got True in sequence 1"),
        ({"pad_multiple": 0}, "pad_multiple must be an integer >= 1, got 0"),
    ],
)
def test_errors_say_what_was_got(collate, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        collate(**{"token_ids": TOKENS, "lengths": LENGTHS, **arguments})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.tensor([1, 2, 3, 1, 9, 3])}, "got other tokens in group 5"),
        ({"token_mask": None}, "False in a shared prefix, got True in sequence 0 of group 5"),
        ({"prefix_lengths": [2, 1]}, "one prefix length, got 2 and others in group 5"),
        ({"prefix_lengths": None}, "must come together"),
    ],
)
def test_errors_of_shared_prefixes(changes, message) -> None:
    arguments = {
        "token_ids": torch.tensor([1, 2, 3, 1, 2, 3]),
        "lengths": [3, 3],
        "token_mask": torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool),
        "prefix_ids": [5, 5],
        "prefix_lengths": [2, 2],
    }
    pack_sequences(**arguments)
    with pytest.raises(ValueError, match=message):
        pack_sequences(**{**arguments, **changes})


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    mode=st.sampled_from(["packed", "padded"]),
    num_ranks=st.integers(1, 3),
)
def test_plan_pack_scatter_and_inverse_are_the_identity(lengths, mode, num_ranks) -> None:
    rows = (torch.arange(sum(lengths)) + 1).split(lengths)
    plan = plan_micro_batches(
        lengths, max_tokens=24, mode=mode, num_ranks=num_ranks, pad_multiple=4
    )
    collate = pack_sequences if mode == "packed" else pad_sequences
    results = []
    for slot in [slot for rank in plan.ranks for slot in rank if slot]:
        batch = collate(
            torch.cat([rows[i] for i in slot]),
            [lengths[i] for i in slot],
            pad_multiple=plan.pad_multiple,
        )
        assert batch.token_ids.numel() <= 24
        results += batch.scatter(batch.labels).split(list(batch.lengths))
    for i, row in zip(plan.inverse().tolist(), rows, strict=True):
        assert results[i][1:].tolist() == row[1:].tolist()
        assert results[i][0] == 0
