# ruff: noqa: T201  (its table is what it is for)
"""The supervised apps against TRL's trainers: the same losses, and how long they take.

    python bench_trl.py [--task sft dpo rm] [--steps 20] [--batch 8] [--threads 2]

Each contender is a process of its own and trains SmolLM2-135M in float32 on the same rows in the
same order, with AdamW at the same constant rate. `trl` is TRL's trainer as it comes (gradient
checkpointing is on), and once more without checkpointing; `fixed` is the app without packing, in
micro-batches of as many rows as TRL's; `app` is the app as its recipe has it. Times are those of
all steps but the first. TRL must be installed: `pip install trl peft`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("sft", "dpo", "rm")
RECIPES = {"sft": "smollm2-gsm8k-cpu", "dpo": "smollm2-gsm8k-cpu", "rm": "smollm2-gsm8k-cpu"}
CONTENDERS = ("trl", "trl-no-checkpointing", "fixed", "app")
RATE = {"sft": 1e-5, "dpo": 1e-6, "rm": 1e-5}
MAX_LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", nargs="*", default=TASKS, choices=TASKS)
    parser.add_argument("--contender", nargs="*", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--inside", action="store_true", help="run the one contender here")
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(run_trl(arguments, arguments.task[0], arguments.contender[0])))
        return
    for task in arguments.task:
        found: dict[str, dict[str, list[float]]] = {}
        with tempfile.TemporaryDirectory() as scratch:
            arguments.model = starting_model(arguments, task, Path(scratch))
            for contender in arguments.contender:
                run = run_trl_apart if contender.startswith("trl") else run_app
                found[contender] = run(arguments, task, contender)
                print(task, contender, found[contender], flush=True)
        print_table(task, found)


def print_table(task: str, found: dict[str, dict[str, list[float]]]) -> None:
    base = found.get("trl")
    print(f"| {task} | s a step | times as fast as TRL | largest loss difference to TRL's |")
    print("|---|---|---|---|")
    for contender, result in found.items():
        seconds = sum(result["seconds"]) / len(result["seconds"])
        ratio, apart = "", ""
        if base is not None:
            ratio = f"{sum(base['seconds']) / len(base['seconds']) / seconds:.2f}"
            pairs = zip(base["losses"], result["losses"], strict=True)
            apart = f"{max(abs(a - b) for a, b in pairs):.1e}"
        print(f"| {contender} | {seconds:.2f} | {ratio} | {apart} |")


def starting_model(arguments: argparse.Namespace, task: str, scratch: Path) -> str:
    """The model's folder; for a reward model, one whose new head all contenders share."""
    from burnish_converters.model_source import resolve_model
    from burnish_trainer import TorchPolicy

    folder = resolve_model(arguments.model, Path("~/.cache/burnish/models").expanduser())
    if task != "rm" or (folder / "reward").exists():
        return str(folder)
    TorchPolicy(str(folder), learning_rate=None, head="reward").save(scratch / "reward", {})
    return str(scratch / "reward" / "model")


def settings(arguments: argparse.Namespace, task: str, contender: str) -> list[str]:
    """Overrides of the app's recipe that make it the run that TRL makes."""
    fixed = [
        "training.packing=fixed",
        f"training.micro_batch_size={arguments.batch * (1 if task == 'sft' else 2)}",
        f"training.max_tokens={2 * arguments.batch * MAX_LENGTH}",
    ]
    return [
        f"model.source={arguments.model}",
        "validate_every=0",
        "data.validation={split: " + ("test" if task == "sft" else "validation") + "}",
        "training.num_epochs=null",
        f"training.num_steps={arguments.steps}",
        f"training.batch_size={arguments.batch}",
        f"training.max_length={MAX_LENGTH}",
        "training.too_long=skip",
        f"training.learning_rate={RATE[task]}",
        "training.schedule=burnish_trainer.schedules.constant",
        "training.warmup_steps=0",
        "training.optimizer_args={weight_decay: 0.0}",
        *(fixed if contender == "fixed" else []),
    ]


def run_app(arguments: argparse.Namespace, task: str, contender: str) -> dict[str, list[float]]:
    """`burnish TASK`, and what it wrote to metrics.jsonl."""
    from burnish_tracking import read_metrics

    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        command = [sys.executable, "-m", "burnish_apps.shell.cli", task]
        command += ["--recipe", RECIPES[task], *settings(arguments, task, contender)]
        checked([*command, f"run_dir={run_dir}"], arguments)
        records = [r for r in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in r]
    times = [
        sum(float(r.get(f"time/{stage}_s", 0)) for stage in ("preparation", "training"))
        for r in records
    ]
    return {"losses": [float(r["train/loss"]) for r in records], "seconds": times[1:]}


