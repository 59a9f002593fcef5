# ruff: noqa: T201
"""Time and peak memory of log-probs from hidden states, against plain logits and others' kernels.

    python benchmarks/bench_logprobs.py [--tokens 4096 --vocabulary 151936 --hidden 896 ...]

Each measurement runs in a process of its own, one after the other and the whole table `--rounds`
times in turn, so that one's peak is not the other's and a busy spell of the machine meets all;
the fastest counts. Memory is the peak beyond the inputs and their gradients. Only ratios within one
run mean anything.

"half masked" scores every second token: `plain` makes all logits and masks the log-probs, and
`plain, selected` makes those of the scored tokens. "frozen head" needs no gradient of the weight.
Those of others that run on a CPU give one number with one gradient for all tokens (Liger's as the
GRPO loss at ratio 1); what is not installed, or refuses a CPU, is named.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

CASES = {
    "forward": ("plain", "burnish", "torch linear_cross_entropy", "cut-cross-entropy"),
    "forward+backward": (
        "plain",
        "burnish",
        "torch linear_cross_entropy",
        "torch linear_cross_entropy, chunked",
        "liger",
        "cut-cross-entropy",
    ),
    "half masked": ("plain", "plain, selected", "burnish"),
    "frozen head": ("plain", "burnish", "torch linear_cross_entropy"),
    "with entropy": ("plain", "burnish"),
}


def main() -> None:
    args = parse_arguments()
    if args.measure:
        print(json.dumps(measure(args, *args.measure)))
        return
    print(
        f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden {args.hidden}, float32, "
        f"{args.threads} threads, fastest of {args.rounds} rounds of {args.repeats}\n"
    )
    for case, names in CASES.items():
        if args.case in (None, case):
            chosen = tuple(name for name in names if args.names is None or name in args.names)
            print_table(case, chosen, args.rounds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk-tokens", type=int, help="default: the library's")
    parser.add_argument("--repeats", type=int, default=2, help="in one process")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=sorted(CASES))
    parser.add_argument("--names", nargs="+", help="of methods, with plain; default: all")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "NAME"), help="internal")
    return parser.parse_args()


def print_table(case: str, names: tuple[str, ...], num_rounds: int) -> None:
    rounds = [{name: run_alone(case, name) for name in names} for _ in range(num_rounds)]
    print(f"| {case} | s | MiB | time / plain | memory / plain |\n|---|---|---|---|---|")
    best = {name: fastest([results[name] for results in rounds]) for name in names}
    plain = best["plain"]
    if isinstance(plain, str):
        raise RuntimeError(f"plain did not run: {plain}")
    plain_s, plain_bytes = plain
    for name, result in best.items():
        if isinstance(result, str):
            print(f"| {name} | {result} | | | |")
        else:
            time_s, peak_bytes = result
            print(
                f"| {name} | {time_s:.2f} | {peak_bytes / 2**20:.0f} | {time_s / plain_s:.2f} "
                f"| 1/{plain_bytes / max(1, peak_bytes):.1f} |"
            )
    print(flush=True)


def fastest(results: list[dict]) -> tuple[float, float] | str:
    times = [result["time_s"] for result in results if "time_s" in result]
    if not times:
        return results[0]["refused"]
    return min(times), min(result["peak_bytes"] for result in results if "time_s" in result)


def run_alone(case: str, name: str) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", case, name]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last_line = (result.stderr.strip().splitlines() or [f"exit {result.returncode}"])[-1]
        if name in ("plain", "plain, selected", "burnish"):
            raise RuntimeError(result.stderr)
        return {"refused": "not installed" if "No module" in last_line else last_line[:60]}
    return json.loads(result.stdout.splitlines()[-1])


def measure(args: argparse.Namespace, case: str, name: str) -> dict[str, float]:
    import torch

    torch.set_num_threads(args.threads)
    backward = case != "forward"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).requires_grad_(backward)
    # In place: a temporary here would raise the peak that is compared with.
    weight = torch.randn(args.vocabulary, args.hidden, generator=generator).mul_(args.hidden**-0.5)
    weight.requires_grad_(backward and case != "frozen head")
    labels = torch.randint(args.vocabulary, (args.tokens,), generator=generator)
    mask = torch.arange(args.tokens) % 2 == 0 if case == "half masked" else None
    loss_of = method(name, args.chunk_tokens, mask, case == "with entropy")
    # A small call first, for what the process allocates once.
    few = slice(0, 2)
    small = method(name, args.chunk_tokens, None if mask is None else mask[few], False)
    small(hidden.detach()[few], weight.detach()[: args.hidden], labels[few] % args.hidden)

    before = peak_rss_bytes()
    times = []
    for _ in range(args.repeats):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        loss = loss_of(hidden, weight, labels)
        if backward:
            loss.backward()
        times.append(time.perf_counter() - start)
        del loss
    gradients = sum(t.nbytes for t in (hidden, weight) if t.requires_grad)
    return {"time_s": min(times), "peak_bytes": peak_rss_bytes() - before - gradients}


def method(name: str, chunk_tokens: int | None, mask, with_entropy: bool) -> Callable:  # type: ignore[no-untyped-def]
    """(hidden, weight, labels) -> a scalar; what is compared, imported only if it is asked for."""
    import torch

    def plain(hidden, weight, labels):  # type: ignore[no-untyped-def]
        scores = (hidden @ weight.T).log_softmax(-1)
        logprobs = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        loss = logprobs.sum() if mask is None else torch.where(mask, logprobs, 0.0).sum()
        return loss - (scores.exp() * scores).sum() if with_entropy else loss

    def selected(hidden, weight, labels):  # type: ignore[no-untyped-def]
        scores = (hidden[mask] @ weight.T).log_softmax(-1)
        return scores.gather(-1, labels[mask].unsqueeze(-1)).sum()

    def burnish(hidden, weight, labels):  # type: ignore[no-untyped-def]
        from burnish_losses import logprobs_from_hidden

        settings = {"mask": mask, "chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
        result = logprobs_from_hidden(hidden, weight, labels, **settings)
        return result[0].sum() + result[1].sum() if with_entropy else result.sum()

    def liger(hidden, weight, labels):  # type: ignore[no-untyped-def]
        # At ratio 1 without clipping or KL: minus the sum of log-probs, up to a constant.
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        rows = labels.view(-1, min(len(labels), 256))
        ones = torch.ones(rows.shape)
        loss_fn = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=False, use_ref_model=False, loss_type="bnpo"
        )
        states = hidden.view(*rows.shape, -1)
        return loss_fn(states, weight, rows, ones, ones[:, 0])[0] * len(labels)

    def torch_chunked(hidden, weight, labels):  # type: ignore[no-untyped-def]
        return torch.nn.functional.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=torch.nn.LinearCrossEntropyOptions()
        )

    def cut(hidden, weight, labels):  # type: ignore[no-untyped-def]
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(hidden, weight, labels, impl="torch_compile")

    methods = {
        "plain": plain,
        "plain, selected": selected,
        "burnish": burnish,
        "torch linear_cross_entropy": lambda *inputs: torch.nn.functional.linear_cross_entropy(
            *inputs, reduction="sum"
        ),
        "torch linear_cross_entropy, chunked": torch_chunked,
        "liger": liger,
        "cut-cross-entropy": cut,
    }
    return methods[name]


def peak_rss_bytes() -> int:
    """Largest resident size so far; getrusage tells KiB on Linux and bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
