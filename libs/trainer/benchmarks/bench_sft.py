# ruff: noqa: T201  (its table is what it is for)
"""Supervised fine-tuning steps of SmolLM2-135M on GSM8K's lengths: ours against TRL's SFTTrainer.

    python bench_sft.py [--batch 64] [--steps 3] [--threads 2]

Every contender is a process of its own and trains the same rows in global batches of the same size
with AdamW in float32; the loss is that of the completions. One step comes first and is not counted.
Tokens a second are real tokens, padding left out. MFU is the model's operations on real tokens over
what a large matrix product reaches, measured in the same process before and after. Ours run once
more with the parts of every layer but attention compiled; PyTorch needs a C++ compiler for that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _common
import torch

ROW_TOKENS = 2048  # of a pack, and of padded rows; larger ones leave the processor's cache
PACK_TOKENS = 2048  # of a pack of TRL's; attention is quadratic in it there
Measured = tuple[float, list[int], Any, float]  # seconds, lengths, model, first loss
OURS = ("packed", "packed-compiled", "padded")
CONTENDERS = (*OURS, "trl-default", "trl-no-checkpointing", "trl-packed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=CONTENDERS)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.contender:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = _common.make_model(Path(scratch) / "model")
        results: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
        for _ in range(arguments.rounds):
            for name in arguments.only:
                result = _common.in_own_process(
                    __file__,
                    *("--contender", name, "--model", str(model), "--batch", str(arguments.batch)),
                    *("--steps", str(arguments.steps), "--threads", str(arguments.threads)),
                )
                results[name].append(result)
                print(name, result, flush=True)
    print_table(results)


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    base = best(results["trl-default"]) if "trl-default" in results else None
    print("| contender | tokens/s | / TRL's default | MFU | peak MiB | first loss |")
    print("|---|---|---|---|---|---|")
    for name, rounds in results.items():
        result = best(rounds)
        ratio = f"{result['tokens_s'] / base['tokens_s']:.2f}" if base else ""
        print(
            f"| {name} | {result['tokens_s']:.0f} | {ratio} | {result['mfu']:.2f} | "
            f"{result['peak_mib']:.0f} | {result['first_loss']:.4f} |"
        )


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return max(rounds, key=lambda result: result["tokens_s"])


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    rows = _common.make_rows(arguments.batch * (arguments.steps + 1))
    before = _common.matmul_rate()
    run = run_ours if arguments.contender in OURS else run_trl
    seconds, lengths, model, first_loss = run(arguments, rows)
    rate = statistics.mean([before, _common.matmul_rate()])
    flops = _common.model_flops(model, lengths)
    return {
        "tokens_s": sum(lengths) / seconds,
        "mfu": flops / seconds / rate,
        "gflops": rate / 1e9,
        "peak_mib": _common.peak_mib(),
        "first_loss": first_loss,
    }


def run_ours(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> Measured:
    from burnish_distributed import RaggedBatch
    from burnish_losses.supervised import nll_loss
    from burnish_packing import plan_micro_batches
    from burnish_trainer import TorchPolicy

    mode, _, compiled = arguments.contender.partition("-")
    policy = TorchPolicy(str(arguments.model), learning_rate=1e-5, compile=bool(compiled))
    losses = []

    def step(start: int) -> None:
        batch = RaggedBatch.from_rows(rows[start : start + arguments.batch])
        plan = plan_micro_batches(batch.lengths, max_tokens=ROW_TOKENS, mode=mode)
        metrics = policy.train_step(batch, plan.ranks[0], nll_loss, layout=plan.mode)
        losses.append(metrics["train/loss"])

    step(0)
    steps = range(arguments.batch, len(rows), arguments.batch)
    seconds = _common.timed(lambda: [step(start) for start in steps])
    lengths = [len(row["token_ids"]) for row in rows[arguments.batch :]]
    return seconds, lengths, policy._model.model, losses[0]


def run_trl(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> Measured:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    words = {f"t{i}": i for i in range(49152)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        pad_token="t2",
        eos_token="t1",
    )
    data = Dataset.from_list(
        [
            {
                "input_ids": row["token_ids"].tolist(),
                "completion_mask": row["token_mask"].astype(int).tolist(),
            }
            for row in rows
        ]
    )
    packed = arguments.contender == "trl-packed"
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    moments: list[float] = []
    losses: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

        def on_log(self, *_: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                losses.append(float(kwargs["logs"]["loss"]))

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as scratch:
        config = SFTConfig(
            output_dir=scratch,
            per_device_train_batch_size=2 if packed else 8,
            gradient_accumulation_steps=arguments.batch // 8 // (1 if not packed else 2),
            max_steps=arguments.steps + 1,
            learning_rate=1e-5,
            max_length=PACK_TOKENS if packed else 1024,
            packing=packed,
            completion_only_loss=True,
            gradient_checkpointing=arguments.contender == "trl-default",
            bf16=False,  # no units for it here: several times slower
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = InOrder(
            model=model,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        train_micro_batch = trainer.training_step

        def counted(model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
            if moments:  # the first step is over
                lengths.extend(real_lengths(inputs))
            return train_micro_batch(model, inputs, *rest)

        trainer.training_step = counted
        trainer.train()
    return moments[-1] - moments[0], lengths, trainer.model, losses[0]


def real_lengths(inputs: dict[str, Any]) -> list[int]:
    """Tokens of every sequence of a micro-batch, padding left out."""
    if "attention_mask" in inputs:
        return inputs["attention_mask"].sum(1).tolist()  # type: ignore[no-any-return]
    starts = torch.nonzero(inputs["position_ids"].flatten() == 0).flatten()
    ends = torch.cat([starts[1:], torch.tensor([inputs["position_ids"].numel()])])
    return (ends - starts).tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
