"""What Hugging Face models are given, and the check that it keeps sequences apart."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from burnish_packing.torch import (
    PackedBatch,
    attention_forward,
    empty_batch,
    pack_sequences,
    pad_sequences,
)
from burnish_packing.torch.hugging_face import (
    SequencesNotSeparateError,
    check_separate,
    model_kwargs,
    register_attention,
)
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Ten times the usual size: a leak must move logits by far more than rounding.
    "initializer_range": 0.2,
}
PACKED = register_attention("burnish_packing_hugging_face_test")
ATTENTIONS = ["eager", "sdpa", PACKED]
LENGTHS = [5, 1, 9, 1, 1, 3]
TOKENS = torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(3))


def seeded(build) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


@pytest.fixture(scope="module")
def qwen() -> nn.Module:
    return seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)))


@pytest.fixture(scope="module")
def models(qwen) -> dict[str, nn.Module]:
    return {
        "llama": seeded(lambda: LlamaForCausalLM(LlamaConfig(**SIZES))),
        "qwen2": qwen,
        "mistral": seeded(lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))),
    }


@pytest.fixture(params=ATTENTIONS)
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


def batches() -> Iterator[tuple[str, PackedBatch]]:
    yield "packed", pack_sequences(TOKENS, LENGTHS)
    yield "filled", pack_sequences(TOKENS, LENGTHS, fill_to=24)
    yield "each padded", pack_sequences(TOKENS, LENGTHS, sequence_multiple=4, fill_to=40)
    yield "one sequence", pack_sequences(TOKENS, [20])
    yield "rows", pad_sequences(TOKENS, LENGTHS, pad_multiple=4, num_rows=7)
    yield "one row", pad_sequences(TOKENS, [20], pad_multiple=8)


def shared_prefix_batch() -> PackedBatch:
    """Three completions behind one prompt of 3 tokens, one of them empty, and a lone sequence."""
    prompt = TOKENS[:3]
    parts = [torch.cat([prompt, TOKENS[3:7]]), prompt, TOKENS[7:12]]
    parts.append(torch.cat([prompt, TOKENS[12:15]]))
    lengths = [len(part) for part in parts]
    mask = torch.cat([torch.arange(length) >= 3 for length in lengths])
    return pack_sequences(
        torch.cat(parts),
        lengths,
        token_mask=mask,
        prefix_ids=[0, 0, -1, 0],
        prefix_lengths=[3, 3, 0, 3],
    )


@torch.no_grad()
def one_by_one(model: nn.Module, attention: str, lengths: list[int]) -> Tensor:
    model.set_attn_implementation(attention)
    rows = [model(row[None], use_cache=False).logits[0] for row in TOKENS.split(lengths)]
    return torch.cat(rows)


@pytest.mark.parametrize("way", [name for name, _ in batches()])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_the_sequences_of_every_batch_are_separate(models, name, attention, way) -> None:
    model, batch = models[name], dict(batches())[way]
    model.set_attn_implementation(attention)
    kwargs = model_kwargs(batch, attention)
    with torch.no_grad():
        actual = batch.unpack(model(**kwargs).logits)
    check_separate(model, batch)
    expected = one_by_one(model, "eager", list(batch.lengths))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_exact_keywords() -> None:
    batch = pack_sequences(TOKENS, LENGTHS, fill_to=24)
    kwargs = model_kwargs(batch, PACKED)
    assert kwargs.keys() == {"input_ids", "position_ids", "spans", "use_cache"}
    assert kwargs["spans"] == batch.spans
    assert kwargs["use_cache"] is False
    for name in ("sdpa", "eager", "flex_attention"):
        kwargs = model_kwargs(batch, name)
        assert kwargs.keys() == {"input_ids", "position_ids", "attention_mask", "use_cache"}
        assert kwargs["attention_mask"] is None
        assert kwargs["use_cache"] is False
        assert kwargs["position_ids"] is batch.position_ids
    kwargs = model_kwargs(batch, "flash_attention_2")
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 16, 17, 20, 24]
    assert kwargs["cu_seq_lens_q"].dtype == torch.int32
    assert kwargs["cu_seq_lens_k"].tolist() == kwargs["cu_seq_lens_q"].tolist()
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 9
    assert type(kwargs["max_length_q"]) is int
    assert kwargs["attention_mask"] is None
    assert model_kwargs(batch.to("meta"), "flash_attention_3")["cu_seq_lens_k"].is_meta
    # Rows are plain causal attention: cumulative lengths would be those of a pack.
    rows = pad_sequences(TOKENS, LENGTHS)
    assert "cu_seq_lens_q" not in model_kwargs(rows, "flash_attention_2")
    assert model_kwargs(rows, PACKED)["spans"] is None
    assert model_kwargs(empty_batch(), "sdpa")["input_ids"].shape == (1, 1)


def test_transformers_finds_the_sequences_of_the_batch() -> None:
    """Its search by position ids and the spans of every kind of pack agree."""
    from transformers.masking_utils import find_packed_sequence_indices

    for way, batch in batches():
        if batch.spans is None:
            assert find_packed_sequence_indices(batch.position_ids) is None
            continue
        found = find_packed_sequence_indices(batch.position_ids)
        sizes = batch.cu_seqlens.diff()
        if len(sizes) == 1:
            assert found is None
            continue
        expected = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        assert found.tolist() == [expected.tolist()], way


@torch.no_grad()
def test_flash_attention_is_called_with_the_cumulative_lengths(models, monkeypatch) -> None:
    """FlashAttention itself needs a GPU: on the CPU a stand-in that computes what it is told."""
    import transformers.modeling_flash_attention_utils as flash

    calls = []

    def varlen(query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, **more):
        calls.append((cu_seqlens_q.tolist(), max_seqlen_q))
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert more["causal"]
        parts = []
        for start, end in itertools.pairwise(cu_seqlens_q.tolist()):
            heads = [x[start:end].transpose(0, 1)[None] for x in (query, key, value)]
            part = nn.functional.scaled_dot_product_attention(
                *heads, is_causal=True, enable_gqa=True
            )
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    def rows(query, key, value, **more):
        heads = [x.transpose(1, 2) for x in (query, key, value)]
        return nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        ).transpose(1, 2)

    options = ("dropout_p", "window_size", "deterministic", "softcap", "s_aux", "learnable_sink")
    paged = ("block_table", "page_table", "cache_seqlens")
    supported = dict.fromkeys((*options, *paged), False)
    supported |= {"max_seqlen_q": True, "max_seqlen_k": True}
    process = functools.partial(flash._process_flash_attention_kwargs, supports_mapping=supported)
    monkeypatch.setattr(
        flash,
        "lazy_import_flash_attention",
        lambda *_: ((rows, varlen, None, None, None), (process, None)),
    )
    model = models["llama"]
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    for way, batch in batches():
        calls.clear()
        check_separate(model, batch)
        if batch.spans is None:
            assert not calls
        else:
            assert (batch.cu_seqlens.tolist(), batch.max_seqlen) in calls, way


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_finds_the_sequences(qwen, monkeypatch) -> None:
    """Transformers makes the block mask from position ids; compiling takes a minute, so not."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from transformers import masking_utils
    from transformers.integrations import flex_attention as integration

    masks = []

    def make_mask(*arguments, _compile, **more):
        masks.append(create_block_mask(*arguments, **more))
        return masks[-1]

    monkeypatch.setattr(masking_utils, "create_block_mask", make_mask)
    monkeypatch.setattr(
        integration,
        "compile_friendly_flex_attention",
        lambda *heads, training, **more: flex_attention(*heads, **more),
    )
    qwen.set_attn_implementation("flex_attention")
    for _, batch in batches():
        check_separate(qwen, batch)
    assert masks
    with pytest.raises(SequencesNotSeparateError):
        check_separate(qwen, make_kwargs=with_cache)


