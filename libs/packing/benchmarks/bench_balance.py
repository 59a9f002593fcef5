# ruff: noqa: T201  (its table is what it is for)
"""How even the ranks' work is, and how fast it is planned: `python bench_balance.py`.

The time of a step over that of a perfectly balanced one, ranks waiting at every micro-batch:
512 sequences, 8 ranks, 4,096 tokens, the mean over seeds. Round-robin dealing of modified
first-fit-decreasing bins, and Karmarkar-Karp over as many bins (which ignores the capacity), are
what others do.
"""

import argparse

import numpy as np
from _baselines import fastest_s, karmarkar_karp
from burnish_packing import flops_cost, pack, plan_micro_batches, rank_imbalance, token_cost

SEQUENCES, RANKS, CAPACITY = 512, 8, 4096
FLOPS = flops_cost(
    hidden_size=1536,
    num_layers=28,
    intermediate_size=8960,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151_936,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    sizes = f"{SEQUENCES} sequences, {RANKS} ranks, {CAPACITY} tokens"
    print(f"\n### Slowest rank over the mean: {sizes}\n")
    print(
        "| lengths | cost | round-robin MFFD | Karmarkar-Karp (over capacity) | planned: mean "
        "| worst | extra micro-batches a rank | time |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name, draw in _draws().items():
        for cost_name, cost in (("tokens", token_cost), ("FLOPs of a 1.5B model", FLOPS)):
            rows = [_compare(draw(np.random.default_rng(seed)), cost) for seed in range(seeds)]
            dealt, differenced, over, planned, extra, took_s = np.array(rows).T
            print(
                f"| {name} | {cost_name} | {dealt.mean():.3f} | {differenced.mean():.3f} "
                f"({over.mean():.0%}) | {planned.mean():.4f} | {planned.max():.4f} | "
                f"{extra.max():.0f} | {took_s.max() * 1e3:.1f} ms |",
                flush=True,
            )


def _draws():
    def clipped(values):
        return values.astype(np.int64).clip(1, CAPACITY)

    return {
        "Pareto(1.5), 100 or more": lambda rng: clipped(100 * (1 + rng.pareto(1.5, SEQUENCES))),
        "Pareto(1.2), 100 or more": lambda rng: clipped(100 * (1 + rng.pareto(1.2, SEQUENCES))),
        "lognormal(6, 1)": lambda rng: clipped(rng.lognormal(6, 1, SEQUENCES)),
    }


def _compare(lengths, cost):
    """Imbalances, share of bins over the capacity, extra micro-batches, planning time."""
    costs = np.asarray(cost(lengths), np.float64)
    bins = pack(
        lengths, CAPACITY, algorithm="modified_first_fit_decreasing", bins_multiple_of=RANKS
    ).bins
    dealt = rank_imbalance(_sums(costs, bins).reshape(-1, RANKS).T)
    parts = karmarkar_karp(costs, len(bins))
    sums = np.sort(_sums(costs, parts))[::-1]
    over = np.mean(_sums(lengths, parts) > CAPACITY)
    arguments = {"max_tokens": CAPACITY, "num_ranks": RANKS, "cost": cost}
    plan = plan_micro_batches(lengths, **arguments)
    took_s = fastest_s(lambda: plan_micro_batches(lengths, **arguments), 3)
    fewest = len(pack(lengths, CAPACITY, bins_multiple_of=RANKS).bins) // RANKS
    planned = plan.metrics()["rank_imbalance"]
    extra = plan.num_micro_batches - fewest
    return dealt, rank_imbalance(sums.reshape(-1, RANKS).T), over, planned, extra, took_s


def _sums(values, bins):
    return np.array([values[np.asarray(indices, np.int64)].sum() for indices in bins])


if __name__ == "__main__":
    main()
