# ruff: noqa: T201  (it prints what it shows)
"""Packing inside the Hugging Face Trainer.

Needs `pip install "burnish-packing[torch]" "transformers[torch]"`.
Trains a small Llama twice on the same batches, padded and packed; the losses are the same.
"""

import tempfile

import torch
from burnish_packing import pack
from burnish_packing.torch import HuggingFaceCollator, PackingCollator
from burnish_packing.torch.hugging_face import register_attention
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Bins:
    """A data set of bins: item k is the list of rows that are packed together."""

    def __init__(self, rows: list[dict], capacity: int) -> None:
        self.rows = rows
        self.bins = pack([len(row["input_ids"]) for row in rows], capacity).bins

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, k: int) -> list[dict]:
        return [self.rows[i] for i in self.bins[k]]


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
    config = LlamaConfig(vocab_size=101, num_attention_heads=4, pad_token_id=0, **sizes)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    collate = HuggingFaceCollator(
        collator=PackingCollator(mode=mode), attn_implementation=attention
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,  # one bin
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,  # the collator chooses them
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Bins(rows, capacity=256),
            data_collator=lambda bins: collate([row for one in bins for row in one]),
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    rows = random_rows(64)
    padded, packed = train(rows, "padded"), train(rows, "packed")
    for step, losses in enumerate(zip(padded, packed, strict=True)):
        print(f"step {step}: loss {losses[0]:.6f} padded, {losses[1]:.6f} packed")


if __name__ == "__main__":
    main()
