"""The Megatron form of a pack: values by hand, inverses, and context parallelism == unsharded."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from burnish_packing import plan_micro_batches
from burnish_packing.context_parallel import context_parallel_multiple, zigzag_positions
from burnish_packing.torch import empty_batch, pack_sequences, pad_sequences
from burnish_packing.torch.collate import lay_out
from burnish_packing.torch.megatron import MegatronBatch, pack_for_megatron, to_megatron
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

TOKENS = torch.tensor([11, 12, 13, 14, 15, 21, 31, 32, 33, 34])
LENGTHS = [5, 1, 4]
X = -100
SIZES = st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1), (5, 2), (8, 1)])


def test_two_ranks_by_hand() -> None:
    batch = pack_for_megatron(TOKENS, LENGTHS, context_parallel_size=2, fill_to=20)
    assert batch.token_ids.tolist() == [
        [11, 12, 13, 14, 15, 0, 0, 0, 21, 0, 0, 0, 31, 32, 33, 34, 0, 0, 0, 0]
    ]
    # Shifted inside each sequence: no token is scored from another sequence or from padding.
    assert batch.labels.tolist() == [
        [12, 13, 14, 15, X, X, X, X, X, X, X, X, 32, 33, 34, X, X, X, X, X]
    ]
    assert batch.loss_mask.tolist() == (batch.labels != X).tolist()
    assert batch.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]
    ]
    # The last sequence is 4 tokens long in both forms; the fill of 4 comes after it.
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 10, 14]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 12, 16, 20]
    assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == torch.int32
    assert batch.max_seqlen == 8
    first, second = batch.shard(0), batch.shard(1)
    assert first.token_ids.tolist() == [[11, 12, 0, 0, 21, 0, 31, 34, 0, 0]]
    assert second.token_ids.tolist() == [[13, 14, 15, 0, 0, 0, 32, 33, 0, 0]]
    # Token 13 is the other rank's, and still what rank 0's output at 12 scores.
    assert first.labels.tolist() == [[12, 13, X, X, X, X, 32, X, X, X]]
    assert second.labels.tolist() == [[14, 15, X, X, X, X, 33, 34, X, X]]
    assert first.position_ids.tolist() == [[0, 1, 1, 2, 0, 2, 0, 3, 0, 3]]
    assert second.loss_mask.tolist() == [[True, True, *[False] * 4, True, True, False, False]]


def test_one_rank_without_padding_by_hand() -> None:
    mask = torch.zeros(10, dtype=torch.bool)
    mask[[2, 9]] = True
    batch = pack_for_megatron(TOKENS, LENGTHS, token_mask=mask)
    assert batch.token_ids.tolist() == [TOKENS.tolist()]
    assert batch.labels.tolist() == [[X, 13, X, X, X, X, X, X, 34, X]]
    assert batch.cu_seqlens.tolist() == batch.cu_seqlens_padded.tolist() == [0, 5, 6, 10]
    assert batch.max_seqlen == 5
    shard = batch.shard(0)
    for field in ("token_ids", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(shard, field), getattr(batch, field))


def test_sequence_parallelism_pads_and_nothing_is_reordered() -> None:
    batch = pack_for_megatron(TOKENS, LENGTHS, tensor_parallel_size=4)
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    assert torch.equal(batch.shard(0).token_ids, batch.token_ids)


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    sizes=SIZES,
    factor=st.integers(1, 3),
    fill=st.integers(0, 2),
)
def test_shard_merge_and_unpack_are_inverse(lengths, sizes, factor, fill) -> None:
    """For every pad multiple, context size and fill; columns and tokens alike."""
    context, tensor = sizes
    multiple = factor * context_parallel_multiple(context, tensor)
    token_ids = torch.arange(1, sum(lengths) + 1)
    features = torch.stack([token_ids.double(), -token_ids.double()], 1)
    used = sum(-(-length // multiple) * multiple for length in lengths)
    packed = pack_sequences(
        token_ids,
        lengths,
        columns={"features": features},
        sequence_multiple=multiple,
        fill_to=used + fill * multiple,
    )
    batch = to_megatron(
        packed,
        context_parallel_size=context,
        tensor_parallel_size=tensor,
    )
    shards = [batch.shard(rank) for rank in range(context)]
    for shard in shards:
        assert shard.token_ids.shape == (1, packed.token_ids.shape[1] // context)
        assert shard.token_ids.shape[1] % tensor == 0
    for name in ("token_ids", "labels", "loss_mask", "position_ids"):
        merged = batch.merge([getattr(shard, name) for shard in shards])
        assert torch.equal(merged, getattr(batch, name))
    merged = batch.merge([shard.columns["features"] for shard in shards])
    assert torch.equal(batch.unpack(merged), features)
    rows = batch.unpack_rows(merged)
    assert rows.shape == (len(lengths), max(lengths), 2)
    for row, expected in zip(rows, features.split(lengths), strict=True):
        assert torch.equal(row[: len(expected)], expected)
        assert not row[len(expected) :].any()
    # Lengths can be read back from both forms.
    assert batch.cu_seqlens.diff().tolist() == [*lengths, *([fill * multiple] if fill else [])]
    assert batch.cu_seqlens_padded[-1] == packed.token_ids.shape[1]
    assert int(batch.loss_mask.sum()) == sum(lengths) - len(lengths)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    sizes=SIZES,
    fill=st.integers(0, 1),
)
def test_the_gradient_of_the_round_trip(lengths, sizes, fill) -> None:
    """Each token's gradient comes back to it once, none goes to padding."""
    context, tensor = sizes
    multiple = context_parallel_multiple(context, tensor)
    used = sum(-(-length // multiple) * multiple for length in lengths)
    batch = pack_for_megatron(
        torch.arange(1, sum(lengths) + 1),
        lengths,
        context_parallel_size=context,
        tensor_parallel_size=tensor,
        fill_to=used + fill * multiple,
    )
    logits = torch.randn(
        1, used + fill * multiple, 3, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    merged = batch.merge([batch.shard_values(logits, rank) for rank in range(context)])
    assert torch.equal(merged, logits)
    weights = torch.arange(1.0, 3 * sum(lengths) + 1).view(-1, 3)
    (batch.unpack(merged) * weights).sum().backward()
    expected = torch.zeros_like(logits)
    expected[0, batch.packed.slots] = weights
    assert torch.equal(logits.grad, expected)
    logits.grad = None
    rows = batch.unpack_rows(merged.detach().requires_grad_())
    assert rows.requires_grad


def test_scores_go_to_the_tokens_they_are_about() -> None:
    batch = pack_for_megatron(TOKENS, LENGTHS, context_parallel_size=2, fill_to=20)
    # Where there is no label Megatron leaves anything, NaN too; it must not matter.
    scores = torch.where(batch.loss_mask, batch.labels.double(), torch.nan).requires_grad_()
    merged = batch.merge([batch.shard_values(scores, rank) for rank in (0, 1)])
    flat = batch.unpack_scores(merged)
    assert flat.tolist() == [0, 12, 13, 14, 15, 0, 0, 32, 33, 34]
    flat.sum().backward()
    assert scores.grad.tolist() == batch.loss_mask.double().tolist()


class TinyModel(nn.Module):
    """Two layers of causal attention with positions, over one rank's share of a pack or over all.

    Every rank computes its own queries and the outputs at its positions; keys and values are
    those of all ranks, put back in the order of the pack.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens = nn.Embedding(40, 8, dtype=torch.float64)
            self.positions = nn.Embedding(32, 8, dtype=torch.float64)
            self.layers = nn.ModuleList(nn.Linear(8, 24, dtype=torch.float64) for _ in range(2))
            self.head = nn.Linear(8, 40, dtype=torch.float64)

    def alone(self, token_ids: Tensor) -> Tensor:
        """One sequence [n] by itself: log-probs of its tokens after the first, [n - 1]."""
        hidden = self.tokens(token_ids) + self.positions(torch.arange(len(token_ids)))
        for layer in self.layers:
            query, key, value = layer(hidden).chunk(3, dim=-1)
            mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).tril()
            scores = (query @ key.T).masked_fill(~mask, -torch.inf)
            hidden = hidden + scores.softmax(-1) @ value
        logprobs = self.head(hidden[:-1]).log_softmax(-1)
        return logprobs.gather(1, token_ids[1:, None]).squeeze(1)

    def sharded(self, batch: MegatronBatch) -> list[Tensor]:
        """All ranks in one process: log-probs of each one's labels, each [1, T / cp]."""
        ranks = range(batch.context_parallel_size)
        shards = [batch.shard(rank) for rank in ranks]
        hidden = [self.tokens(s.token_ids) + self.positions(s.position_ids) for s in shards]
        lengths = batch.cu_seqlens_padded.diff()
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        for layer in self.layers:
            projected = [layer(values).chunk(3, dim=-1) for values in hidden]
            key = batch.merge([k for _, k, _ in projected])[0]
            value = batch.merge([v for _, _, v in projected])[0]
            for rank in ranks:
                mine = torch.from_numpy(
                    zigzag_positions(lengths.numpy(), batch.context_parallel_size, rank)
                )
                seen = sequence[mine][:, None] == sequence
                seen &= torch.arange(len(sequence)) <= mine[:, None]
                scores = (projected[rank][0][0] @ key.T).masked_fill(~seen, -torch.inf)
                hidden[rank] = hidden[rank] + (scores.softmax(-1) @ value)[None]
        logprobs = [self.head(values).log_softmax(-1) for values in hidden]
        return [
            values.gather(2, shard.labels.clamp(min=0)[..., None]).squeeze(2)
            for values, shard in zip(logprobs, shards, strict=True)
        ]


def logprobs_and_gradients(logprobs: Tensor, model: nn.Module) -> list[Tensor]:
    weights = torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)
    gradients = torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))
    return [logprobs.detach(), *gradients]


