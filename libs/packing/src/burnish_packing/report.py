# ruff: noqa: T201  (a command line: its table is what it is for)
"""`burnish-packing report`: what packing a set of lengths gains, algorithm by algorithm."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from burnish_packing._checks import IntArray, as_lengths, check_positive
from burnish_packing.layout import round_up
from burnish_packing.metrics import padding_ratio, rank_imbalance
from burnish_packing.microbatches import plan_micro_batches
from burnish_packing.packers import Algorithm, Packing, TooLong, pack

ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
FIELDS = ("length", "num_tokens", "token_ids", "input_ids")
HEADER = f"{'':30} {'bins':>9} {'bound':>9} {'waste':>8} {'slowest rank':>13} {'time':>9}"
# Beyond so many sequences a picture of fills and a plan of tuples stop being useful.
MANY = 2_000_000


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    num_bins: int
    lower_bound: int | None
    waste: float  # share of the positions that hold no token
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
        lengths = read_lengths(parsed.path, parsed.field)
        _report(lengths, parsed)
    except (ValueError, OSError) as error:
        print(f"burnish-packing: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("burnish-packing: interrupted", file=sys.stderr)
        return 130
    return 0


def read_lengths(path: Path, field: str | None = None) -> IntArray:
    """Lengths in tokens, int64 [N], of a .npy array, or of a .jsonl file with a row per line.

    Args:
        path: the file.
        field: of the rows: a number of tokens, or a list whose length counts. By default the first
            of `length`, `num_tokens`, `token_ids`, `input_ids` that the first row has.

    Raises:
        ValueError: naming file, line and field that are not as they must be.
    """
    if path.suffix == ".npy":
        try:
            lengths = as_lengths(np.load(path, allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} must be a saved array of lengths: {error}") from error
    elif path.suffix in (".jsonl", ".ndjson"):
        lengths = as_lengths(_lengths_of_rows(path, field))
    else:
        raise ValueError(f"a file must end in .npy or .jsonl, got {path}; convert it")
    if not lengths.size:
        raise ValueError(f"{path} must hold at least one length, got none; choose another file")
    return lengths


def _lengths_of_rows(path: Path, field: str | None) -> list[int]:
    lengths: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} must be a JSON object, got {error}; mend it") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} must be a JSON object, got {type(row).__name__}")
            field = field or next((name for name in FIELDS if name in row), None)
            if field is None or field not in row:
                wanted = field or " or ".join(FIELDS)
                raise ValueError(
                    f"{where} must have {wanted}, got {sorted(row)}; name one: --field"
                )
            value = row[field]
            length = len(value) if isinstance(value, list) else value
            if isinstance(length, bool) or not isinstance(length, int) or length < 0:
                raise ValueError(
                    f"{where}, {field} must be a number of tokens or a list of them, got "
                    f"{value!r}; name another: --field"
                )
            lengths.append(length)
    return lengths


def _report(lengths: IntArray, parsed: argparse.Namespace) -> None:
    check_positive(parsed.ranks, "ranks")
    print(
        f"{len(lengths)} sequences, {lengths.sum()} tokens: {lengths.min()} to {lengths.max()}, "
        f"median {np.median(lengths):.0f}; capacity {parsed.capacity}, {parsed.ranks} ranks"
    )
    print(HEADER, flush=True)
    shown: Packing | None = None
    for algorithm in parsed.algorithms:
        start = time.perf_counter()
        packing = pack(
            lengths,
            parsed.capacity,
            algorithm=algorithm,
            too_long=parsed.too_long,
            seed=parsed.seed,
        )
        took_s = time.perf_counter() - start
        shown = shown or packing
        print(_row_of(algorithm, packing, parsed.ranks, took_s), flush=True)
    assert shown is not None
    kept = _kept_lengths(shown)
    if len(kept) <= MANY:
        print(_row_of_plan(kept, parsed.capacity, parsed.ranks, "packed"), flush=True)
        print(_row_of_plan(kept, parsed.capacity, parsed.ranks, "padded"), flush=True)
    print(_row_of_padding(kept, parsed.capacity, parsed.ranks))
    metrics = shown.metrics()
    for name in ("num_skipped", "num_truncated", "num_split", "num_lost_tokens"):
        if metrics[name]:
            print(f"{name}: {metrics[name]:.0f} (--too-long {parsed.too_long})")
    if not parsed.no_plot:
        _draw(lengths, shown, parsed)


def _row_of(name: str, packing: Packing, num_ranks: int, time_s: float) -> Row:
    """An algorithm's bins, dealt to the ranks in turn as loaders do."""
    num_tokens = [int(packing.lengths[indices].sum()) for indices in packing.bins]
    waste = padding_ratio(num_tokens, [packing.capacity] * len(num_tokens))
    slowest = rank_imbalance(_dealt(num_tokens, num_ranks))
    return Row(name, len(num_tokens), packing.lower_bound, waste, slowest, time_s)


