# ruff: noqa: T201  (it prints what it shows)
"""Packing inside TRL's SFTTrainer: `pip install "burnish-packing[torch]" trl`.

Trains a small Qwen2 twice on the same batches, padded and packed; the losses are the same.
"""

import tempfile

import torch
from burnish_packing import pack
from burnish_packing.torch import HuggingFaceCollator, PackingCollator
from burnish_packing.torch.hugging_face import register_attention
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer


def random_rows(num_rows: int) -> list[dict]:
    """Rows of 4 to 60 tokens of which the first two, a prompt, are not trained."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.randint(4, 61, (num_rows,), generator=generator).tolist():
        token_ids = torch.randint(3, 101, (length,), generator=generator).tolist()
        rows.append({"input_ids": token_ids, "labels": [-100, -100, *token_ids[2:]]})
    return rows


def train(rows: list[dict], mode: str) -> list[float]:
    """Four steps of two bins each; returns the loss of every step."""
    torch.manual_seed(0)
    attention = register_attention()  # "burnish_packed": for packs and for padded rows
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=101, pad_token_id=0, eos_token_id=1, **sizes, **heads)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=attention)
    collate = HuggingFaceCollator(
        collator=PackingCollator(mode=mode), attn_implementation=attention
    )
    bins = pack([len(row["input_ids"]) for row in rows], capacity=256).bins
    dataset = Dataset.from_list([{"rows": [rows[i] for i in one]} for one in bins])
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model,
            SFTConfig(
                folder,
                per_device_train_batch_size=1,  # one bin
                gradient_accumulation_steps=2,
                max_steps=4,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
                gradient_checkpointing=False,
                loss_type="nll",
                dataset_kwargs={"skip_prepare_dataset": True},  # its rows are tokenised bins
                remove_unused_columns=False,  # the collator chooses them
            ),
            train_dataset=dataset,
            data_collator=lambda bins: collate([row for one in bins for row in one["rows"]]),
            processing_class=tokenizer(),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def tokenizer() -> PreTrainedTokenizerFast:
    """TRL asks for one; the rows are tokenised already."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def main() -> None:
    rows = random_rows(64)
    padded, packed = train(rows, "padded"), train(rows, "packed")
    for step, losses in enumerate(zip(padded, packed, strict=True)):
        print(f"step {step}: loss {losses[0]:.6f} padded, {losses[1]:.6f} packed")


if __name__ == "__main__":
    main()
