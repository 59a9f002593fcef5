"""Peak memory and time of `logprobs_from_hidden` against plain logits and log_softmax.

    python benchmarks/bench_logprobs.py [--tokens 4096 --vocabulary 151936 --hidden 896 ...]

Each measurement runs in a process of its own, one after the other, so that one's peak is not the
other's. Memory is the peak beyond the inputs and their gradients. Only ratios within one run mean
anything; the machine's load is in both numbers.
"""

import argparse
import json
import resource
import subprocess
import sys
import time


def main() -> None:
    args = parse_arguments()
    if args.measure:
        sys.stdout.write(json.dumps(measure(args)))
        return
    sys.stdout.write(
        f"tokens {args.tokens}, vocabulary {args.vocabulary}, hidden {args.hidden}, float32, "
        f"threads {args.threads}, chunk {args.chunk_tokens}\n"
    )
    for direction in ("forward", "forward+backward"):
        plain, fused = (run_alone(name, direction) for name in ("plain", "fused"))
        for name, result in (("plain", plain), ("fused", fused)):
            sys.stdout.write(
                f"{direction:17} {name}: {result['time_s']:7.3f} s, "
                f"{result['peak_bytes'] / 2**20:8.1f} MiB\n"
            )
        sys.stdout.write(
            f"{direction:17} fused / plain: time {fused['time_s'] / plain['time_s']:.3f}, "
            f"memory {fused['peak_bytes'] / plain['peak_bytes']:.3f} "
            f"(1/{plain['peak_bytes'] / fused['peak_bytes']:.1f})\n"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "DIRECTION"), help="internal")
    return parser.parse_args()


def run_alone(name: str, direction: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name, direction]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def measure(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from burnish_losses import logprobs_from_hidden

    name, direction = args.measure
    backward = direction == "forward+backward"
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).requires_grad_(backward)
    # In place: a temporary here would raise the peak that is compared with.
    weight = torch.randn(args.vocabulary, args.hidden, generator=generator).mul_(args.hidden**-0.5)
    weight.requires_grad_(backward)
    labels = torch.randint(args.vocabulary, (args.tokens,), generator=generator)
    # A small call first, for what the process allocates once.
    logprobs_from_hidden(hidden.detach()[:1], weight.detach(), labels[:1])

    def once() -> None:
        hidden.grad = weight.grad = None
        if name == "fused":
            logprobs = logprobs_from_hidden(hidden, weight, labels, chunk_tokens=args.chunk_tokens)
        else:
            scores = (hidden @ weight.T).log_softmax(-1)
            logprobs = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        if backward:
            logprobs.sum().backward()

    before = peak_rss_bytes()
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    gradients = sum(t.nbytes for t in (hidden, weight)) if backward else 0
    return {"time_s": min(times), "peak_bytes": peak_rss_bytes() - before - gradients}


def peak_rss_bytes() -> int:
    """Largest resident size so far; getrusage tells KiB on Linux and bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