def one_by_one(model: TinyModel, token_ids: Tensor, lengths: list[int]) -> Tensor:
    first = torch.zeros(1, dtype=torch.float64)
    parts = [torch.cat([first, model.alone(row)]) for row in token_ids.split(lengths)]
    return torch.cat(parts)


@pytest.mark.parametrize(("context", "fill"), [(1, 0), (2, 0), (2, 8), (3, 6), (4, 8)])
def test_context_parallel_logprobs_are_the_unsharded_ones(context, fill) -> None:
    """Forward and gradients, with labels made before sharding and log-probs merged after."""
    model = TinyModel()
    lengths = [5, 1, 12, 7]
    token_ids = torch.randint(1, 40, (25,), generator=torch.Generator().manual_seed(1))
    multiple = context_parallel_multiple(context)
    used = sum(-(-length // multiple) * multiple for length in lengths)
    batch = pack_for_megatron(
        token_ids, lengths, context_parallel_size=context, fill_to=used + fill
    )
    actual = batch.unpack_scores(batch.merge(model.sharded(batch)))
    expected = one_by_one(model, token_ids, lengths)
    torch.testing.assert_close(
        logprobs_and_gradients(actual, model), logprobs_and_gradients(expected, model)
    )
    assert expected.abs().max() > 1


def test_negative_controls_of_the_sharding() -> None:
    """Labels shifted inside the shards, or shards merged in the wrong order, must be seen."""
    model = TinyModel()
    token_ids = torch.randint(1, 40, (24,), generator=torch.Generator().manual_seed(1))
    batch = pack_for_megatron(token_ids, [8, 16], context_parallel_size=2)
    expected = one_by_one(model, token_ids, [8, 16])
    shards = model.sharded(batch)
    right = batch.unpack_scores(batch.merge(shards))
    assert (right - expected).abs().max() < 1e-12
    wrong_order = batch.unpack_scores(batch.merge(shards[::-1]))
    assert (wrong_order - expected).abs().max() > 0.1
    # Rank by rank, the next token of a shard is not that of the sequence at a chunk's end.
    shifted = batch.merge(
        [torch.roll(batch.shard_values(batch.token_ids, rank), -1, 1) for rank in (0, 1)]
    )
    late = replace(batch, labels=torch.where(batch.loss_mask, shifted, X))
    # The token after a chunk is the other rank's, once a rank and sequence.
    assert (late.labels != batch.labels).sum() == 4
    difference = late.unpack_scores(late.merge(model.sharded(late))) - expected
    assert difference.abs().max() > 0.1


def test_a_plan_says_the_multiple() -> None:
    plan = plan_micro_batches(LENGTHS, max_tokens=32, sequence_multiple=4, pad_multiple=4)
    (micro_batch,) = plan.micro_batches(0)
    tokens = torch.cat([TOKENS.split(LENGTHS)[i] for i in micro_batch.indices])
    batch = to_megatron(lay_out(micro_batch, tokens), context_parallel_size=2)
    assert sorted(batch.cu_seqlens_padded.diff().tolist()) == [4, 4, 8]
    assert torch.equal(batch.unpack(batch.token_ids), tokens)


def test_an_empty_slot_is_all_fill() -> None:
    empty = to_megatron(empty_batch(shape=(1, 8)), context_parallel_size=2)
    assert empty.cu_seqlens.tolist() == empty.cu_seqlens_padded.tolist() == [0, 8]
    assert empty.shard(1).token_ids.shape == (1, 4)
    assert not empty.loss_mask.any()
    scores = torch.ones(1, 8, requires_grad=True)
    empty.unpack_scores(
        empty.merge([empty.shard_values(scores, r) for r in (0, 1)])
    ).sum().backward()
    assert not scores.grad.any()
    with pytest.raises(ValueError, match="multiple"):
        to_megatron(empty_batch(), context_parallel_size=2)


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="got padded rows"):
        to_megatron(pad_sequences(TOKENS, LENGTHS))
    shared = pack_sequences(
        torch.tensor([1, 2, 3, 1, 2, 4]),
        [3, 3],
        token_mask=torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool),
        prefix_ids=[0, 0],
        prefix_lengths=[2, 2],
    )
    with pytest.raises(ValueError, match="no shared prefixes"):
        to_megatron(shared)
    unpadded = pack_sequences(TOKENS, LENGTHS)
    with pytest.raises(ValueError, match=r"sequence_multiple=context_parallel_multiple\(2\)"):
        to_megatron(unpadded, context_parallel_size=2)
    with pytest.raises(ValueError, match=r"the fill .* got 2"):
        pack_for_megatron(TOKENS, LENGTHS, context_parallel_size=2, fill_to=18)
    with pytest.raises(ValueError, match="2 sequence-parallel ranks, got 11"):
        to_megatron(pack_sequences(TOKENS, LENGTHS, fill_to=11), tensor_parallel_size=2)


