# ruff: noqa: T201  (its table is what it is for)
"""Speed of best-fit-decreasing against the textbook loop, in one run: `python bench_packers.py`.

The baseline is best-fit-decreasing as it is usually written: one sequence at a time in pure Python,
over a sorted list of the room left in the bins, with bisection. Both run on the same lengths and
must need the same number of bins.
"""

import argparse
import time
from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np
from burnish_packing import pack

CAPACITY = 8192


def bisecting_best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of each bin; O(N log N) comparisons and a list insertion for every sequence."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending (room, bin)
    ordered = np.argsort(-lengths, kind="stable").tolist()
    length_of = lengths.tolist()
    for index in ordered:
        length = length_of[index]
        at = bisect_left(rooms, (length, 0))
        if at < len(rooms):
            room, chosen = rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(rooms, (room - length, chosen))
    return bins


def fastest_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-sequences", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    n = arguments.num_sequences
    sets = {
        "lognormal": rng.lognormal(6, 1, n),
        "uniform": rng.uniform(1, CAPACITY, n),
        "pareto": 200 * (1 + rng.pareto(1.5, n)),
    }
    print(f"{n} sequences, capacity {CAPACITY}, the fastest of {arguments.repeats} (baseline: 1)")
    print(f"{'lengths':10} {'bins':>8} {'bound':>8} {'pack':>9} {'baseline':>9} {'speed-up':>9}")
    for name, values in sets.items():
        lengths = values.astype(np.int64).clip(1, CAPACITY)
        packing = pack(lengths, CAPACITY)
        assert len(packing.bins) == len(bisecting_best_fit_decreasing(lengths, CAPACITY))
        ours_s = fastest_s(lambda lengths=lengths: pack(lengths, CAPACITY), arguments.repeats)
        baseline_s = fastest_s(
            lambda lengths=lengths: bisecting_best_fit_decreasing(lengths, CAPACITY), 1
        )
        print(
            f"{name:10} {len(packing.bins):8} {packing.lower_bound:8} {ours_s:8.3f}s "
            f"{baseline_s:8.3f}s {baseline_s / ours_s:8.1f}x"
        )


if __name__ == "__main__":
    main()