def _row_of_plan(lengths: IntArray, capacity: int, num_ranks: int, mode: Any) -> Row:
    start = time.perf_counter()
    plan = plan_micro_batches(lengths, max_tokens=capacity, num_ranks=num_ranks, mode=mode)
    time_s = time.perf_counter() - start
    metrics = plan.metrics()
    num_bins = int(metrics["num_ranks"] * metrics["num_micro_batches"] - metrics["num_empty_slots"])
    # A pack is run without its free room, so that padding counts in mode padded only.
    waste = 1 - metrics["fill_ratio"] if mode == "packed" else metrics["padding_ratio"]
    return Row(f"plan, {mode}", num_bins, None, waste, metrics["rank_imbalance"], time_s)


def _row_of_padding(lengths: IntArray, capacity: int, num_ranks: int) -> Row:
    """What packing replaces: batches in the given order, every row as long as the longest."""
    start = time.perf_counter()
    rows = max(capacity // int(lengths.max()), 1)
    padded = np.pad(lengths, (0, round_up(len(lengths), rows) - len(lengths))).reshape(-1, rows)
    positions = padded.max(axis=1) * (padded > 0).sum(axis=1)
    slowest = rank_imbalance(_dealt(positions, num_ranks))
    waste = padding_ratio(lengths, positions)
    name = f"no packing, {rows} rows a batch"
    return Row(name, len(positions), None, waste, slowest, time.perf_counter() - start)


def _dealt(costs: Sequence[int] | IntArray, num_ranks: int) -> np.ndarray:
    """Costs [K] of bins dealt in turn: [num_ranks, slots], 0 where the last ranks have none."""
    costs = np.asarray(costs)
    full = round_up(len(costs), num_ranks)
    return np.pad(costs, (0, full - len(costs))).reshape(-1, num_ranks).T


def _kept_lengths(packing: Packing) -> IntArray:
    """Lengths of the pieces that are in a bin."""
    return packing.lengths[np.sort(np.concatenate(packing.bins))]


def _draw(lengths: IntArray, packing: Packing, parsed: argparse.Namespace) -> None:
    """Histogram of the lengths, and how full the bins are, as a PNG or SVG."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print('no picture without matplotlib: pip install "burnish-packing[report]", or --no-plot')
        return
    if parsed.plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot must end in .png or .svg, got {parsed.plot}; rename it")
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(lengths, bins=min(80, max(10, len(np.unique(lengths)))), color="tab:blue")
    left.axvline(parsed.capacity, color="tab:red", linewidth=1, label=f"capacity {parsed.capacity}")
    left.set(xlabel="tokens of a sequence", ylabel="sequences", yscale="log", title="Lengths")
    left.legend()
    fills = np.array([packing.lengths[indices].sum() for indices in packing.bins])
    right.fill_between(
        np.linspace(0, 100, len(fills)), np.sort(fills)[::-1], step="mid", color="tab:green"
    )
    right.axhline(parsed.capacity, color="tab:red", linewidth=1)
    right.set(
        xlabel="bins, fullest first (%)",
        ylabel="tokens in the bin",
        title=f"{len(fills)} bins of {parsed.algorithms[0]}",
        ylim=(0, parsed.capacity * 1.05),
    )
    figure.savefig(parsed.plot, dpi=120)
    print(f"picture: {parsed.plot}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish-packing", description="Sequence packing for training language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser(
        "report",
        help="compare packing algorithms on your lengths",
        description="Compare packing algorithms on your lengths: bins, lower bound, waste, time of "
        "the slowest rank over the mean when bins are dealt in turn, and time to pack. Below them "
        "the balanced plans, and padding.",
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
    report.add_argument("--too-long", choices=get_args(TooLong), default="error")
    report.add_argument("--seed", type=int, default=0, help="of first_fit_shuffle (0)")
    report.add_argument("--plot", type=Path, default=Path("packing-report.png"), help=".png, .svg")
    report.add_argument("--no-plot", action="store_true", help="draw nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
