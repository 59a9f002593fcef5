"""What the benchmarks compare with: packers and balancing as they are usually written."""

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

LENGTHS = Path(__file__).parent / "lengths"


def real_sets() -> dict[str, np.ndarray]:
    """Lengths of real data by name (lengths/README.md)."""
    paths = sorted(LENGTHS.glob("*.npy"))
    return {path.name.removesuffix(".total.npy"): np.load(path).astype(np.int64) for path in paths}


def synthetic_sets(num_sequences: int, longest: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Lognormal, Pareto and uniform lengths, clipped to [1, longest]."""
    rng = np.random.default_rng(seed)
    sets = {
        "lognormal(6, 1)": rng.lognormal(6, 1, num_sequences),
        "Pareto(1.5), 50 or more": 50 * (1 + rng.pareto(1.5, num_sequences)),
        "Pareto(1.5), 200 or more": 200 * (1 + rng.pareto(1.5, num_sequences)),
        "uniform": rng.uniform(1, longest + 1, num_sequences),
    }
    return {name: values.astype(np.int64).clip(1, longest) for name, values in sets.items()}


def fastest_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def list_scan_first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """The textbook's: every sequence looks at the bins from the first on. O(N * bins)."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    length_of = lengths.tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = length_of[index]
        for i, room in enumerate(rooms):
            if room >= length:
                bins[i].append(index)
                rooms[i] -= length
                break
        else:
            bins.append([index])
            rooms.append(capacity - length)
    return bins


def segment_tree_first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """First-fit by a tree of maxima over the room of all bins. O(N log N)."""
    size = 1 << max(len(lengths) - 1, 1).bit_length()
    tree = [capacity] * (2 * size)
    bins: list[list[int]] = []
    length_of = lengths.tolist()
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = length_of[index]
        node = 1
        while node < size:
            node *= 2
            if tree[node] < length:
                node += 1
        chosen = node - size
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        tree[node] -= length
        node //= 2
        while node:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node //= 2
    return bins


def karmarkar_karp(costs: np.ndarray, num_bins: int) -> list[list[int]]:
    """Largest differencing over `num_bins` bins (Karmarkar and Karp, 1982); no capacity.

    The form that RLHF trainers balance micro-batches with.
    """
    # An entry: (-spread, tie, per-bin sums descending, per-bin indices).
    heap: list[tuple[float, int, list[float], list[list[int]]]] = []
    for i, cost in enumerate(costs.tolist()):
        sums = [cost] + [0.0] * (num_bins - 1)
        heap.append((-cost, i, sums, [[i]] + [[] for _ in range(num_bins - 1)]))
    heapify(heap)
    while len(heap) > 1:
        _, tie, sums_a, bins_a = heappop(heap)
        _, _, sums_b, bins_b = heappop(heap)
        # The fullest bin of one with the emptiest of the other.
        merged = sorted(
            (
                (x + y, p + q)
                for x, y, p, q in zip(
                    sums_a, reversed(sums_b), bins_a, reversed(bins_b), strict=True
                )
            ),
            key=lambda pair: -pair[0],
        )
        sums, bins = [pair[0] for pair in merged], [pair[1] for pair in merged]
        heappush(heap, (sums[-1] - sums[0], tie, sums, bins))
    return heap[0][3]
