"""Other people's rows through the collator for Hugging Face: the model's own loss is unchanged."""

import pickle

import pytest
import torch
from burnish_packing.torch.hugging_face import register_attention
from burnish_packing.torch.loader import PlannedDataset, TokenBudgetBatchSampler
from burnish_packing.torch.rows import HuggingFaceCollator, PackingCollator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = [
    {"input_ids": [11, 12, 13], "labels": [-100, -100, 13], "attention_mask": [1, 1, 1]},
    {"input_ids": [21, 22, 23, 24], "labels": [21, 22, 23, 24], "attention_mask": [1] * 4},
    {"input_ids": [31], "labels": [31], "attention_mask": [1]},
    {"input_ids": [5, 4, 3, 2, 1], "labels": [-100, -100, 3, 2, 1], "attention_mask": [1] * 5},
]


def tiny_llama(attention: str) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=41,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.2,
            attn_implementation=attention,
        )
        return LlamaForCausalLM(config)


def loss_one_by_one() -> float:
    """The mean over the seven trained tokens, each row alone through transformers' own code."""
    model = tiny_llama("sdpa")
    losses = []
    for row in ROWS:
        labels = torch.tensor([row["labels"]])
        if (labels[:, 1:] != -100).any():
            output = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels)
            losses.append(output.loss.item() * int((labels[:, 1:] != -100).sum()))
    return sum(losses) / 7


def test_labels_are_aligned_to_tokens_and_begin_with_the_ignored_one() -> None:
    collate = HuggingFaceCollator(
        collator=PackingCollator(mode="packed", pad_multiple=16), attn_implementation="sdpa"
    )
    inputs = pickle.loads(pickle.dumps(collate))(ROWS)
    assert inputs["labels"].tolist() == [
        [-100, -100, 13, -100, 22, 23, 24, -100, -100, -100, 3, 2, 1, -100, -100, -100]
    ]
    assert inputs["input_ids"][0, :7].tolist() == [11, 12, 13, 21, 22, 23, 24]
    assert inputs["position_ids"][0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert inputs["use_cache"] is False


@pytest.mark.parametrize("mode", ["packed", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "burnish_packed"])
def test_the_models_own_loss_is_that_of_the_rows_one_by_one(mode, attention) -> None:
    if attention == "burnish_packed":
        register_attention()
    collate = HuggingFaceCollator(
        collator=PackingCollator(mode=mode, pad_multiple=8), attn_implementation=attention
    )
    loss = tiny_llama(attention)(**collate(ROWS)).loss.item()
    assert loss == pytest.approx(loss_one_by_one(), rel=1e-5)
    # Trained across the borders of sequences, it would be another.
    inputs = collate(ROWS)
    inputs["labels"] = torch.where(inputs["labels"] == -100, inputs["input_ids"], inputs["labels"])
    assert tiny_llama(attention)(**inputs).loss.item() != pytest.approx(loss_one_by_one(), rel=1e-2)


def test_planned_batches_come_as_inputs_too() -> None:
    lengths = [len(row["input_ids"]) for row in ROWS]
    sampler = TokenBudgetBatchSampler(lengths, max_tokens=8, pad_multiple=8)
    collate = HuggingFaceCollator(collator=PackingCollator(), attn_implementation="sdpa")
    loader = DataLoader(PlannedDataset(ROWS), batch_sampler=sampler, collate_fn=collate)
    model = tiny_llama("sdpa")
    losses = [model(**inputs, num_items_in_batch=7).loss.item() for inputs in loader]
    assert len(losses) == 2
    assert sum(losses) == pytest.approx(loss_one_by_one(), rel=1e-5)


def test_completions_behind_a_shared_prefix_have_no_such_labels() -> None:
    register_attention()
    prompt = {"token_mask": [0, 0, 1], "prefix_id": 5, "prefix_length": 2}
    rows = [{"token_ids": [1, 2, 3], **prompt}, {"token_ids": [1, 2, 4], **prompt}]
    collate = HuggingFaceCollator(
        collator=PackingCollator(mode="packed", shared_prefixes=True),
        attn_implementation="burnish_packed",
    )
    with pytest.raises(ValueError, match="behind a shared prefix"):
        collate(rows)
