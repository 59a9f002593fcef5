"""What would be computed wrongly in silence is refused: users' mistakes, one test each."""

import pytest
import torch
from burnish_packing import plan_micro_batches
from burnish_packing.torch import (
    HuggingFaceCollator,
    PackingCollator,
    PlannedDataset,
    TokenBudgetBatchSampler,
    attention_forward,
    lay_out,
    pack_sequences,
    packed_attention,
)
from burnish_packing.torch.hugging_face import check_separate, model_kwargs, register_attention
from burnish_packing.torch.megatron import pack_for_megatron
from transformers import (
    AutoModelForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    Qwen2MoeConfig,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROWS = [torch.arange(1, n + 1) for n in (5, 3, 8, 2)]


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, attn_implementation=attention, initializer_range=0.5)
    return LlamaForCausalLM(config).eval()


def test_a_call_without_spans_is_refused() -> None:
    """TRL's packing, or generation: restarted position ids would mean nothing here."""
    model = llama(register_attention())
    batch = pack_sequences(torch.cat(ROWS), [len(row) for row in ROWS])
    with pytest.raises(ValueError, match=r"got no spans; call model.*for generation"):
        model(batch.token_ids, position_ids=batch.position_ids, use_cache=False)


def test_a_padding_mask_is_refused() -> None:
    model = llama(register_attention())
    batch = pack_sequences(torch.cat(ROWS), [len(row) for row in ROWS])
    mask = torch.ones_like(batch.token_ids)
    kwargs = model_kwargs(batch, model)
    expected = model(**kwargs).logits
    assert torch.equal(model(**kwargs, attention_mask=mask).logits, expected)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="attention_mask must have no zeros"):
        model(**kwargs, attention_mask=mask)


def test_the_keywords_are_those_of_the_model() -> None:
    """Keywords made for another attention than the model has are what goes wrong in silence."""
    batch = pack_sequences(
        torch.tensor([1, 2, 3, 1, 2, 4]), [3, 3], prefix_ids=[0, 0], prefix_lengths=[2, 2]
    )
    register_attention()
    with pytest.raises(ValueError, match="behind a shared prefix must run with"):
        model_kwargs(batch, llama("sdpa"))
    wrong = llama("sdpa")
    with pytest.raises(ValueError, match="must give the same outputs in the batch and alone"):
        check_separate(wrong, batch, make_kwargs=lambda b: model_kwargs(b, "burnish_packed"))
    with pytest.raises(ValueError, match="got 'sdp'"):
        HuggingFaceCollator(collator=PackingCollator(mode="packed"), attn_implementation="sdp")


def test_the_check_looks_behind_a_shared_prefix() -> None:
    check_separate(llama(register_attention()))
    seen = []

    def watching(batch):
        seen.append(batch.spans)
        return model_kwargs(batch, "burnish_packed")

    check_separate(llama("burnish_packed"), make_kwargs=watching)
    assert any(span.prefix_end > span.prefix_start for span in seen[0])


@pytest.mark.parametrize(
    "config",
    [
        Qwen2MoeConfig(
            **SIZES,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            num_experts=2,
            num_experts_per_tok=1,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["sliding_attention"] * 2,
        ),
        PhimoeConfig(**SIZES, **EXPERTS, sliding_window=4),
        Llama4TextConfig(
            **SIZES, **EXPERTS, head_dim=4, intermediate_size_mlp=16, attention_chunk_size=4
        ),
    ],
    ids=["qwen2_moe", "phimoe", "llama4"],
)
def test_windows_and_chunks_that_only_a_mask_knows_are_refused(config) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention())
    batch = pack_sequences(torch.cat(ROWS), [len(row) for row in ROWS])
    with pytest.raises(ValueError, match="must pass its window on to the attention"):
        model(**model_kwargs(batch, model))