def with_cache(batch: PackedBatch) -> dict:
    return {"input_ids": batch.token_ids, "position_ids": batch.position_ids}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "flex_attention", PACKED])
def test_separate_on_a_gpu(attention) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    model = seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "hidden_size": 128})))
    model = model.to("cuda", torch.bfloat16)
    model.set_attn_implementation(attention)
    for _, batch in batches():
        check_separate(model, batch.to("cuda"))


def test_shared_prefixes_need_spans(qwen) -> None:
    batch = shared_prefix_batch()
    qwen.set_attn_implementation(PACKED)
    check_separate(qwen, batch)
    for name in ("eager", "sdpa", "flex_attention", "flash_attention_2"):
        with pytest.raises(ValueError, match=f"got '{name}', which would not show them"):
            model_kwargs(batch, name)
    # A completion that sees its sibling is found.
    spans = (*batch.spans[:1], replace(batch.spans[1], end=15))
    leaking = replace(batch, layout=replace(batch.layout, spans=spans))
    assert leaking.spans[-1].end == batch.token_ids.shape[1]
    with pytest.raises(SequencesNotSeparateError):
        check_separate(qwen, leaking)


def test_an_unknown_attention_is_refused() -> None:
    batch = pack_sequences(TOKENS, LENGTHS)
    for name in ("sdpaa", "paged|sdpa", "burnish_never_registered"):
        with pytest.raises(ValueError, match="attn_implementation must be one of eager, sdpa"):
            model_kwargs(batch, name)


def test_attention_is_registered_under_a_free_name() -> None:
    assert register_attention("burnish_packing_named") == "burnish_packing_named"
    assert AttentionInterface()["burnish_packing_named"] is attention_forward
    register_attention("burnish_packing_named", backend="block_diagonal")
    assert AttentionInterface()["burnish_packing_named"].keywords == {"backend": "block_diagonal"}
    assert "spans" in model_kwargs(pack_sequences(TOKENS, LENGTHS), "burnish_packing_named")
    AttentionInterface.register("burnish_packing_foreign", lambda *_: None)
    for taken in ("sdpa", "eager", "flash_attention_2", "burnish_packing_foreign"):
        with pytest.raises(ValueError, match=f"must be free, got '{taken}'"):
            register_attention(taken)
