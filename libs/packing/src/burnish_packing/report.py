# ruff: noqa: T201  (a command line: its table is what it is for)
"""`burnish-packing report`: what packing a set of lengths gains, algorithm by algorithm."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np

from burnish_packing._checks import IntArray, check_positive
from burnish_packing._length_files import read_lengths
from burnish_packing.layout import round_up
from burnish_packing.metrics import fill_ratio, rank_imbalance
from burnish_packing.microbatches import plan_micro_batches
from burnish_packing.packers import Algorithm, Packing, TooLong, pack

__all__ = ["main", "read_lengths"]

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
PLOT = Path("packing-report.png")
HEADER = f"{'':30} {'bins':>9} {'bound':>9} {'waste':>8} {'slowest rank':>13} {'time':>9}"
EXPLANATION = (
    "bound: no packing has fewer bins; waste: share of their room without a token; slowest rank: "
    "a step's time over that of equal ranks; time: of packing"
)
# Beyond so many sequences a picture of fills and a plan of tuples stop being useful.
MANY = 2_000_000
MAX_RANKS = 1_000_000
BROKEN_PIPE = 141  # what a shell reports of a program that the signal SIGPIPE ended: 128 + 13


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    num_bins: int
    lower_bound: int | None
    waste: float  # share of the bins' capacity that holds no token
    slowest_rank: float  # time of a step over that of a perfectly balanced one
    time_s: float

    def __str__(self) -> str:
        bound = "" if self.lower_bound is None else self.lower_bound
        return (
            f"{self.name:30} {self.num_bins:>9} {bound:>9} {self.waste:>8.2%} "
            f"{self.slowest_rank:>12.3f}x {self.time_s:>8.3f}s"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `burnish-packing`; returns the exit code: 0, or 2 for bad input."""
    parsed = _parser().parse_args(arguments)
    try:
        _check_options(parsed)
        lengths = read_lengths(parsed.path, parsed.field)
        _check_fit(lengths, parsed)
        _report(lengths, parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        # Python flushes the output once more at its end, which must not fail aloud.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError) as error:
        print(f"burnish-packing: error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print(
            "burnish-packing: error: the lengths must fit in memory, got too many; report on a "
            "sample of them",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("burnish-packing: interrupted", file=sys.stderr)
        return 130
    return 0


def _check_options(parsed: argparse.Namespace) -> None:
    """ValueError for options that would stop the report half-way; sets where the picture goes."""
    check_positive(parsed.capacity, "--capacity")
    check_positive(parsed.ranks, "--ranks")
    if parsed.ranks > MAX_RANKS:
        raise ValueError(f"--ranks must be at most {MAX_RANKS}, got {parsed.ranks}; pass fewer")
    if parsed.seed < 0:
        raise ValueError(f"--seed must be >= 0, got {parsed.seed}; pass another")
    if "optimal" in parsed.algorithms and find_spec("scipy") is None:
        raise ValueError(
            "--algorithms optimal must have scipy for hard lengths, got none; pip install "
            '"burnish-packing[optimal]", or leave it out'
        )
    if parsed.no_plot:
        return
    path = parsed.plot or PLOT
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot must end in .png or .svg, got {path}; rename it")
    if find_spec("matplotlib") is None:
        if parsed.plot:
            raise ValueError(
                '--plot must have matplotlib, got none; pip install "burnish-packing[report]", or '
                "pass --no-plot"
            )
        print('no picture without matplotlib: pip install "burnish-packing[report]", or --no-plot')
        parsed.no_plot = True
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"--plot must be a file in a folder that can be written to, got {path}; name another, "
            f"or pass --no-plot"
        )
    parsed.plot = path


def _check_fit(lengths: IntArray, parsed: argparse.Namespace) -> None:
    """ValueError where too long sequences leave nothing to report, or nobody said what to do."""
    too_long = np.flatnonzero(lengths > parsed.capacity)
    if too_long.size and parsed.too_long == "error":
        raise ValueError(
            f"every sequence must fit a bin of --capacity {parsed.capacity}, got "
            f"{lengths[too_long[0]]} tokens for sequence {too_long[0]} (from 0) and "
            f"{len(too_long)} too long in all; raise it, or pass --too-long skip, truncate or split"
        )
    if len(too_long) == len(lengths) and parsed.too_long == "skip":
        raise ValueError(
            f"a sequence must fit a bin of --capacity {parsed.capacity}, got none of "
            f"{len(lengths)} that does; raise it, or pass --too-long truncate or split"
        )


def _report(lengths: IntArray, parsed: argparse.Namespace) -> None:
    print(
        f"{_counted(len(lengths), 'sequence')}, {_counted(int(lengths.sum()), 'token')}: "
        f"{lengths.min()} to {lengths.max()}, median {np.median(lengths):.0f}; "
        f"capacity {parsed.capacity}, {_counted(parsed.ranks, 'rank')}"
    )
    print(HEADER, flush=True)
    shown: Packing | None = None
    fills: dict[str, IntArray] = {}
    for algorithm in dict.fromkeys(parsed.algorithms):
        start = time.perf_counter()
        try:
            packing = pack(
                lengths,
                parsed.capacity,
                algorithm=algorithm,
                too_long=parsed.too_long,
                seed=parsed.seed,
            )
        except RuntimeError as error:  # the solver's, which others do without
            print(f"{algorithm:30} left out: {error}", flush=True)
            continue
        took_s = time.perf_counter() - start
        shown = shown or packing
        fills[algorithm] = np.array([packing.lengths[b].sum() for b in packing.bins], np.int64)
        print(_row_of(algorithm, packing, fills[algorithm], parsed.ranks, took_s), flush=True)
    if shown is None:
        raise ValueError("an algorithm must come to an end, got none that did; name another")
    kept = _kept_lengths(shown)
    if len(kept) <= MANY:
        print(_row_of_plan(kept, parsed.capacity, parsed.ranks, "packed"), flush=True)
        print(_row_of_plan(kept, parsed.capacity, parsed.ranks, "padded"), flush=True)
    print(_row_of_padding(kept, parsed.capacity, parsed.ranks))
    print(EXPLANATION)
    metrics = shown.metrics()
    for name in ("num_skipped", "num_truncated", "num_split", "num_lost_tokens"):
        if metrics[name]:
            print(f"{name}: {metrics[name]:.0f} (--too-long {parsed.too_long})")
    if not parsed.no_plot:
        draw(lengths, fills, parsed.capacity, parsed.plot)
        print(f"picture: {parsed.plot}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _row_of(
    name: str, packing: Packing, num_tokens: IntArray, num_ranks: int, time_s: float
) -> Row:
    """An algorithm's bins of so many tokens [K], dealt to the ranks in turn as loaders do."""
    waste = 1 - fill_ratio(num_tokens, packing.capacity)
    slowest = rank_imbalance(_dealt(num_tokens, num_ranks))
    return Row(name, len(num_tokens), packing.lower_bound, waste, slowest, time_s)


def _row_of_plan(lengths: IntArray, capacity: int, num_ranks: int, mode: Any) -> Row:
    start = time.perf_counter()
    lengths = lengths[lengths > 0]  # nothing runs for the others
    plan = plan_micro_batches(lengths, max_tokens=capacity, num_ranks=num_ranks, mode=mode)
    time_s = time.perf_counter() - start
    metrics = plan.metrics()
    num_bins = int(metrics["num_ranks"] * metrics["num_micro_batches"] - metrics["num_empty_slots"])
    waste = 1 - metrics["fill_ratio"] if num_bins else 0.0
    return Row(f"plan, {mode}", num_bins, None, waste, metrics["rank_imbalance"], time_s)


def _row_of_padding(lengths: IntArray, capacity: int, num_ranks: int) -> Row:
    """What packing replaces: batches in the given order, of as many rows as fit of the longest."""
    start = time.perf_counter()
    num_rows = min(capacity // max(int(lengths.max()), 1), len(lengths))
    starts = np.arange(0, len(lengths), num_rows)
    rows = np.diff(starts, append=len(lengths))
    slowest = rank_imbalance(_dealt(rows * np.maximum.reduceat(lengths, starts), num_ranks))
    waste = 1 - int(lengths.sum()) / (len(starts) * capacity)
    name = f"no packing, {_counted(num_rows, 'row')} a batch"
    return Row(name, len(starts), None, waste, slowest, time.perf_counter() - start)


def _dealt(costs: IntArray, num_ranks: int) -> IntArray:
    """Costs [K] of bins dealt in turn: [num_ranks, slots], 0 where the last ranks have none."""
    full = round_up(len(costs), num_ranks)
    return np.pad(costs, (0, full - len(costs))).reshape(-1, num_ranks).T


def _kept_lengths(packing: Packing) -> IntArray:
    """Lengths of the pieces that are in a bin."""
    return packing.lengths[np.sort(np.concatenate(packing.bins))]


def draw(lengths: IntArray, fills: Mapping[str, IntArray], capacity: int, path: Path) -> None:
    """A picture of the lengths [N] and of the tokens in each algorithm's bins [K], PNG or SVG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    counts, _, _ = left.hist(lengths, bins=min(80, max(10, len(np.unique(lengths)))), color="gray")
    scale = "log" if counts.max() > 100 else "linear"
    left.set(xlabel="tokens of a sequence", ylabel="sequences", yscale=scale, title="Lengths")
    if capacity <= 1.5 * lengths.max():  # else the line would press the histogram to one side
        left.axvline(capacity, color="tab:red", linewidth=1, label=f"capacity {capacity}")
        left.legend()

    names_of: dict[tuple[int, ...], list[str]] = {}  # algorithms whose bins are equally full
    for name, num_tokens in fills.items():
        names_of.setdefault(tuple(np.sort(num_tokens)[::-1].tolist()), []).append(name)
    # What is between a line and the top is waste.
    for i, (held, names) in enumerate(names_of.items()):
        filled = 100 * np.array(held) / capacity
        waste = f"{_counted(len(filled), 'bin')}, {1 - filled.mean() / 100:.2%} waste"
        dashes, label = ("-", "--", "-.", ":")[i % 4], "\n".join([*names, waste])
        starts = np.unique(np.linspace(0, len(filled) - 1, 4000).astype(np.int64))  # of many bins
        edges = np.append(starts, len(filled))
        right.stairs(
            filled[starts], edges, baseline=None, linewidth=1.6, linestyle=dashes, label=label
        )
    # The last bins may hold anything: the axis ends where a tenth of the emptiest packing's do.
    lowest = 100 * min(np.quantile(fill, 0.1) for fill in fills.values()) / capacity
    margin = 0.05 * (100 - lowest) + 0.1
    right.set(
        xlabel="bins, fullest first",
        ylabel="filled (%)",
        xlim=(0, None),
        ylim=(max(lowest - margin, 0), 100 + margin),
        title=f"Bins of capacity {capacity}",
    )
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small", labelspacing=1)
    figure.savefig(path, dpi=120, format=path.suffix[1:].lower())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish-packing", description="Sequence packing for training language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="compare packing algorithms on your lengths",
        description="Compare packing algorithms on your lengths: bins, lower bound, waste (share "
        "of the bins' room that holds no token), time of a step over that of equal ranks when bins "
        "are dealt in turn, and time to pack. Below them the balanced plans, and padding: as many "
        "rows a batch as fit when all are as long as the longest.",
    )
    report.add_argument("path", type=Path, help="LENGTHS.npy, or rows as DATA.jsonl")
    report.add_argument("--capacity", type=int, required=True, help="tokens of a bin")
    report.add_argument("--ranks", type=int, default=1, help="data-parallel ranks (1)")
    report.add_argument("--field", help="of the JSON rows: a number of tokens, or a list of them")
    report.add_argument(
        "--algorithms",
        nargs="+",
        choices=ALGORITHMS,
        metavar="NAME",
        default=[name for name in ALGORITHMS if name != "optimal"],
        help=f"of {', '.join(ALGORITHMS)} (all but optimal, which can take seconds)",
    )
    report.add_argument(
        "--too-long",
        choices=get_args(TooLong),
        default="error",
        help="what happens to sequences longer than the capacity (error)",
    )
    report.add_argument("--seed", type=int, default=0, help="of first_fit_shuffle (0)")
    report.add_argument("--plot", type=Path, help=f".png or .svg ({PLOT})")
    report.add_argument("--no-plot", action="store_true", help="draw nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
