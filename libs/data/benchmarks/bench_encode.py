# ruff: noqa: T201  (its table is what it is for)
"""Chats to token ids: `encode_rows` against plain `datasets.map` + `apply_chat_template`.

    python bench_encode.py --tokenizer FOLDER [--rows 1000000] [--short] [--workers 2]

Both read the same JSONL of chats and write Arrow files, each in a process of its own with the same
number of workers, one after the other; imports are not counted. Ours also checks every message and
writes the mask of the tokens that are trained. Plain is given its fastest form: the ids alone. The
ids of all rows must be equal. Memory is what a side's processes hold together, the highest of
samples every 0.1 s: anonymous memory, since pages of mapped files are the system's to drop. It is
flat if it is the same for a tenth of the rows.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ["Ada", "Grace", "Emmy", "Kurt", "Alan", "Sofia", "Carl", "Leonhard"]


def write_short_chats(path: Path, num_rows: int) -> None:
    """A question and an answer, no two alike: what a row costs beside its text shows most."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            messages = [
                {"role": "user", "content": f"What is {i} + {i % 1009}?"},
                {"role": "assistant", "content": f"It is {i + i % 1009}."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_chats(path: Path, num_rows: int) -> None:
    """GSM8K's bundled problems as chats, no two alike."""
    from burnish_data import gsm8k

    problems = [row["prompt"][-1]["content"] for row in gsm8k()]
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            problem = problems[i % len(problems)]
            following = problems[(7 * i + 1) % len(problems)]
            name = f"{NAMES[i % len(NAMES)]} {i}"
            messages = [
                {"role": "system", "content": f"You are {name}'s teacher. Think in small steps."},
                {"role": "user", "content": problem},
                {"role": "assistant", "content": f"Let us see, {name}. First: {following} ({i})"},
                {"role": "user", "content": "And then?"},
                {"role": "assistant", "content": f"Then the answer is {i * 37 % 1009}."},
            ]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def run_ours(data: Path, output: Path, tokenizer: Any, num_workers: int) -> dict[str, float]:
    from burnish_data.encode import encode_chats
    from burnish_data.encode_rows import encode_rows
    from burnish_data.files import open_rows
    from burnish_data.formats import openai_chat

    begin = time.perf_counter()
    rows = open_rows(data).map(openai_chat)
    opened = time.perf_counter()
    encode = functools.partial(encode_chats, tokenizer=tokenizer)
    encode_rows(rows, encode, output=output, num_workers=num_workers, show_progress=False)
    return {"open_s": opened - begin, "encode_s": time.perf_counter() - opened}


def _plain(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    return {"token_ids": tokenizer.apply_chat_template(row["messages"], return_dict=False)}


def run_plain(data: Path, output: Path, tokenizer: Any, num_workers: int) -> dict[str, float]:
    from datasets import load_dataset

    begin = time.perf_counter()
    cache = str(output.with_suffix(".cache"))
    rows = load_dataset("json", data_files=str(data), split="train", cache_dir=cache)
    opened = time.perf_counter()
    encoded = rows.map(
        functools.partial(_plain, tokenizer),
        num_proc=num_workers,
        remove_columns=["messages"],
        load_from_cache_file=False,
    )
    result = {"open_s": opened - begin, "encode_s": time.perf_counter() - opened}
    encoded.save_to_disk(str(output))  # for the comparison of ids; not counted
    return result


def run_side(arguments: argparse.Namespace) -> None:
    """What the process of one side does; it prints its times."""
    from datasets import disable_progress_bars
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    run = {"ours": run_ours, "plain": run_plain}[arguments.side]
    print(json.dumps(run(arguments.data, arguments.output, tokenizer, arguments.workers)))


def measure(side: str, data: Path, output: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """The times of one side, and the highest memory of its processes."""
    command = [sys.executable, __file__, "--side", side, "--data", str(data)]
    command += ["--output", str(output), "--tokenizer", str(arguments.tokenizer)]
    command += ["--workers", str(arguments.workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak_kib = 0
        while process.poll() is None:
            peak_kib = max(peak_kib, anonymous_kib(process.pid))
            time.sleep(0.1)
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{side} failed with exit code {process.returncode}")
    return {**json.loads(printed.splitlines()[-1]), "peak_mib": peak_kib / 1024}


def anonymous_kib(root: int) -> int:
    """Anonymous memory of a process and all below it."""
    parents, sizes = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(status.parent.name)
        parents[pid] = int(lines["PPid"])
        sizes[pid] = int(lines.get("RssAnon", "0 kB").split()[0])
    total, below = 0, {root}
    for _ in range(8):  # levels
        below |= {pid for pid, parent in parents.items() if parent in below}
    for pid in below:
        total += sizes.get(pid, 0)
    return total


def check_equal(ours: Path, plain: Path) -> tuple[int, int]:
    """How many tokens there are and how many are trained; SystemExit unless all ids are equal."""
    import pyarrow.compute as pc
    from datasets import load_from_disk

    left, right = load_from_disk(str(ours)), load_from_disk(str(plain))
    num_tokens = num_trained = 0
    if len(left) != len(right):
        raise SystemExit(f"rows must be equally many, got {len(left)} and {len(right)}")
    for start in range(0, len(left), 10_000):
        a, b = (side.with_format("arrow")[start : start + 10_000] for side in (left, right))
        ids = [pc.list_flatten(table["token_ids"]).cast("int64") for table in (a, b)]
        sizes = [pc.list_value_length(table["token_ids"]).cast("int64") for table in (a, b)]
        if not (ids[0].equals(ids[1]) and sizes[0].equals(sizes[1])):
            raise SystemExit(f"ids must be equal, got others in rows {start} to {start + 10_000}")
        num_tokens += len(ids[0])
        num_trained += pc.sum(pc.list_flatten(a["token_mask"])).as_py()
    return num_tokens, num_trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder, with a template")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--short", action="store_true", help="one short question and answer each")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the files; by default a temporary one")
    for name in ("--side", "--data", "--output"):  # of the processes that this one starts
        parser.add_argument(name, type=str if name == "--side" else Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        run_side(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        compare(Path(name), arguments)


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    results: dict[tuple[str, int], dict[str, float]] = {}
    sizes = [max(arguments.rows // 10, 1), arguments.rows]
    for num_rows in sizes:
        data = folder / f"{num_rows}.jsonl"
        (write_short_chats if arguments.short else write_chats)(data, num_rows)
        for side in ("plain", "ours"):
            output = folder / f"{side}-{num_rows}"
            results[side, num_rows] = measure(side, data, output, arguments)
        tokens, trained = check_equal(folder / f"ours-{num_rows}", folder / f"plain-{num_rows}")
        print(f"{num_rows:,} rows: all ids equal, {tokens:,} tokens, {trained:,} of them trained")
    cores = len(os.sched_getaffinity(0))
    print(
        f"\n{arguments.workers} workers on {cores} cores, load before: {os.getloadavg()[0]:.1f}\n"
    )
    print("| side | rows | open | encode | rows/s, all | rows/s, encode | peak memory |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for (side, num_rows), result in results.items():
        whole_s = result["open_s"] + result["encode_s"]
        print(
            f"| {side} | {num_rows:,} | {result['open_s']:.1f} s | {result['encode_s']:.1f} s "
            f"| {num_rows / whole_s:,.0f} | {num_rows / result['encode_s']:,.0f} "
            f"| {result['peak_mib']:,.0f} MiB |"
        )
    ours, plain = (results[side, arguments.rows] for side in ("ours", "plain"))
    whole = [side["open_s"] + side["encode_s"] for side in (plain, ours)]
    print(
        f"\nours over plain, rows/s: {whole[0] / whole[1]:.2f} from file to ids, "
        f"{plain['encode_s'] / ours['encode_s']:.2f} encoding alone"
    )
    small = results["ours", sizes[0]]
    print(f"memory of ours at all over a tenth: {ours['peak_mib'] / small['peak_mib']:.2f}")


if __name__ == "__main__":
    main()
