"""The command line: its table, its picture, and what it says of files that are not right."""

import numpy as np
import pytest
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
    # One row a batch, as eight tokens hold no second row of seven.
    assert table["no packing, 1 rows a batch"][:2] == ["10", "0.00%"]
    assert {"optimal"} <= {*table} ^ {"optimal"}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(lengths_file, tmp_path, capsys, suffix) -> None:
    picture = tmp_path / f"picture.{suffix}"
    algorithms = ["--algorithms", "next_fit", "optimal"]
    options = ["--capacity", "8", "--plot", str(picture), *algorithms]
    assert main(["report", str(lengths_file), *options]) == 0
    assert f"picture: {picture}" in capsys.readouterr().out
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
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
    ],
)
def test_bad_rows_are_named(tmp_path, lines, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_lengths(rows_file(tmp_path, *lines))


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
    assert "must be integers, got dtype float64" in error_of(floats)
    assert "No such file" in error_of(tmp_path / "missing.npy")
    assert "must end in .npy or .jsonl" in error_of(tmp_path / "rows.csv")
    assert "every sequence must fit" in error_of(lengths_file, "--capacity", "6")
    assert "ranks must be an integer >= 1, got 0" in error_of(lengths_file, "--ranks", "0")
