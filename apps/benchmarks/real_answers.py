# ruff: noqa: T201  (its table is what it is for)
"""How well a reward model or a DPO policy tells right from wrong answers to GSM8K.

    burnish rm --recipe smollm2-gsm8k-cpu run_dir=runs/rm
    python real_answers.py --task rm --model runs/rm/checkpoints/step_000072/model
    python real_answers.py --task dpo --model .../step_000072/model --reference SMOLLM2

On all right and wrong pairs of the held-out problems of `gsm8k_preferences`. A problem counts once,
with the mean over its pairs; the interval is a bootstrap over problems. The baselines see nothing
but the two lengths in tokens: the shorter one, the longer one, and a logistic regression on the
training pairs' differences of lengths and of their logarithms.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from burnish_data import encode_preferences
from burnish_data.sources import gsm8k_preferences
from burnish_distributed import RaggedBatch
from burnish_packing import plan_micro_batches
from burnish_trainer import TorchPolicy
from transformers import AutoTokenizer

MAX_TOKENS = 4096
DRAWS = 10_000
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("rm", "dpo"), required=True)
    parser.add_argument("--model", required=True, help="folder of the trained model")
    parser.add_argument("--reference", help="folder of the model that DPO started from")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    problems, pairs = encoded_pairs(tokenizer, "validation")
    if arguments.task == "rm":
        margins = score_margins(arguments.model, pairs)
    else:
        trained, started = (
            logprob_margins(model, pairs) for model in (arguments.model, arguments.reference)
        )
        margins = trained - started
    lengths = length_differences(pairs)
    found = {
        "model": margins,
        "shorter": -lengths[:, 0],
        "longer": lengths[:, 0],
        "logistic of lengths": logistic_margins(tokenizer, lengths),
    }
    print(f"{len(set(problems))} problems, {len(pairs)} pairs")
    print("| | accuracy | 95 % |")
    print("|---|---|---|")
    for name, values in found.items():
        accuracy, low, high = accuracy_by_problem(values, problems, arguments.seed)
        print(f"| {name} | {accuracy:.3f} | {low:.3f} to {high:.3f} |")
    gain = by_problem(margins, problems)
    for name in list(found)[1:]:
        low, high = interval(gain - by_problem(found[name], problems), arguments.seed)
        print(f"the model less {name}: {low:+.3f} to {high:+.3f}")


def encoded_pairs(tokenizer: Any, split: Any) -> tuple[list[str], list[Any]]:
    """Problem of each pair, and the pair as token ids."""
    rows = gsm8k_preferences(split=split, max_pairs_per_problem=None)
    encoded = encode_preferences(rows, tokenizer)
    bad = [row for row in encoded if isinstance(row, Exception)]
    if bad:
        raise bad[0]
    return [row["problem"] for row in rows], encoded


def scored(pairs: list[Any], policy: TorchPolicy, method: str) -> tuple[RaggedBatch, Any]:
    """A batch with the chosen completion of each pair before the rejected one, and its outputs."""
    rows = [
        {"token_ids": side["token_ids"].astype(np.int64), "token_mask": side["token_mask"]}
        for pair in pairs
        for side in (pair["chosen"], pair["rejected"])
    ]
    batch = RaggedBatch.from_rows(rows)
    plan = plan_micro_batches(batch.lengths, max_tokens=MAX_TOKENS)
    return batch, getattr(policy, method)(batch, plan.ranks[0])


def score_margins(model: str, pairs: list[Any]) -> Numbers:
    """Scores of the chosen less those of the rejected, [P]."""
    policy = TorchPolicy(model, learning_rate=None, head="reward")
    _, scores = scored(pairs, policy, "scores")
    return np.asarray(scores[0::2] - scores[1::2], dtype=np.float64)


def logprob_margins(model: str, pairs: list[Any]) -> Numbers:
    """Log-probs of the chosen completions less those of the rejected, [P]."""
    batch, logprobs = scored(pairs, TorchPolicy(model, learning_rate=None), "logprobs")
    sums = np.add.reduceat(logprobs.astype(np.float64), batch.offsets[:-1])
    return np.asarray(sums[0::2] - sums[1::2])


def length_differences(pairs: list[Any]) -> Numbers:
    """Of completions, chosen less rejected: tokens, and their logarithm, [P, 2]."""
    lengths = np.array(
        [[pair[side]["token_mask"].sum() for side in ("chosen", "rejected")] for pair in pairs],
        dtype=np.float64,
    )
    logs = np.log(lengths)
    return np.stack([lengths[:, 0] - lengths[:, 1], logs[:, 0] - logs[:, 1]], axis=1)


def logistic_margins(tokenizer: Any, held_out: Numbers) -> Numbers:
    """Margins [P] of a logistic regression on length differences, fitted on the training pairs."""
    features = torch.from_numpy(length_differences(encoded_pairs(tokenizer, "train")[1]))
    scale = features.std(0)
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = -torch.nn.functional.logsigmoid(features / scale @ weights).mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return np.asarray((torch.from_numpy(held_out) / scale @ weights.detach()).numpy())


def by_problem(margins: Numbers, problems: list[str]) -> Numbers:
    """Share of pairs in the right order for each problem; ties count half."""
    right = (margins > 0) + 0.5 * (margins == 0)
    names = np.array(problems)
    return np.array([right[names == name].mean() for name in dict.fromkeys(problems)])


def accuracy_by_problem(
    margins: Numbers, problems: list[str], seed: int
) -> tuple[float, float, float]:
    """Accuracy, and its 95 % interval."""
    values = by_problem(margins, problems)
    return (float(values.mean()), *interval(values, seed))


def interval(values: Numbers, seed: int) -> tuple[float, float]:
    """The middle 95 % of the means of bootstrap samples."""
    generator = np.random.default_rng(seed)
    drawn = values[generator.integers(0, len(values), (DRAWS, len(values)))].mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
