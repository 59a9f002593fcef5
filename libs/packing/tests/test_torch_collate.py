"""PackedBatch, packed and padded, by hand."""

import pytest
import torch
from burnish_packing import plan_micro_batches
from burnish_packing.torch import PackedBatch, Span, empty_batch, pack_sequences, pad_sequences
from burnish_packing.torch.collate import lay_out
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
        (
            {"token_mask": torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)},
            "False in a shared prefix, got True in sequence 0 of group 5",
        ),
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


def test_columns_are_laid_out_like_the_tokens() -> None:
    columns = {
        "advantages": torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.bfloat16),
        "rope": torch.tensor([[1, -1], [2, -2], [3, -3], [4, -4], [5, -5], [6, -6]]),
        "flags": torch.ones(6, dtype=torch.bool),
    }
    packed = pack_sequences(TOKENS, LENGTHS, columns=columns, sequence_multiple=2, pad_token_id=9)
    assert packed.token_ids.tolist() == [[11, 12, 13, 9, 21, 9, 31, 32]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 0, 0, 0, 1]]
    assert packed.spans == (Span(0, 3), Span(3, 4), Span(4, 5), Span(5, 6), Span(6, 8))
    assert packed.columns["advantages"].tolist() == [[1, 2, 3, 0, 4, 0, 5, 6]]
    assert packed.columns["advantages"].dtype == torch.bfloat16
    assert packed.columns["rope"][0, :, 1].tolist() == [-1, -2, -3, 0, -4, 0, -5, -6]
    assert packed.columns["flags"].tolist() == [[True, True, True, False, True, False, True, True]]
    padded = pad_sequences(TOKENS, LENGTHS, columns=columns)
    assert padded.columns["advantages"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert padded.columns["rope"].shape == (3, 3, 2)


def test_a_column_is_differentiable() -> None:
    column = torch.tensor([1.0, 2, 3, 4, 5, 6], requires_grad=True)
    batch = pack_sequences(TOKENS, LENGTHS, columns={"weights": column}, pad_multiple=4)
    (batch.columns["weights"] * torch.arange(8)).sum().backward()
    assert column.grad.tolist() == [0, 1, 2, 3, 4, 5]


def shared(columns: dict[str, torch.Tensor]) -> PackedBatch:
    return pack_sequences(
        torch.tensor([7, 1, 2, 3, 1, 2, 4]),
        [1, 3, 3],
        token_mask=torch.tensor([0, 0, 0, 1, 0, 0, 1], dtype=torch.bool),
        columns=columns,
        prefix_ids=[-1, 8, 8],
        prefix_lengths=[0, 2, 2],
    )


def test_a_column_is_stored_once_for_a_shared_prefix_where_it_must_be_equal() -> None:
    nan = float("nan")
    batch = shared({"advantages": torch.tensor([9, nan, 0, 3, nan, 0, 4])})
    assert str(batch.columns["advantages"].tolist()) == "[[9.0, nan, 0.0, 3.0, 4.0]]"
    with pytest.raises(ValueError, match=r"column 'advantages' must be equal .* in group 8"):
        shared({"advantages": torch.tensor([9, 0, 0, 3, 0, 1.0, 4])})
    rope = torch.zeros(7, 2)
    rope[4, 1] = 1
    with pytest.raises(ValueError, match=r"column 'rope' must be equal .* in group 8"):
        shared({"rope": rope})


def test_rows_may_have_the_shape_that_other_ranks_have() -> None:
    batch = pad_sequences(TOKENS, LENGTHS, num_rows=4, row_length=5, pad_token_id=9)
    assert batch.token_ids.tolist() == [
        [11, 12, 13, 9, 9],
        [21, 9, 9, 9, 9],
        [31, 32, 9, 9, 9],
        [9, 9, 9, 9, 9],
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert batch.lengths == (3, 1, 2)
    assert batch.unpack(batch.token_ids).tolist() == TOKENS.tolist()


def test_empty_batches_have_the_shape_and_columns_of_their_slot() -> None:
    columns = {"rope": torch.zeros(0, 2, dtype=torch.int32)}
    packed = empty_batch(9, shape=(1, 4), columns=columns)
    assert packed.token_ids.tolist() == [[9] * 4]
    assert packed.spans == (Span(0, 4),)
    assert packed.columns["rope"].shape == (1, 4, 2)
    assert packed.columns["rope"].dtype == torch.int32
    padded = empty_batch(9, shape=(2, 3), packed=False)
    assert padded.token_ids.tolist() == [[9] * 3] * 2
    assert padded.position_ids.tolist() == [[0, 1, 2]] * 2
    assert padded.spans is None
    with pytest.raises(ValueError, match=r"one row, got shape \(2, 3\)"):
        empty_batch(shape=(2, 3))
    with pytest.raises(ValueError, match="positions of shape must be an integer >= 1, got 0"):
        empty_batch(shape=(1, 0))


@pytest.mark.parametrize(
    ("collate", "arguments", "message"),
    [
        (pack_sequences, {"columns": {"x": torch.ones(5)}}, r"'x' .* per token, 6, got \(5,\)"),
        (pad_sequences, {"columns": {"x": torch.tensor(1)}}, r"per token, 6, got \(\)"),
        (pad_sequences, {"columns": {"x": [0] * 6}}, "must be a tensor .* got list"),
        (pack_sequences, {"fill_to": 5}, "fill_to must hold the 6 positions"),
        (pack_sequences, {"fill_to": 8, "pad_multiple": 4}, "come without pad_multiple"),
        (pad_sequences, {"num_rows": 2}, "num_rows must hold the 3 sequences, got 2"),
        (pad_sequences, {"row_length": 2}, "hold the longest sequence, 3 tokens"),
        (pad_sequences, {"row_length": 4, "pad_multiple": 4}, "come without pad_multiple"),
    ],
)
def test_errors_of_shapes_and_columns(collate, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        collate(TOKENS, LENGTHS, **arguments)


def test_lay_out_by_hand() -> None:
    plan = plan_micro_batches([3, 1, 2], max_tokens=8, sequence_multiple=2, pad_multiple=8)
    (micro_batch,) = plan.micro_batches(0)
    rows = TOKENS.split(LENGTHS)
    columns = {"advantages": torch.arange(1.0, 7)}
    batch = lay_out(micro_batch, torch.cat([rows[i] for i in micro_batch.indices]), columns=columns)
    assert batch.micro_batch is micro_batch
    assert batch.token_ids.shape == micro_batch.shape == (1, 8)
    assert len(batch.spans) == 5
    assert batch.unpack(batch.columns["advantages"]).tolist() == [1, 2, 3, 4, 5, 6]


def test_lay_out_gives_an_empty_slot_its_shape_and_columns() -> None:
    plan = plan_micro_batches([4, 3, 2], max_tokens=8, mode="padded", num_ranks=4, pad_multiple=8)
    empty = [m for rank in range(4) for m in plan.micro_batches(rank) if not m.indices]
    nothing = torch.zeros(0, dtype=torch.int64)
    (micro_batch,) = empty
    batch = lay_out(micro_batch, nothing, columns={"x": torch.zeros(0)}, pad_token_id=9)
    assert batch.token_ids.tolist() == [[9] * 8]
    assert batch.columns["x"].tolist() == [[0] * 8]
    assert batch.spans is None
    assert batch.lengths == ()
    assert batch.micro_batch is micro_batch


def test_lay_out_keeps_the_plans_shared_prefixes() -> None:
    plan = plan_micro_batches([3, 3], max_tokens=4, prefix_ids=[8, 8], prefix_lengths=[2, 2])
    (micro_batch,) = plan.micro_batches(0)
    mask = torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool)
    batch = lay_out(micro_batch, torch.tensor([1, 2, 3, 1, 2, 4]), token_mask=mask)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4]]
    assert batch.spans == (Span(0, 2), Span(2, 3, 0, 2), Span(3, 4, 0, 2))


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_lay_out_refuses_a_plan_for_other_lengths(mode) -> None:
    (micro_batch,) = plan_micro_batches([2, 2, 2], max_tokens=6, mode=mode).micro_batches(0)
    with pytest.raises(
        ValueError, match=r"planned, of 6 tokens in all, got shape \(5,\); .* again"
    ):
        lay_out(micro_batch, TOKENS[:5])
    (nothing,) = list(plan_micro_batches([1], max_tokens=4, num_ranks=2).micro_batches(1))
    with pytest.raises(ValueError, match=r"of 0 tokens in all, got shape \(6,\)"):
        lay_out(nothing, TOKENS)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    mode=st.sampled_from(["packed", "padded", "fixed"]),
    num_ranks=st.integers(1, 3),
    sequence_multiple=st.sampled_from([1, 2, 4]),
)
def test_plan_lay_out_scatter_and_inverse_are_the_identity(
    lengths, mode, num_ranks, sequence_multiple
) -> None:
    rows = (torch.arange(sum(lengths)) + 1).split(lengths)
    plan = plan_micro_batches(
        lengths,
        max_tokens=24,
        mode=mode,
        num_ranks=num_ranks,
        pad_multiple=4,
        sequence_multiple=sequence_multiple if mode == "packed" else 1,
        micro_batch_size=2 if mode == "fixed" else None,
    )
    results = []
    shapes: list[list[tuple[int, int]]] = []
    for rank in range(num_ranks):
        shapes.append([])
        for micro_batch in plan.micro_batches(rank):
            parts = [rows[i] for i in micro_batch.indices]
            batch = lay_out(micro_batch, torch.cat([rows[0][:0], *parts]))
            assert batch.token_ids.shape == micro_batch.shape
            assert batch.token_ids.numel() <= 24
            assert batch.lengths == micro_batch.lengths
            shapes[-1].append(micro_batch.shape)
            results += batch.scatter(batch.labels).split(list(batch.lengths))
    if mode == "padded":
        assert all(ranks_shapes == shapes[0] for ranks_shapes in shapes)
    for i, row in zip(plan.inverse().tolist(), rows, strict=True):
        assert results[i][1:].tolist() == row[1:].tolist()
        assert results[i][0] == 0


def test_without_a_mask_shared_prefixes_are_not_trained() -> None:
    tokens = torch.tensor([1, 2, 3, 1, 2, 4])
    batch = pack_sequences(tokens, [3, 3], prefix_ids=[5, 5], prefix_lengths=[2, 2])
    assert batch.target_positions.tolist() == [2, 5]