def test_values_of_another_shape_are_refused() -> None:
    batch = pack_for_megatron(TOKENS, LENGTHS, context_parallel_size=2)
    with pytest.raises(ValueError, match=r"values must begin with the shape \(1, 16\)"):
        batch.shard_values(torch.zeros(16, 1), 0)
    with pytest.raises(ValueError, match="all 2 ranks in order, got 1"):
        batch.merge([torch.zeros(1, 16)])
    with pytest.raises(ValueError, match=r"rank 1 must begin with the shape \(1, 8\)"):
        batch.merge([torch.zeros(1, 8), torch.zeros(1, 16)])
    with pytest.raises(ValueError, match=r"scores must begin with the shape \(1, 16\)"):
        batch.unpack_scores(torch.zeros(1, 8))
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        batch.shard(2)


def test_to_moves_every_tensor() -> None:
    batch = pack_for_megatron(TOKENS, LENGTHS, context_parallel_size=2).to("meta")
    tensors = [getattr(batch, f.name) for f in fields(batch)]
    tensors = [t for t in tensors if isinstance(t, Tensor)] + [batch.token_ids, batch.position_ids]
    assert len(tensors) == 6
    assert all(tensor.is_meta for tensor in tensors)
    assert batch.max_seqlen == 8
    assert np.array_equal(batch.padded_lengths, [8, 4, 4])
