"""A PackedBatch: the way back from positions to tokens, and the forms that others take."""

import pytest
import torch
from burnish_packing.torch import Span
from burnish_packing.torch.batch import PackedBatch
from burnish_packing.torch.collate import empty_batch, pack_sequences, pad_sequences
from hypothesis import given
from hypothesis import strategies as st

TOKENS = torch.tensor([11, 12, 13, 21, 31, 32])
LENGTHS = [3, 1, 2]


def shared_prefix_batch() -> PackedBatch:
    """Two completions, [3] and [4, 5], behind one prompt [1, 2]."""
    return pack_sequences(
        torch.tensor([1, 2, 3, 1, 2, 4, 5]),
        [3, 4],
        token_mask=torch.tensor([0, 0, 1, 0, 0, 1, 1], dtype=torch.bool),
        prefix_ids=[0, 0],
        prefix_lengths=[2, 2],
    )


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    pad_multiple=st.integers(1, 8),
    sequence_multiple=st.sampled_from([1, 2, 4, 8]),
    fill=st.none() | st.integers(0, 9),
    packed=st.booleans(),
)
def test_unpack_undoes_the_layout(lengths, pad_multiple, sequence_multiple, fill, packed) -> None:
    token_ids = torch.arange(1, sum(lengths) + 1)
    features = torch.stack([token_ids.double(), -token_ids.double()], 1)
    arguments = {"columns": {"features": features, "odd": token_ids % 2 == 1}}
    if packed:
        arguments["sequence_multiple"] = sequence_multiple
        used = sum(-(-n // sequence_multiple) * sequence_multiple for n in lengths)
        multiple = {"pad_multiple": pad_multiple} if fill is None else {"fill_to": used + fill}
        batch = pack_sequences(token_ids, lengths, **multiple, **arguments)
    else:
        extra = {} if fill is None else {"num_rows": len(lengths) + fill}
        batch = pad_sequences(token_ids, lengths, pad_multiple=pad_multiple, **extra, **arguments)

    assert torch.equal(batch.unpack(batch.token_ids), token_ids)
    assert torch.equal(batch.unpack(batch.columns["features"]), features)
    assert torch.equal(batch.unpack(batch.columns["odd"]), token_ids % 2 == 1)
    # Padding holds 0 in every column: nothing but the tokens is in the sums.
    assert int(batch.token_ids.sum()) == int(token_ids.sum())
    assert batch.columns["features"].shape == (*batch.token_ids.shape, 2)
    assert batch.columns["features"].sum().abs() < 1e-9
    assert int(batch.columns["odd"].sum()) == int((token_ids % 2).sum())
    rows = batch.unpack_rows(batch.token_ids, padding=-1)
    assert rows.shape == (len(lengths), max(lengths))
    for row, expected in zip(rows, token_ids.split(lengths), strict=True):
        assert row[: len(expected)].tolist() == expected.tolist()
        assert (row[len(expected) :] == -1).all()
    # k sequences, k first tokens that nothing scores.
    assert len(batch.labels) == len(token_ids) - len(lengths)


@pytest.mark.parametrize("collate", [pack_sequences, pad_sequences])
def test_unpack_and_unpack_rows_are_differentiable(collate) -> None:
    batch = collate(TOKENS, LENGTHS, pad_multiple=4)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(
        *batch.token_ids.shape, 2, dtype=torch.float64, generator=generator, requires_grad=True
    )
    assert torch.autograd.gradcheck(batch.unpack, values)
    assert torch.autograd.gradcheck(batch.unpack_rows, values)


def test_unpack_repeats_a_shared_prefix_and_sums_its_gradient() -> None:
    batch = shared_prefix_batch()
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.spans == (Span(0, 2), Span(2, 3, 0, 2), Span(3, 5, 0, 2))
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    values = torch.arange(5.0, dtype=torch.float64)[None].requires_grad_()
    flat = batch.unpack(values)
    assert flat.tolist() == [0, 1, 2, 0, 1, 3, 4]
    # Of flat tokens 0 to 6 with these weights, the prefix's 1 and 10 meet 1000 and 10000.
    weights = torch.tensor([1, 10, 100, 1000, 10_000, 100_000, 1_000_000], dtype=torch.float64)
    (flat * weights).sum().backward()
    assert values.grad.tolist() == [[1001, 10_010, 100, 100_000, 1_000_000]]
    assert torch.autograd.gradcheck(batch.unpack, values)


def test_labels_for_a_cross_entropy_and_for_hugging_face() -> None:
    mask = torch.tensor([False, False, True, False, False, True])
    packed = pack_sequences(TOKENS, LENGTHS, token_mask=mask, pad_multiple=4)
    assert packed.shifted_labels().tolist() == [[-100, 13, -100, -100, 32, -100, -100, -100]]
    assert packed.aligned_labels().tolist() == [[-100, -100, 13, -100, -100, 32, -100, -100]]
    assert packed.aligned_labels(ignore_index=-1).tolist() == [[-1, -1, 13, -1, -1, 32, -1, -1]]
    padded = pad_sequences(TOKENS, LENGTHS)
    assert padded.shifted_labels().tolist() == [[12, 13, -100], [-100] * 3, [32, -100, -100]]
    assert padded.aligned_labels().tolist() == [[-100, 12, 13], [-100] * 3, [-100, 32, -100]]


def test_labels_that_a_shared_prefix_does_not_have_are_refused() -> None:
    batch = shared_prefix_batch()
    with pytest.raises(ValueError, match="one token per output"):
        batch.shifted_labels()
    with pytest.raises(ValueError, match="right after the one that scores it"):
        batch.aligned_labels()


def test_cu_seqlens_have_the_fill_as_a_span_of_its_own() -> None:
    batch = pack_sequences(TOKENS, LENGTHS, sequence_multiple=2, fill_to=16)
    # 3 + 1 pad, 1 + 1 pad, 2, and 8 of fill: the last sequence's span is not inflated.
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 5, 6, 8, 16]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 8
    assert pad_sequences(TOKENS, LENGTHS).max_seqlen == 3
    for wrong in (pad_sequences(TOKENS, LENGTHS), shared_prefix_batch()):
        with pytest.raises(ValueError, match="a pack without shared prefixes"):
            _ = wrong.cu_seqlens


@pytest.mark.parametrize(("shape", "packed"), [((1, 8), True), ((3, 4), False)])
def test_an_empty_batch_leaves_a_graph_that_counts_nothing(shape, packed) -> None:
    batch = empty_batch(shape=shape, packed=packed)
    values = torch.ones(*shape, 2, requires_grad=True)
    assert batch.unpack(values).shape == (0, 2)
    assert batch.unpack_rows(values).shape == (0, 0, 2)
    loss = batch.unpack(values).sum() + batch.unpack_rows(values).sum()
    loss.backward()
    assert loss.item() == 0
    assert values.grad.abs().sum() == 0
    assert (batch.aligned_labels() == -100).all()
    assert (batch.shifted_labels() == -100).all()
    assert batch.max_seqlen == shape[1]


def batch_with_columns() -> PackedBatch:
    return pack_sequences(TOKENS, LENGTHS, columns={"advantages": torch.ones(6)})


def tensors_of(batch: PackedBatch) -> list[torch.Tensor]:
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    return [*tensors, *batch.columns.values(), *batch.sequence_columns.values()]


def test_to_moves_every_tensor_and_column() -> None:
    moved = batch_with_columns().to("meta", non_blocking=True)
    assert len(tensors_of(moved)) == 7
    assert all(tensor.is_meta for tensor in tensors_of(moved))
    assert moved.lengths == (3, 1, 2)


def test_pin_memory_pins_every_tensor(monkeypatch) -> None:
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = batch_with_columns().pin_memory()
    assert [id(tensor) for tensor in tensors_of(batch)] == [id(tensor) for tensor in pinned]
    assert batch.token_ids.tolist() == [TOKENS.tolist()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pinned_batch_goes_to_the_gpu_and_back() -> None:
    batch = batch_with_columns().pin_memory()
    assert all(tensor.is_pinned() for tensor in tensors_of(batch))
    moved = batch.to("cuda", non_blocking=True)
    assert torch.equal(moved.unpack(moved.token_ids).cpu(), TOKENS)


def test_batches_compare_by_identity() -> None:
    batch = batch_with_columns()
    assert batch == batch
    assert batch != batch_with_columns()


def test_values_of_another_shape_are_refused() -> None:
    batch = batch_with_columns()
    with pytest.raises(ValueError, match=r"\(1, 6\), got \(6, 2\)"):
        batch.unpack(torch.zeros(6, 2))
