# ruff: noqa: T201  (its table is what it is for)
"""`optimal` on real lengths against the Gilmore-Gomory bound: `python bench_optimal.py`."""

import argparse
import time

from _baselines import real_sets
from burnish_packing import lp_bound, pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacities", type=int, nargs="+", default=[2048, 4096, 8192])
    arguments = parser.parse_args()
    print("\n### `optimal` on real lengths; longer ones are truncated to the capacity\n")
    print("| lengths | sequences | capacity | BFD | optimal | LP bound | time |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    worst_s, worst_gap = 0.0, 0
    for name, lengths in real_sets().items():
        for capacity in arguments.capacities:
            greedy = pack(lengths, capacity, too_long="truncate")
            start = time.perf_counter()
            packing = pack(lengths, capacity, algorithm="optimal", too_long="truncate")
            took_s = time.perf_counter() - start
            bound = lp_bound(packing.lengths, capacity)
            bins = len(packing.bins)
            worst_s, worst_gap = max(worst_s, took_s), max(worst_gap, bins - bound)
            print(
                f"| {name} | {len(lengths):,} | {capacity:,} | {len(greedy.bins)} | {bins} "
                f"| {bound} | {took_s:.2f} s |",
                flush=True,
            )
    print(f"\nAt most {worst_gap} bins above the LP bound, at most {worst_s:.2f} s.")


if __name__ == "__main__":
    main()
