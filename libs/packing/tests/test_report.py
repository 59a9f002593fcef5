"""The command line: its table, its picture, and what it says of files that are not right."""

import re
import subprocess
import sys

import numpy as np
import pytest
from burnish_packing import report
from burnish_packing.report import main, read_lengths

LENGTHS = [7, 5, 5, 3, 3, 3, 2, 2, 1, 1]


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array(LENGTHS, np.uint16))
    return path


def rows_file(tmp_path, *lines: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_with_every_algorithm(lengths_file, capsys) -> None:
    options = ["--capacity", "8", "--ranks", "2", "--no-plot"]
    assert main(["report", str(lengths_file), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("10 sequences, 32 tokens: 1 to 7, median 3; capacity 8, 2 ranks")
    table = {line[:30].strip(): line[30:].split() for line in lines[2:]}
    # 7+1, 5+3, 5+3, 3+2+2+1: four full bins, dealt to two ranks without a difference.
    assert table["best_fit_decreasing"][:4] == ["4", "4", "0.00%", "1.000x"]
    # In order: 7 | 5 | 5 3 | 3 3 2 | 2 1 1, so ranks wait in two slots and idle in the third.
    assert table["next_fit"][:4] == ["5", "4", "20.00%", f"{2 * (7 + 8 + 4) / 32:.3f}x"]
    # One row a batch, as eight tokens hold no second row of seven: 32 of 10 * 8 hold a token, and
    # ranks wait for the longer of two neighbours.
    slowest = f"{2 * (7 + 5 + 3 + 2 + 1) / 32:.3f}x"
    assert table["no packing, 1 row a batch"][:3] == ["10", "60.00%", slowest]
    assert table["plan, packed"][:3] == ["4", "0.00%", "1.000x"]
    assert "optimal" not in table
    assert lines[-1].startswith("bound: no packing has fewer bins; waste: share of their room")


def test_all_rows_have_the_same_waste_where_all_fits_one_bin(tmp_path, capsys) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, [3, 5])
    # A capacity of a billion rows makes no table of a billion rows.
    for capacity, waste in ((16, "50.00%"), (10**12, "100.00%")):
        assert main(["report", str(path), "--capacity", str(capacity), "--no-plot"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(f"capacity {capacity}, 1 rank")
        assert lines[-2].startswith("no packing, 2 rows a batch ")
        others = [line for line in lines[2:-1] if not line.startswith("plan, padded")]
        assert all(f" {waste} " in line for line in others)


def test_lengths_of_zero_are_reported(tmp_path, capsys) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, [0, 0, 0])
    assert main(["report", str(path), "--capacity", "8", "--plot", str(tmp_path / "0.png")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 sequences, 0 tokens: 0 to 0")
    assert "no packing, 3 rows a batch             1            100.00%" in out


def test_one_of_each_is_singular(tmp_path, capsys) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, [1])
    assert main(["report", str(path), "--capacity", "8", "--no-plot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 sequence, 1 token: 1 to 1, median 1; capacity 8, 1 rank"
    assert lines[-2].startswith("no packing, 1 row a batch ")


@pytest.mark.parametrize("suffix", ["png", "svg", "PNG"])
def test_a_picture(lengths_file, tmp_path, capsys, suffix) -> None:
    picture = tmp_path / f"picture.{suffix}"
    algorithms = ["--algorithms", "next_fit", "optimal"]
    options = ["--capacity", "8", "--plot", str(picture), *algorithms]
    assert main(["report", str(lengths_file), *options]) == 0
    assert f"picture: {picture}" in capsys.readouterr().out
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix.lower()]
    assert picture.read_bytes().startswith(start)


def test_what_does_not_fit_is_counted(lengths_file, capsys) -> None:
    options = ["--capacity", "4", "--too-long", "truncate", "--no-plot"]
    assert main(["report", str(lengths_file), *options]) == 0
    out = capsys.readouterr().out
    assert "num_truncated: 3 (--too-long truncate)" in out
    assert "num_lost_tokens: 5 (--too-long truncate)" in out


def test_rows_give_numbers_or_lists(tmp_path) -> None:
    counted = rows_file(tmp_path, '{"length": 3}', "", '{"length": 5}')
    assert read_lengths(counted).tolist() == [3, 5]
    listed = rows_file(tmp_path, '{"id": 4, "input_ids": [9, 9]}', '{"id": 1, "input_ids": []}')
    assert read_lengths(listed).tolist() == [2, 0]
    assert read_lengths(listed, "id").tolist() == [4, 1]
    marked = rows_file(tmp_path, "\ufeff" + '{"length": 3}')
    assert read_lengths(marked).tolist() == [3]


def test_suffixes_in_capitals_are_read(tmp_path) -> None:
    with (tmp_path / "lengths.NPY").open("wb") as file:
        np.save(file, [3, 5])
    assert read_lengths(tmp_path / "lengths.NPY").tolist() == [3, 5]
    rows_file(tmp_path, '{"length": 7}').rename(tmp_path / "rows.JSONL")
    assert read_lengths(tmp_path / "rows.JSONL").tolist() == [7]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"length": 3}', "{"], "rows.jsonl, line 2 must be a JSON object, got Expecting"),
        (["[1, 2]"], "line 1 must be a JSON object, got list"),
        (['{"text": "a", "id": 1}'], r"must have length or .*, got \['id', 'text'\]; name one"),
        (['{"length": 3}', '{"input_ids": [1]}'], "line 2 must have length, got"),
        (['{"length": 2.5}'], "length must be a number of tokens or a list of them, got 2.5"),
        (['{"length": true}'], "got True"),
        (['{"length": -1}'], "got -1"),
        ([""], "must hold at least one length, got none"),
        (['{"length": 3}', "[" * 100_000], "line 2 must be a JSON object, got one nested too deep"),
        (['{"length": 3}', f'{{"length": {"9" * 5000}}}'], "line 2 must hold numbers of at most"),
        ([f'{{"length": {10**40}}}'], f"line 1, length must be at most .* got {10**40}; correct"),
        ([f'{{"length": {2**63}}}'], f"line 1, length must be at most .* got {2**63}; correct"),
        ([f'{{"length": {2**53}}}'] * 2, f"rows.jsonl: lengths must sum to at most .* {2**54};"),
        ([f'{{"length": "{"x" * 10**6}"}}'], r"got 'x{79}\.\.\.; name another: --field$"),
        (["{" + ", ".join(f'"k{i}": 1' for i in range(10**5)) + "}"], r".{80}\.\.\.; name one"),
    ],
)
def test_bad_rows_are_named(tmp_path, lines, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_lengths(rows_file(tmp_path, *lines))


def test_bytes_that_are_no_utf_8_are_named(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"length": 3}\n{"length": 3, "text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 must be UTF-8, got .*; convert"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity", "0"], "--capacity must be an integer >= 1, got 0"),
        (["--capacity", str(10**21)], "--capacity must be at most"),
        (["--ranks", "0"], "--ranks must be an integer >= 1, got 0"),
        (["--ranks", str(10**12)], "--ranks must be at most 1000000"),
        (["--seed", "-1"], "--seed must be >= 0, got -1"),
        (["--plot", "picture.pdf"], "--plot must end in .png or .svg, got picture.pdf"),
        (["--plot", "no/such/folder/p.png"], "--plot must be a file in a folder that can be"),
        (
            ["--capacity", "6"],
            "--capacity 6, got 7 tokens for sequence 0 .*; raise it, or pass --t",
        ),
        (["--capacity", "4"], "got 7 tokens for sequence 0 .from 0. and 3 too long in all"),
        (["--capacity", "0", "--too-long", "skip"], "--capacity must be"),
    ],
)
def test_options_are_checked_before_any_work(
    lengths_file, tmp_path, monkeypatch, capsys, options, message
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(lengths_file), "--capacity", "8", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err)


def test_nothing_that_fits_is_an_error(lengths_file, tmp_path, capsys) -> None:
    np.save(tmp_path / "long.npy", [9, 9])
    options = ["--capacity", "8", "--no-plot", "--too-long", "skip"]
    assert main(["report", str(tmp_path / "long.npy"), *options]) == 2
    assert "got none of 2 that does; raise it, or pass --too-long truncate" in (
        capsys.readouterr().err
    )


def test_without_matplotlib_there_is_no_picture(
    lengths_file, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ["report", str(lengths_file), "--capacity", "8"]
    assert main(options) == 0
    assert capsys.readouterr().out.startswith("no picture without matplotlib: pip install")
    assert main([*options, "--plot", "picture.png"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--plot must have matplotlib, got none; pip install" in printed.err


def test_without_scipy_optimal_is_refused(lengths_file, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    options = ["report", str(lengths_file), "--capacity", "8", "--no-plot", "--algorithms"]
    assert main([*options, "next_fit", "optimal"]) == 2
    assert "--algorithms optimal must have scipy for hard lengths" in capsys.readouterr().err
    assert main([*options, "next_fit"]) == 0


def test_an_algorithm_that_fails_leaves_the_others(lengths_file, monkeypatch, capsys) -> None:
    pack = report.pack

    def failing(*arguments, algorithm, **options):
        if algorithm == "optimal":
            raise RuntimeError("HiGHS could not solve the relaxation: time")
        return pack(*arguments, algorithm=algorithm, **options)

    monkeypatch.setattr(report, "pack", failing)
    options = ["report", str(lengths_file), "--capacity", "8", "--no-plot", "--algorithms"]
    assert main([*options, "optimal", "next_fit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"{'optimal':30} left out: HiGHS could not solve the relaxation: time"
    assert lines[3].startswith("next_fit ")
    assert main([*options, "optimal"]) == 2
    assert "an algorithm must come to an end" in capsys.readouterr().err


def test_a_reader_that_stops_ends_the_report_quietly(lengths_file) -> None:
    command = [sys.executable, "-m", "burnish_packing.report", "report", str(lengths_file)]
    with subprocess.Popen(
        [*command, "--capacity", "8", "--no-plot"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_bad_files_end_with_exit_code_2(tmp_path, lengths_file, capsys) -> None:
    def error_of(path, *options: str) -> str:
        assert main(["report", str(path), "--capacity", "8", "--no-plot", *options]) == 2
        return capsys.readouterr().err

    cut = tmp_path / "cut.npy"
    cut.write_bytes(lengths_file.read_bytes()[:-3])
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    floats = tmp_path / "floats.npy"
    np.save(floats, np.array([1.5]))
    assert "cut.npy must be a saved array of lengths" in error_of(cut)
    assert "objects.npy must be a saved array" in error_of(objects)
    empty = tmp_path / "empty.npy"
    empty.write_bytes(b"")
    assert "got an empty file; save a list of integers with numpy.save" in error_of(empty)
    text = tmp_path / "text.npy"
    text.write_text("3 4 5")
    assert "got a file of another format; save a list of integers" in error_of(text)
    folder = tmp_path / "folder.npy"
    folder.mkdir()
    assert "folder.npy must be a file that can be read, got Is a directory" in error_of(folder)
    large = tmp_path / "large.npy"
    np.save(large, np.array([2**63], np.uint64))
    assert re.search(rf"large.npy: lengths must be .* got lengths\[0\] = {2**63}", error_of(large))
    assert "must be integers, got dtype float64" in error_of(floats)
    assert "No such file" in error_of(tmp_path / "missing.npy")
    assert "must end in .npy or .jsonl" in error_of(tmp_path / "rows.csv")
    assert "every sequence must fit" in error_of(lengths_file, "--capacity", "6")
    assert "ranks must be an integer >= 1, got 0" in error_of(lengths_file, "--ranks", "0")
