# ruff: noqa: T201  (its tables are what it is for)
"""Speed and waste of the packers against public ones, in one run: `python bench_packers.py`.

Peers run with their own defaults on their own input form; `trl.pack_dataset` also moves the tokens
(one byte each here), which index bins leave to the collator.
"""

import argparse
import time

import numpy as np
from _baselines import (
    fastest_s,
    list_scan_first_fit_decreasing,
    segment_tree_first_fit_decreasing,
    synthetic_sets,
)
from burnish_packing import pack

CAPACITY = 8192
GAP_ALGORITHMS = (
    "next_fit",
    "first_fit_shuffle",
    "first_fit_decreasing",
    "best_fit_decreasing",
    "modified_first_fit_decreasing",
    "optimal",
)


def speed(sizes: list[int], repeats: int) -> None:
    print(f"\n### Default algorithm, lengths to index bins, capacity {CAPACITY}\n")
    print("| sequences | lengths | bins | lower bound | above it | time |")
    print("|---:|---|---:|---:|---:|---:|")
    for n in sizes:
        for name, lengths in synthetic_sets(n, CAPACITY).items():
            packing = pack(lengths, CAPACITY)
            took_s = fastest_s(lambda lengths=lengths: pack(lengths, CAPACITY), repeats)
            bins, bound = len(packing.bins), packing.lower_bound
            print(
                f"| {n:,} | {name} | {bins:,} | {bound:,} | {bins / bound - 1:.3%} "
                f"| {took_s:.2f} s |"
            )


def peers(repeats: int) -> None:
    print(
        f"\n### Against public packers and textbook loops, lognormal lengths, capacity {CAPACITY}\n"
    )
    print("| packer | sequences | bins | time per sequence | time over ours |")
    print("|---|---:|---:|---:|---:|")
    for n, others in (
        (5_000, (_binpacking, list_scan_first_fit_decreasing, segment_tree_first_fit_decreasing)),
        (100_000, (_trl_pack_dataset, segment_tree_first_fit_decreasing)),
    ):
        lengths = synthetic_sets(n, CAPACITY)["lognormal(6, 1)"]
        ours_s = fastest_s(lambda lengths=lengths: pack(lengths, CAPACITY), max(repeats, 3))
        bins = len(pack(lengths, CAPACITY).bins)
        print(f"| burnish_packing.pack | {n:,} | {bins:,} | {ours_s / n * 1e6:.3f} us | 1 |")
        for other in others:
            call, count = other_call(other, lengths)
            took_s = fastest_s(call, 1)
            name = other.__name__.strip("_")
            print(
                f"| {name} | {n:,} | {count():,} | {took_s / n * 1e6:.2f} us | "
                f"{took_s / ours_s:.0f}x |"
            )


def other_call(other, lengths):
    """The call to time, and a function that says how many bins it made."""
    prepared = other(lengths) if other in (_binpacking, _trl_pack_dataset) else None
    result = []

    def call():
        result[:] = prepared() if prepared else other(lengths, CAPACITY)

    return call, lambda: len(result)


def _binpacking(lengths):
    import binpacking

    items = dict(enumerate(lengths.tolist()))
    return lambda: binpacking.to_constant_volume(items, CAPACITY)


def _trl_pack_dataset(lengths):
    import datasets
    import pyarrow as pa
    import trl

    datasets.disable_progress_bars()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    tokens = pa.array(np.zeros(lengths.sum(), np.uint8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})
    rows = datasets.Dataset(table)
    # One map batch: by default TRL packs 1,000 rows at a time, which needs more bins.
    options = {"batch_size": len(lengths), "keep_in_memory": True, "load_from_cache_file": False}
    return lambda: [None] * len(trl.pack_dataset(rows, CAPACITY, "bfd", map_kwargs=options))


def gaps(sizes: list[int], optimal_up_to: int) -> None:
    print(f"\n### Bins above the lower bound, capacity {CAPACITY}\n")
    print("| lengths | sequences | " + " | ".join(GAP_ALGORITHMS) + " | optimal's time |")
    print("|---|---:|" + "---:|" * (len(GAP_ALGORITHMS) + 1))
    for n in sizes:
        for name, lengths in synthetic_sets(n, CAPACITY).items():
            names = GAP_ALGORITHMS if n <= optimal_up_to else GAP_ALGORITHMS[:-1]
            packings = {}
            for algorithm in names:
                start = time.perf_counter()
                packings[algorithm] = pack(lengths, CAPACITY, algorithm=algorithm, seed=0)
                took_s = time.perf_counter() - start  # at last, optimal's
            bound = max(packing.lower_bound for packing in packings.values())
            cells = [f"{len(packings[a].bins) / bound - 1:.3%}" for a in names]
            cells += [f"{took_s:.1f} s"] if n <= optimal_up_to else ["", ""]
            print(f"| {name} | {n:,} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--gap-sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--optimal-up-to", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    speed(arguments.sizes, arguments.repeats)
    peers(arguments.repeats)
    gaps(arguments.gap_sizes, arguments.optimal_up_to)


if __name__ == "__main__":
    main()