def test_rows_of_the_plan_may_come_as_they_are() -> None:
    lengths = [len(row) for row in ROWS]
    plan = plan_micro_batches(lengths, max_tokens=10, num_ranks=5)
    values = [row.float() for row in ROWS]
    seen = []
    for rank in range(5):
        for micro_batch in plan.micro_batches(rank):
            batch = lay_out(micro_batch, ROWS, columns={"values": values})
            assert torch.equal(
                batch.unpack(batch.columns["values"]).long(), batch.unpack(batch.token_ids)
            )
            flat = batch.unpack(batch.token_ids).tolist()
            assert flat == [t for i in micro_batch.indices for t in ROWS[i].tolist()]
            seen += micro_batch.indices
    assert sorted(seen) == [0, 1, 2, 3]
    micro_batch = next(m for m in plan.micro_batches(0) if m.indices)
    with pytest.raises(ValueError, match="do not take the micro-batch's rows yourself"):
        lay_out(micro_batch, ROWS[: max(micro_batch.indices)])
    with pytest.raises(ValueError, match="was planned with"):
        lay_out(micro_batch, [torch.ones(9, dtype=torch.int64)] * 4)
    with pytest.raises(ValueError, match="one micro-batch, got generator"):
        lay_out(plan.micro_batches(0), ROWS)
    with pytest.raises(ValueError, match="must be one tensor, got list"):
        pack_sequences(ROWS, lengths)
    with pytest.raises(ValueError, match=r"convert with \.long\(\)"):
        pack_sequences(torch.cat(ROWS).int(), lengths)


def test_scores_are_one_number_a_position() -> None:
    batch = pack_for_megatron(torch.arange(5), [3, 2])
    with pytest.raises(ValueError, match=r"one number for each position, got shape \(1, 5, 2\)"):
        batch.unpack_scores(torch.zeros(1, 5, 2))


@pytest.mark.parametrize(("dtype", "value"), [(torch.int8, 300), (torch.float16, 1e6)])
def test_a_collator_does_not_wrap_numbers(dtype, value) -> None:
    collate = PackingCollator(mode="packed", sequence_columns={"id": dtype})
    with pytest.raises(ValueError, match=f"column 'id' must fit {dtype}"):
        collate([{"input_ids": [1, 2], "id": value}])
    assert collate([{"input_ids": [1, 2], "id": 3}]).sequence_columns["id"].item() == 3
    with pytest.raises(ValueError, match="columns must map names to dtypes, got list"):
        PackingCollator(mode="packed", columns=["id"])
    with pytest.raises(ValueError, match=r"got one mapping; pass \[row\]"):
        PackingCollator(mode="packed")({"input_ids": [1, 2]})


def test_a_sampler_names_rows_of_the_data_set() -> None:
    with pytest.raises(ValueError, match=r"(?s)length 9.* at index 3"):
        TokenBudgetBatchSampler([1, 2, 3, 9, 1, 2], max_tokens=5)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        TokenBudgetBatchSampler([3, 3, 1, 1, 1, 1], max_tokens=5, units=[0, 0, 1, 1, 2, 2])
    sampler = TokenBudgetBatchSampler([1, 2, 3], max_tokens=5)
    (batch,) = [b for b in sampler if 2 in b][:1]
    with pytest.raises(ValueError, match="got 2 rows for index 2"):
        PlannedDataset([{"input_ids": [1]}] * 2).__getitems__(batch)


def test_a_bias_of_the_scores_is_refused() -> None:
    heads = [torch.zeros(1, 2, 4, 8)] * 3
    count = torch.tensor(3)  # the Hugging Face Trainer passes one through
    attention_forward(torch.nn.Module(), *heads, None, spans=None, num_items_in_batch=count)
    with pytest.raises(ValueError, match="got the tensor position_bias"):
        attention_forward(
            torch.nn.Module(), *heads, None, spans=None, position_bias=torch.zeros(1, 2, 4, 4)
        )


def test_attention_takes_tensors_that_go_together() -> None:
    batch = pack_sequences(torch.cat(ROWS), [len(row) for row in ROWS])
    query = torch.zeros(1, 4, 18, 8)
    for key in (torch.zeros(1, 2, 17, 8), torch.zeros(2, 2, 18, 8), torch.zeros(1, 3, 18, 8)):
        for backend in ("per_span", "block_diagonal"):
            with pytest.raises(ValueError, match="key and value must be"):
                packed_attention(query, key, key, batch.spans, backend=backend)
    with pytest.raises(ValueError, match="of one dtype"):
        packed_attention(query, query.double(), query.double(), batch.spans)