def run_trl_apart(
    arguments: argparse.Namespace, task: str, contender: str
) -> dict[str, list[float]]:
    """`run_trl` in a process of its own."""
    numbers = ("steps", "batch", "threads")
    command = [sys.executable, __file__, "--inside", "--task", task, "--contender", contender]
    command += [f"--{name}={getattr(arguments, name)}" for name in numbers]
    done = checked([*command, f"--model={arguments.model}"], arguments)
    result: dict[str, list[float]] = json.loads(done.splitlines()[-1])
    return result


def checked(command: list[str], arguments: argparse.Namespace) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "THP_MEM_ALLOC_ENABLE": "1",  # large tensors in huge pages, for all contenders
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def encoded_rows(task: str, tokenizer: Any, num_rows: int, batch: int) -> list[Any]:
    """The rows of the recipe's source as the app encodes them, in the order it trains on."""
    from burnish_data import Loader, encode_chats, encode_preferences
    from burnish_data.sources import gsm8k_preferences, gsm8k_solutions

    encode = partial(
        encode_chats if task == "sft" else encode_preferences,
        tokenizer=tokenizer,
        max_length=MAX_LENGTH,
        too_long="skip",
    )
    source: Any = gsm8k_solutions() if task == "sft" else gsm8k_preferences()
    rows = [row for row in encode(list(source)) if not isinstance(row, Exception)]
    ordered: list[Any] = []
    loader = Loader(rows, batch, seed=0)
    while len(ordered) < num_rows:
        ordered += [row for part in loader for row in part]
    return ordered[:num_rows]


def run_trl(arguments: argparse.Namespace, task: str, contender: str) -> dict[str, list[float]]:
    """TRL's trainer on the same token ids."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import trl
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = encoded_rows(task, tokenizer, arguments.steps * arguments.batch, arguments.batch)
    data = Dataset.from_list([TRL_ROWS[task](row) for row in rows])
    moments: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.perf_counter())

        def on_log(self, *_: Any, **kwargs: Any) -> None:
            if "loss" in kwargs["logs"]:
                losses.append(float(kwargs["logs"]["loss"]))

    name = {"sft": "SFT", "dpo": "DPO", "rm": "Reward"}[task]
    trainer_class: Any = getattr(trl, f"{name}Trainer")

    class InOrder(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(data)

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # of token ids

    auto = AutoModelForSequenceClassification if task == "rm" else AutoModelForCausalLM
    options = {"num_labels": 1} if task == "rm" else {}
    model = auto.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa", **options
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as scratch:
        config = getattr(trl, f"{name}Config")(
            output_dir=scratch,
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.steps,
            learning_rate=RATE[task],
            lr_scheduler_type="constant",
            max_length=None if task == "rm" else MAX_LENGTH,
            bf16=False,  # no units for it on most CPUs: several times slower
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **({"gradient_checkpointing": False} if contender != "trl" else {}),
        )
        trainer = InOrder(
            model=model,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(moments)]
    return {"losses": losses, "seconds": seconds}


def sft_row(row: Any) -> dict[str, Any]:
    return {
        "input_ids": row["token_ids"].tolist(),
        "labels": np.where(row["token_mask"], row["token_ids"], -100).tolist(),
    }


def dpo_row(row: Any) -> dict[str, Any]:
    """TRL trains a completion to its end, so what follows its last trained token is left out."""
    sides = {}
    for side in ("chosen", "rejected"):
        trained = row[side]["token_mask"].nonzero()[0]
        ids = row[side]["token_ids"].tolist()
        sides[side] = (ids[: trained[0]], ids[trained[0] : trained[-1] + 1])
    assert sides["chosen"][0] == sides["rejected"][0]
    completions = {f"{side}_ids": ids for side, (_, ids) in sides.items()}
    return {"prompt_ids": sides["chosen"][0], **completions}


def rm_row(row: Any) -> dict[str, Any]:
    return {f"{side}_ids": row[side]["token_ids"].tolist() for side in ("chosen", "rejected")}


TRL_ROWS = {"sft": sft_row, "dpo": dpo_row, "rm": rm_row}


if __name__ == "__main__":
    main()
