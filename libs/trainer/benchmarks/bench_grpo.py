# ruff: noqa: T201  (its table is what it is for)
"""A GRPO train step of SmolLM2-135M: completions behind one stored prompt against plain packs.

    python bench_grpo.py [--groups 4] [--group-size 8] [--prompt 300] [--completion 150]

Both train the same rows with the same loss, each in a process of its own; one step comes first and
is not counted. Tokens a second are those of the sequences, each prompt counted for each of its
completions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import _common
import numpy as np
import torch

CONTENDERS = ("packed", "shared-prefix")
ROW_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {
        "groups": 4,
        "group-size": 8,
        "prompt": 300,
        "completion": 150,
        "steps": 2,
        "rounds": 1,
        "threads": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.contender:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure(arguments)))
        return
    sizes = ("groups", "group_size", "prompt", "completion", "steps", "threads")
    given = [x for s in sizes for x in (f"--{s.replace('_', '-')}", str(getattr(arguments, s)))]
    with tempfile.TemporaryDirectory() as scratch:
        model = _common.make_model(Path(scratch) / "model")
        results = {
            name: min(
                (
                    _common.in_own_process(
                        __file__, "--contender", name, "--model", str(model), *given
                    )
                    for _ in range(arguments.rounds)
                ),
                key=lambda result: result["seconds"],
            )
            for name in CONTENDERS
        }
    plain = results["packed"]
    print("| layout | s a step | tokens/s | times as fast | peak MiB | loss | gradient norm |")
    print("|---|---|---|---|---|---|---|")
    for name, result in results.items():
        print(
            f"| {name} | {result['seconds']:.1f} | {result['tokens_s']:.0f} | "
            f"{plain['seconds'] / result['seconds']:.2f} | {result['peak_mib']:.0f} | "
            f"{result['loss']:.6f} | {result['norm']:.6f} |"
        )


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    from burnish_distributed import RaggedBatch
    from burnish_losses.policy_gradient import grpo_loss
    from burnish_packing import plan_micro_batches
    from burnish_trainer import TorchPolicy

    generator = np.random.default_rng(0)
    length = arguments.prompt + arguments.completion
    rows = []
    for _ in range(arguments.groups):
        prompt = generator.integers(3, 49152, arguments.prompt)
        for _ in range(arguments.group_size):
            completion = generator.integers(3, 49152, arguments.completion)
            advantage = np.full(length, generator.normal(), dtype=np.float32)
            rows.append(
                {
                    "token_ids": np.concatenate([prompt, completion]),
                    "token_mask": np.arange(length) >= arguments.prompt,
                    "advantages": advantage,
                    "sampled_logprobs": np.zeros(length, dtype=np.float32),
                }
            )
    batch = RaggedBatch.from_rows(rows)
    prefixes = {}
    if arguments.contender == "shared-prefix":
        ids = np.repeat(np.arange(arguments.groups), arguments.group_size)
        prefixes = {"prefix_ids": ids, "prefix_lengths": np.full_like(ids, arguments.prompt)}
        batch = RaggedBatch(batch.lengths, batch.token_columns, prefixes)
    plan = plan_micro_batches(batch.lengths, max_tokens=ROW_TOKENS, **prefixes)
    policy = TorchPolicy(str(arguments.model), learning_rate=1e-6)
    loss_fn = partial(grpo_loss, clip_low=0.2, clip_high=0.2, kl_coefficient=0.0)
    first = policy.train_step(batch, plan.ranks[0], loss_fn)
    seconds = _common.timed(
        lambda: [policy.train_step(batch, plan.ranks[0], loss_fn) for _ in range(arguments.steps)]
    )
    seconds /= arguments.steps
    return {
        "seconds": seconds,
        "tokens_s": len(rows) * length / seconds,
        "peak_mib": _common.peak_mib(),
        "loss": first["train/loss"],
        "norm": first["train/grad_norm"],
    }


if __name__ == "__main__":
    main()
