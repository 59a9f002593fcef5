"""Megatron Core's own model on a pack in its form; where Megatron Core is installed."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from burnish_packing.context_parallel import zigzag_positions
from burnish_packing.torch import pack_sequences
from burnish_packing.torch.megatron import to_megatron
from torch import Tensor, nn


@pytest.fixture
def megatron(monkeypatch) -> Iterator[None]:
    """Megatron Core on the CPU in this process, with groups of one rank."""
    parallel_state = pytest.importorskip("megatron.core.parallel_state", exc_type=ImportError)
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    # Where Megatron asks for the current GPU to place its rotary table.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # the others need CUDA
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # Megatron's own, of what is not installed
def test_a_megatron_model_takes_the_pack(megatron) -> None:
    """Log-probs and gradients of a GPTModel on the pack are those of its sequences one by one."""
    model = tiny_gpt_model()
    lengths = [5, 1, 12, 7]
    token_ids = torch.randint(1, 40, (25,), generator=torch.Generator().manual_seed(1))
    # Padded as two context-parallel ranks would need it, on one rank.
    packed = pack_sequences(token_ids, lengths, sequence_multiple=4, fill_to=40)
    batch = to_megatron(packed)
    params = batch.packed_seq_params()
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 5, 6, 18, 25, 33]
    padded = [0, 8, 12, 24, 32, 40]
    assert params.cu_seqlens_q_padded.tolist() == params.cu_seqlens_kv_padded.tolist() == padded
    assert params.max_seqlen_q == params.max_seqlen_kv == 12
    assert batch.packed_seq_params(padding_apart=False).cu_seqlens_q.tolist() == padded
    expected = megatron_one_by_one(model, token_ids, lengths)
    assert expected.abs().max() > 1
    reference = logprobs_and_gradients(expected, model)
    for padding_apart in (True, False):
        losses = model(
            batch.token_ids,
            batch.position_ids,
            attention_mask=None,
            labels=batch.labels,
            packed_seq_params=batch.packed_seq_params(padding_apart=padding_apart),
        )
        assert losses.isfinite().all()
        logprobs = batch.unpack_scores(-losses)
        torch.testing.assert_close(logprobs_and_gradients(logprobs, model), reference)
    # As one sequence they see each other: the comparison must notice.
    whole = torch.tensor([0, 40], dtype=torch.int32)
    one_long = replace(
        params,
        cu_seqlens_q=whole,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=40,
    )
    losses = model(
        batch.token_ids,
        batch.position_ids,
        attention_mask=None,
        labels=batch.labels,
        packed_seq_params=one_long,
    )
    assert (batch.unpack_scores(-losses) - expected).abs().max() > 0.1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_megatron_places_rotary_embeddings_by_the_same_chunks(megatron, size) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    length = 4 * size
    positions = torch.arange(20.0).view(20, 1, 1, 1)
    for rank in range(size):
        local = torch.zeros(length // size, 1, 1)
        placed = _get_thd_freqs_on_this_cp_rank(rank, size, local, positions)
        assert placed.flatten().tolist() == zigzag_positions([length], size, rank).tolist()


def megatron_one_by_one(model: nn.Module, token_ids: Tensor, lengths: list[int]) -> Tensor:
    parts = []
    for row in token_ids.split(lengths):
        losses = model(
            row[None],
            torch.arange(len(row))[None],
            attention_mask=None,
            labels=torch.cat([row[1:], row[:1]])[None],
        )
        parts.append(torch.cat([torch.zeros(1), -losses[0, :-1]]))
    return torch.cat(parts)


def tiny_gpt_model() -> nn.Module:
    """Two layers with rotary embeddings; attention per sequence of the pack, written here.

    Megatron's own attention over packs needs Transformer Engine, and that a GPU.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.4,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        add_bias_linear=False,
        transformer_impl="local",
    )

    class AttentionPerSequence(nn.Module):
        """As Transformer Engine does: padding in a pack is neither seen nor written."""

        def __init__(self, **_unused) -> None:
            super().__init__()

        def forward(self, query, key, value, *_unused, packed_seq_params=None, **_more) -> Tensor:
            if packed_seq_params is None:  # [T, 1, heads, d]: one sequence
                heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
                output = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
                return output.permute(2, 0, 1, 3).flatten(2)
            starts = packed_seq_params.cu_seqlens_q_padded[:-1].tolist()
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            output = torch.full_like(query, 7.0)  # [T, heads, d], anything at padding
            for start, length in zip(starts, lengths, strict=True):
                rows = slice(start, start + length)
                heads = [x[rows].transpose(0, 1)[None] for x in (query, key, value)]
                part = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
                output[rows] = part[0].transpose(0, 1)
            return output.flatten(1)

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = AttentionPerSequence
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPTModel(
            config,
            spec,
            vocab_size=40,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )


def logprobs_and_gradients(logprobs: Tensor, model: nn.Module) -> list[Tensor]:
    weights = torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)
    gradients = torch.autograd.grad((logprobs * weights).sum(), list(model.parameters()))
    return [logprobs.detach(), *gradients]
