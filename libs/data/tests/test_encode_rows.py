"""Rows become the same data set whatever the workers; nothing is left by half, nobody behind."""

import functools
import importlib
import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from burnish_data.encode_rows import encode_rows
from burnish_data.files import open_rows
from burnish_data.rows import BadRowError, ListRows
from datasets import load_from_disk

# Worker processes import it, as they cannot import a test.
TOY = '''
import os
import signal
import time

import numpy as np
from burnish_data.encode import LeftOutError
from burnish_data.rows import BadRowError


def encode(texts):
    """A token per letter; capitals are trained; ! weighs; * is cut; ? is bad; # is left out."""
    return [encode_one(text) for text in texts]


def encode_one(text):
    if "?" in text:
        return BadRowError("no question", text, column="text", reason="question")
    if "#" in text:
        return LeftOutError("at most 3 tokens", len(text), column="text", reason="too long")
    ids = np.array([ord(letter) for letter in text], np.int32)
    mask = np.array([letter.isupper() for letter in text], np.bool_)
    columns = {"token_ids": ids, "token_mask": mask}
    if "!" in text:
        columns["token_weights"] = np.where(mask, np.float32(0.5), np.float32(0))
    if "*" in text:
        columns["truncated"] = True
    return columns


def encode_or_raise(texts):
    for text in texts:
        if "?" in text:
            raise BadRowError("no question", text, column="text", reason="question")
    return encode(texts)


def encode_pairs(texts):
    return [
        {"chosen": encode_one(text), "rejected": encode_one(text.lower()), "margin": len(text) / 2}
        for text in texts
    ]


def encode_some_margins(texts):
    """Capitals have a margin."""
    pairs = encode_pairs(texts)
    return [
        pair if text.isupper() else {"chosen": pair["chosen"], "rejected": pair["rejected"]}
        for text, pair in zip(texts, pairs)
    ]


def encode_weighted_margins(texts):
    """Both optional columns beside the tokens, each in some rows."""
    rows = encode(texts)
    for text, row in zip(texts, rows):
        if text.isupper():
            row["margin"] = 1.5
    return rows


def encode_ranking(texts):
    return [
        {"completions": [encode_one(part) for part in text.split()], "scores": [0.5] * len(text)}
        for text in texts
    ]


def die(texts):
    if "?" in texts[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(texts)


def fail(texts):
    raise KeyError(texts[0])


def slowly(texts):
    time.sleep(0.05)
    return encode(texts)


def with_column(texts, name, values):
    return [{**encode_one(text), name: value} for text, value in zip(texts, values)]
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_encode.py").write_text(TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("toy_encode")


def rows_of(texts) -> ListRows[str]:
    return ListRows(texts, "train.jsonl")


def quietly(rows, encode, **arguments):
    return encode_rows(rows, encode, show_progress=False, **arguments)


def test_columns_lengths_and_truncation_are_there(toy: ModuleType, tmp_path: Path):
    dataset, skipped = quietly(rows_of(["aBC", "x*"]), toy.encode, output=tmp_path / "out")
    assert dataset.to_list() == [
        {
            "token_ids": [97, 66, 67],
            "token_mask": [False, True, True],
            "length": 3,
            "truncated": False,
        },
        {"token_ids": [120, 42], "token_mask": [False, False], "length": 2, "truncated": True},
    ]
    assert {field.name: str(field.type) for field in dataset.features.arrow_schema} == {
        "token_ids": "list<item: int32>",
        "token_mask": "list<item: bool>",
        "length": "int32",
        "truncated": "bool",
    }
    assert sum(dataset["truncated"]) == 1
    assert skipped.total == 0


def test_the_folder_loads_again_and_is_mapped_from_its_file(toy: ModuleType, tmp_path: Path):
    output = tmp_path / "deep" / "out"
    dataset, _ = quietly(rows_of(["aBC", "x"]), toy.encode, output=output)
    again = load_from_disk(str(output))
    assert again.to_list() == dataset.to_list()
    assert again.features == dataset.features
    assert [Path(file["filename"]) for file in dataset.cache_files] == [
        output / "data-00000-of-00001.arrow"
    ]
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    # Other rows are another data set to the cache of `datasets`.
    other, _ = quietly(rows_of(["aBC", "y"]), toy.encode, output=tmp_path / "other")
    assert load_from_disk(str(tmp_path / "other"))._fingerprint == other._fingerprint
    assert other._fingerprint != dataset._fingerprint


def test_without_an_output_the_result_is_the_same_in_memory(toy: ModuleType, tmp_path: Path):
    texts = ["aBC", "b!", "Cc", "d!D"]
    on_disk, _ = quietly(rows_of(texts), toy.encode, output=tmp_path / "out", batch_rows=1)
    in_memory, _ = quietly(rows_of(texts), toy.encode, batch_rows=1)
    assert in_memory.to_list() == on_disk.to_list()
    assert in_memory.features == on_disk.features
    assert in_memory.cache_files == []


def test_any_number_of_workers_writes_the_same_files(toy: ModuleType, tmp_path: Path):
    texts = [
        f"row {i} {'AB' * (i % 7)}{'!' if i > 40 else ''}{'?' if i % 9 == 4 else ''}"
        for i in range(100)
    ]
    written = []
    for num_workers in (1, 2, 3):
        output = tmp_path / str(num_workers)
        dataset, skipped = quietly(
            rows_of(texts),
            toy.encode,
            output=output,
            num_workers=num_workers,
            on_bad_row="skip",
            batch_rows=7,
        )
        files = {path.name: path.read_bytes() for path in output.iterdir()}
        written.append((files, dict(skipped.counts), skipped.examples))
    assert written[0] == written[1] == written[2]
    assert written[0][1] == {"question": 11}
    decoded = ["".join(map(chr, ids)) for ids in dataset["token_ids"]]
    assert decoded == [text for text in texts if "?" not in text]
    assert "data-00001-of-00002.arrow" in written[0][0]  # begun where the weights came


@pytest.mark.parametrize("batch_rows", [1, 2, 4])
@pytest.mark.parametrize("texts", [["aB", "C!", "d"], ["C!", "aB", "d"], ["aB", "d", "C!"]])
def test_weights_of_one_row_are_given_to_all(toy: ModuleType, tmp_path: Path, texts, batch_rows):
    dataset, _ = quietly(rows_of(texts), toy.encode, output=tmp_path / "out", batch_rows=batch_rows)
    assert list(dataset.features) == [
        "token_ids",
        "token_mask",
        "token_weights",
        "length",
        "truncated",
    ]
    weights = dataset.features.arrow_schema.field("token_weights")
    assert str(weights.type) == "list<item: float>"
    expected = {"aB": [0.0, 1.0], "C!": [0.5, 0.0], "d": [0.0]}
    assert dataset["token_weights"][:] == [expected[text] for text in texts]


@pytest.mark.parametrize("batch_rows", [1, 4])
def test_pairs_are_structs_with_weights_where_one_side_has_them(toy, tmp_path, batch_rows):
    dataset, _ = quietly(
        rows_of(["aB", "C!"]), toy.encode_pairs, output=tmp_path / "out", batch_rows=batch_rows
    )
    assert dataset[0]["chosen"] == {
        "token_ids": [97, 66],
        "token_mask": [False, True],
        "token_weights": [0.0, 1.0],
        "length": 2,
        "truncated": False,
    }
    assert dataset[1]["chosen"]["token_weights"] == [0.5, 0.0]
    assert dataset[0]["rejected"]["token_weights"] == [0.0, 0.0]
    assert dataset["margin"][:] == [1.0, 1.0]


@pytest.mark.parametrize("batch_rows", [1, 2, 4])
@pytest.mark.parametrize("texts", [["ab", "AB", "cd", "EF"], ["AB", "ab", "EF", "cd"]])
@pytest.mark.parametrize("on_disk", [True, False])
def test_margins_that_only_some_rows_have(toy, tmp_path, batch_rows, texts, on_disk):
    dataset, _ = quietly(
        rows_of(texts),
        toy.encode_some_margins,
        output=tmp_path / "out" if on_disk else None,
        batch_rows=batch_rows,
    )
    assert list(dataset.features) == ["chosen", "rejected", "margin"]
    assert dataset["margin"][:] == [1.0 if text.isupper() else None for text in texts]
    assert dataset[1]["chosen"]["token_ids"] == [ord(letter) for letter in texts[1]]


def test_margins_that_no_row_has(toy, tmp_path):
    dataset, _ = quietly(rows_of(["ab", "cd"]), toy.encode_some_margins, output=tmp_path / "out")
    assert list(dataset.features) == ["chosen", "rejected"]


@pytest.mark.parametrize("batch_rows", [1, 2, 4])
def test_margins_and_weights_may_come_in_any_order(toy, tmp_path, batch_rows):
    dataset, _ = quietly(
        rows_of(["a", "B", "!c", "D!"]),
        toy.encode_weighted_margins,
        output=tmp_path / "out",
        batch_rows=batch_rows,
    )
    assert list(dataset.features) == [
        "token_ids",
        "token_mask",
        "token_weights",
        "margin",
        "length",
        "truncated",
    ]
    assert dataset["margin"][:] == [None, 1.5, None, 1.5]
    assert dataset["token_weights"][:] == [[0.0], [1.0], [0.0, 0.0], [0.5, 0.0]]


@pytest.mark.parametrize("batch_rows", [1, 4])
def test_lists_of_encoded_completions_stay_lists(toy, tmp_path, batch_rows):
    dataset, _ = quietly(
        rows_of(["aB c", "C!"]), toy.encode_ranking, output=tmp_path / "out", batch_rows=batch_rows
    )
    assert dataset["scores"][:] == [[0.5] * 4, [0.5] * 2]
    completions = dataset["completions"][:]
    assert [[one["token_ids"] for one in row] for row in completions] == [
        [[97, 66], [99]],
        [[67, 33]],
    ]
    assert [[one["token_weights"] for one in row] for row in completions] == [
        [[0.0, 1.0], [0.0]],
        [[0.5, 0.0]],
    ]
    assert [[one["length"] for one in row] for row in completions] == [[2, 1], [2]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_first_bad_row_by_their_order_is_raised(toy: ModuleType, tmp_path: Path, num_workers):
    texts = ["a", "b", "c", "no?", "d", "nor?"]
    with pytest.raises(BadRowError) as caught:
        quietly(
            rows_of(texts),
            toy.encode,
            output=tmp_path / "out",
            num_workers=num_workers,
            batch_rows=2,
        )
    assert str(caught.value) == (
        "train.jsonl, row 4, column 'text': expected no question, got 'no?'."
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encode", ["encode", "encode_or_raise"])
def test_bad_rows_are_skipped_and_counted_with_their_places(toy: ModuleType, encode: str):
    def refuse_z(text: str) -> str:
        if text == "z":
            raise BadRowError("no z", text, reason="z")
        return text

    rows = rows_of(["a", "no?", "z", "b", "nor?"]).map(refuse_z)
    dataset, skipped = quietly(rows, getattr(toy, encode), on_bad_row="skip", batch_rows=3)
    assert dataset["token_ids"][:] == [[97], [98]]
    assert dict(skipped.counts) == {"question": 2, "z": 1}
    assert skipped.examples == {
        "question": [
            "train.jsonl, row 2, column 'text': expected no question, got 'no?'.",
            "train.jsonl, row 5, column 'text': expected no question, got 'nor?'.",
        ],
        "z": ["train.jsonl, row 3: expected no z, got 'z'."],
    }


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_rows_of_a_file_are_named_by_its_lines(toy, tmp_path: Path, num_workers: int):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "a"}\n{"text": "no?"}\n{"text": \n{"text": "bC"}\n')
    rows = open_rows(path).map(operator.itemgetter("text"))
    dataset, skipped = quietly(
        rows, toy.encode, num_workers=num_workers, on_bad_row="skip", batch_rows=1
    )
    assert dataset["token_ids"][:] == [[97], [98, 67]]
    assert skipped.total == 2
    messages = sorted(message for kept in skipped.examples.values() for message in kept)
    assert "chats.jsonl, line 2, column 'text': expected no question" in messages[0]
    assert "chats.jsonl, line 3" in messages[1]
    with pytest.raises(BadRowError, match=r"chats\.jsonl, line 2, column 'text': expected no"):
        quietly(rows, toy.encode, num_workers=num_workers, batch_rows=1)


def test_rows_that_encode_was_asked_to_leave_out_are_no_error(toy: ModuleType):
    dataset, skipped = quietly(rows_of(["a", "##", "b"]), toy.encode, on_bad_row="error")
    assert dataset["token_ids"][:] == [[97], [98]]
    assert dict(skipped.counts) == {"too long": 1}


def test_a_batch_may_be_bad_as_a_whole_but_not_all_of_them(toy: ModuleType, tmp_path: Path):
    dataset, skipped = quietly(
        rows_of(["1?", "2?", "a"]), toy.encode, on_bad_row="skip", batch_rows=2
    )
    assert (dataset["token_ids"][:], skipped.total) == ([[97]], 2)
    with pytest.raises(
        ValueError, match=r"At least one row must be good, got none: 2 skipped \(2 q"
    ):
        quietly(rows_of(["1?", "2?"]), toy.encode, on_bad_row="skip", output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(toy: ModuleType, tmp_path: Path):
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(ValueError, match=r"output must be a new folder, but .*out' is there"):
        quietly(rows_of(["a"]), toy.encode, output=output)
    assert list(output.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_workers": 0}, "num_workers must be a number of processes, 1 or more, got 0"),
        ({"num_workers": True}, "num_workers must be .* got True"),
        ({"batch_rows": 0}, "batch_rows must be a number of rows, 1 or more, got 0"),
        ({"on_bad_row": "ignore"}, "on_bad_row must be .* got 'ignore'"),
    ],
)
def test_arguments_out_of_range_are_refused(toy: ModuleType, arguments, error):
    with pytest.raises(ValueError, match=error):
        quietly(rows_of(["a"]), toy.encode, **arguments)
    with pytest.raises(ValueError, match="must be rows to encode, got none"):
        quietly(rows_of([]), toy.encode)


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("length", [1, 1], "must leave the column length to encode_rows, got length beside"),
        ("extra", [1, "x"], "give column 'extra' of one kind in all rows: .* got int, str"),
        ("extra", [np.zeros(1), np.zeros(1, np.int32)], "got float64 array with 1 dim.*int32"),
        ("extra", [np.zeros((1, 2)), np.zeros((1, 2))], "got float64 array with 2 dimensions"),
        ("extra", [None, None], "column 'extra' of one kind .* got NoneType"),
        ("token_mask", [np.ones(2, bool), np.ones(1, bool)], "token_mask must have one value for"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(toy: ModuleType, name, values, error):
    with pytest.raises(ValueError, match=error):
        quietly(rows_of(["a", "b"]), functools.partial(toy.with_column, name=name, values=values))


def test_other_columns_in_a_later_row_are_refused(toy: ModuleType):
    def encode(texts):
        return [{**toy.encode_one(text), **({"more": 1} if text == "b" else {})} for text in texts]

    with pytest.raises(ValueError, match="the same columns, got one with more and one with"):
        quietly(rows_of(["a", "b"]), encode)
    with pytest.raises(ValueError, match=r"the same columns, got \['token_ids', .*'more'"):
        quietly(rows_of(["a", "b"]), encode, batch_rows=1)
    with pytest.raises(ValueError, match="one result for each row, got 1 for 2 rows"):
        quietly(rows_of(["a", "b"]), lambda texts: toy.encode(texts[:1]))


def test_a_worker_that_dies_is_an_error_within_seconds(toy: ModuleType, tmp_path: Path):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"end of worker \d .* by signal SIGKILL; if memory"):
        quietly(
            rows_of(["a", "b", "no?", "c"]),
            toy.die,
            output=tmp_path / "out",
            num_workers=2,
            batch_rows=1,
        )
    assert time.monotonic() - begin < 60  # two imports on a loaded machine; the rest is no wait
    assert list(tmp_path.iterdir()) == []


def test_a_workers_error_comes_with_its_traceback(toy: ModuleType):
    with pytest.raises(KeyError, match="'a'") as caught:
        quietly(rows_of(["a", "b"]), toy.fail, num_workers=2, batch_rows=1)
    assert "in fail" in caught.value.__notes__[0]


def test_what_cannot_go_to_a_worker_is_refused_before_any_starts(toy: ModuleType):
    with pytest.raises(ValueError, match=r"must be picklable, but .*lambda.*functools.partial"):
        quietly(rows_of(["a", "b"]), lambda texts: texts, num_workers=2, batch_rows=1)


SCRIPT = """
import sys
from toy_encode import slowly
from burnish_data.encode_rows import encode_rows
from burnish_data.files import open_rows
from burnish_data.rows import ListRows

def main():
    rows = ListRows(["aB"] * 100_000)
    encode_rows(rows, slowly, output=sys.argv[1], num_workers=2, batch_rows=10)

GUARDmain()
"""


def heed_interrupts() -> None:
    """A background job, as this test run may be, ignores them, and so would its child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_script(toy: ModuleType, tmp_path: Path, guard: str) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", guard))
    return subprocess.Popen(
        [sys.executable, "script.py", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(toy.__file__).parent)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal's foreground job
        preexec_fn=heed_interrupts,
    )


@pytest.mark.parametrize(
    ("kill", "number", "leaves"),
    [
        (os.killpg, signal.SIGINT, []),  # Ctrl-C
        (os.kill, signal.SIGINT, []),  # a notebook's "interrupt"
        (os.kill, signal.SIGKILL, ["partial"]),  # nobody can clean up, but it is not the output
    ],
)
def test_an_end_on_the_way_leaves_no_process_and_no_half_output(
    toy: ModuleType, tmp_path: Path, kill, number, leaves
):
    script = start_script(toy, tmp_path, 'if __name__ == "__main__":\n    ')
    until(lambda: any(path.stat().st_size > 2000 for path in tmp_path.glob(".out.partial-*/*")))
    assert script.poll() is None
    assert len(members(script.pid)) >= 3  # itself and its workers: the control of the check below
    kill(script.pid, number)
    _, stderr = script.communicate(timeout=30)
    assert script.returncode == -number
    assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)
    until(lambda: not members(script.pid))
    left = [path.name for path in tmp_path.iterdir() if path.name != "script.py"]
    assert [name.split("-")[0] for name in left] == [f".out.{name}" for name in leaves]


def test_a_script_without_a_guard_is_told_so(toy: ModuleType, tmp_path: Path):
    script = start_script(toy, tmp_path, "")
    _, stderr = script.communicate(timeout=120)
    assert script.returncode == 1
    assert stderr.rstrip().endswith('must do so under if __name__ == "__main__".')
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    until(lambda: not members(script.pid))


def until(condition) -> None:
    """Wait for it, and fail after a minute and a half."""
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def members(group: int) -> list[int]:
    """The processes of a process group, but for those that have ended and wait to be reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def test_progress_shows_rows_and_what_was_skipped(toy: ModuleType, capsys):
    encode_rows(rows_of(["a", "no?", "b"]), toy.encode, on_bad_row="skip", batch_rows=1)
    shown = capsys.readouterr().err.split("\r")[-1]
    assert "encoding: 100%" in shown
    assert "3/3" in shown
    assert "skipped=1" in shown


def test_of_two_with_one_output_the_slower_is_told_so(toy: ModuleType, tmp_path: Path):
    output = tmp_path / "out"

    def encode(texts):
        if not output.exists():
            quietly(rows_of(["AB"]), toy.encode, output=output)  # the faster one
        return toy.encode(texts)

    with pytest.raises(
        ValueError, match=r"output must be a new folder, but '.*out' is there; load"
    ):
        quietly(rows_of(["CD", "EF"]), encode, output=output)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert load_from_disk(str(output))["token_ids"][:] == [[65, 66]]


def test_what_a_dead_process_left_is_removed_by_the_next(toy: ModuleType, tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    seen: list[str] = []

    def encode(texts):
        seen.extend(path.name for path in tmp_path.glob(".*partial*"))
        return toy.encode(texts)

    quietly(rows_of(["A"]), encode, output=tmp_path / "first")
    own = seen.pop()
    assert own.split("-")[-2] == str(os.getpid())
    machine = own.split("-")[1]
    stays = [
        f".out.partial-{machine}-{os.getpid()}-00000000",  # alive
        f".out.partial-{machine[::-1]}x-{dead.pid}-00000000",  # another machine's
        f".other.partial-{machine}-{dead.pid}-00000000",  # another output's
        f".out.partial-{machine}-{dead.pid}-notes",
    ]
    for name in [*stays, f".out.partial-{machine}-{dead.pid}-00000000"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0.arrow").write_bytes(b"x")
    quietly(rows_of(["A"]), toy.encode, output=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob(".*partial*")) == sorted(stays)
