# ruff: noqa: T201  (its table is what it is for)
"""`optimal` on real and drawn lengths against its bound: `python bench_optimal.py`."""

import argparse
import time

import numpy as np
from _baselines import real_sets
from burnish_packing import lp_bound, pack

# Lengths drawn evenly from [shortest, end), of which few fit a bin and few are equal: capacity,
# shortest, end, how many.
DRAWN = [
    *[(10_000, 3_000, 4_500, n) for n in (300, 1_000, 5_000)],
    *[(10_000, 2_500, 5_000, n) for n in (300, 1_000, 5_000)],
    *[(10_000, 2_000, 3_500, n) for n in (300, 1_000, 5_000)],
    *[(8_192, 2_048, 4_300, n) for n in (1_200, 3_000)],
    *[(8_192, *ends, 20_000) for ends in ((1, 8_193), (500, 6_000), (1_700, 4_500))],
    (131_072, 20_000, 60_000, 2_000),
    (131_072, 20_000, 60_000, 20_000),
]


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
    show_drawn()


def show_drawn() -> None:
    """A table of the drawn lengths; the bound is the one that the packing comes with."""
    print("\n### `optimal` on lengths drawn evenly from a range (seed 0)\n")
    print("| range | sequences | capacity | BFD | optimal | bound | time |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for capacity, shortest, end, num in DRAWN:
        lengths = np.random.default_rng(0).integers(shortest, end, num)
        greedy = pack(lengths, capacity)
        start = time.perf_counter()
        packing = pack(lengths, capacity, algorithm="optimal")
        took_s = time.perf_counter() - start
        print(
            f"| {shortest:,} to {end - 1:,} | {num:,} | {capacity:,} | {len(greedy.bins)} "
            f"| {len(packing.bins)} | {packing.lower_bound} | {took_s:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
