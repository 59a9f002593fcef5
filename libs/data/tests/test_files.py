import errno
import gc
import gzip
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import types
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from burnish_data import BadRowError
from burnish_data.files import open_rows, require_columns
from burnish_data.stream import RowStream, stream_of
from pyarrow import parquet

RECORDS = [
    {"id": 0, "messages": [{"role": "user", "content": "One é line\u2028break"}]},
    {"id": 1, "messages": [{"role": "user", "content": "Two 🙂"}], "tools": [{"a": None}]},
    {"id": 2, "messages": [{"role": "user", "content": 'Three "quoted"\nlines'}], "tools": []},
]


def write_lines(path: Path, records: list[dict] = RECORDS) -> Path:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_array(path: Path) -> Path:
    data = json.dumps(RECORDS, ensure_ascii=False, indent=1).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.json"])
def test_json_lines_come_as_they_are_written(tmp_path, name):
    rows = open_rows(write_lines(tmp_path / name))
    assert list(rows) == RECORDS
    assert rows[-1]["id"] == 2
    assert rows.where(2) == f"{tmp_path / name}, line 3"


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_array_of_objects(tmp_path, name):
    rows = open_rows(str(write_array(tmp_path / name)))
    assert list(rows) == RECORDS
    assert [rows.where(index) for index in range(3)] == [
        f"{tmp_path / name}, row 1 (line 2)",
        f"{tmp_path / name}, row 2 (line 11)",
        f"{tmp_path / name}, row 3 (line 25)",
    ]


def test_empty_lines_a_byte_order_mark_and_other_line_ends(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n  \n {"a": 1} \r\n\n\n{"a": 2}\r\n \n{"a": 3}')
    rows = open_rows(path)
    assert list(rows) == [{"a": 1}, {"a": 2}, {"a": 3}]
    places = [rows.where(index).removeprefix(f"{path}, ") for index in range(3)]
    assert places == ["line 3", "line 6", "line 8"]
    path.write_bytes(b'{"a": 1}\n\n{"a": 2}\n')
    rows = open_rows(path)
    assert [rows.where(index)[-6:] for index in range(2)] == ["line 1", "line 3"]
    (tmp_path / "a.json").write_bytes('\ufeff[{"é": 1},\n{"é": 2}]\n'.encode())
    assert list(open_rows(tmp_path / "a.json")) == [{"é": 1}, {"é": 2}]
    (tmp_path / "a.csv").write_bytes("\ufeffa,b\r\n1,2\r\n".encode())
    assert list(open_rows(tmp_path / "a.csv")) == [{"a": "1", "b": "2"}]


def test_lines_longer_than_a_piece_of_reading(tmp_path):
    records = [{"a": "x" * 3_000_000}, {"a": "y" * (2**20 - 9)}, {"a": "z"}]
    rows = open_rows(write_lines(tmp_path / "a.jsonl", records))
    assert [(len(row["a"]), row["a"][-1]) for row in rows] == [
        (3_000_000, "x"),
        (1_048_567, "y"),
        (1, "z"),
    ]
    assert rows.where(2).endswith("line 3")


def test_csv_with_quotes_and_line_breaks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"a, ""b""\n\nc",1\n\nplain, 2 \n"",\n', newline="")
    rows = open_rows(path)
    assert list(rows) == [
        {"question": 'a, "b"\n\nc', "answer": "1"},
        {"question": "plain", "answer": " 2 "},
        {"question": "", "answer": ""},
    ]
    assert [rows.where(index)[-6:] for index in range(3)] == ["line 2", "line 6", "line 7"]
    (tmp_path / "a.tsv").write_text("a\tb\n1,1\t2\n")
    assert list(open_rows(tmp_path / "a.tsv")) == [{"a": "1,1", "b": "2"}]
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a\n7\n"))
    assert list(open_rows(tmp_path / "b.csv.gz")) == [{"a": "7"}]


def test_a_csv_field_above_the_modules_limit(tmp_path):
    (tmp_path / "a.csv").write_text(f"a,b\n{'x' * 200_000},1\n")
    assert open_rows(tmp_path / "a.csv")[0] == {"a": "x" * 200_000, "b": "1"}


def test_parquet_loses_the_keys_that_arrow_adds(tmp_path):
    records = [
        {
            "m": [{"role": "user", "x": None}, {"role": "tool", "x": 1}],
            "i": {"bytes": b"p", "path": None},
        },
        {"m": [], "i": {"bytes": None, "path": "a.png"}},
        {"m": None, "i": None},
    ]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    rows = open_rows(tmp_path / "a.parquet")
    assert list(rows) == [
        {"m": [{"role": "user"}, {"role": "tool", "x": 1}], "i": b"p"},
        {"m": [], "i": "a.png"},
        {},
    ]
    assert rows.where(1) == f"{tmp_path / 'a.parquet'}, row 2"


def test_arrow_rows_in_any_order_are_each_their_own(tmp_path):
    table = pa.table({"id": list(range(1000))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    rows = open_rows(tmp_path / "a.parquet")
    assert [row["id"] for row in rows] == list(range(1000))
    order = [999, 0, 1, 2, 1, 500, 501, 256, 257, 999]
    assert [rows[index]["id"] for index in order] == order
    rows[1]["id"] = "changed"  # by a caller
    assert (rows[1], rows[2]) == ({"id": 1}, {"id": 2})


def test_arrow_files_of_both_kinds(tmp_path):
    table = pa.table({"a": [1, 2]})
    with (
        pa.OSFile(str(tmp_path / "s.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    with (
        pa.OSFile(str(tmp_path / "f.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as out,
    ):
        out.write_table(table)
    for name in ("s.arrow", "f.arrow"):
        assert list(open_rows(tmp_path / name)) == [{"a": 1}, {"a": 2}]


def test_a_folder_of_save_to_disk(tmp_path):
    one = datasets.Dataset.from_list([{"a": 1, "b": None}, {"a": 2, "b": "x"}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert list(open_rows(tmp_path / "one", split="whatever")) == [{"a": 1}, {"a": 2, "b": "x"}]
    rows = open_rows(tmp_path / "both", split="test")
    assert (list(rows), rows.where(0)) == ([{"a": 2, "b": "x"}], f"{tmp_path / 'both/test'}, row 1")


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="this pyarrow has no JSON columns")
def test_columns_of_json_text_are_what_they_say(tmp_path):
    column = pa.array(['{"city": "Paris"}', None], pa.json_())
    nested = pa.ListArray.from_arrays([0, 1, 1], pa.array(["[1]"], pa.json_()))
    parquet.write_table(pa.table({"a": column, "b": nested}), tmp_path / "a.parquet")
    assert list(open_rows(tmp_path / "a.parquet")) == [
        {"a": {"city": "Paris"}, "b": [[1]]},
        {"b": []},
    ]


@pytest.mark.parametrize("place", ["", "data", "main", "main/data"])
def test_a_folder_with_a_file_for_each_split(tmp_path, place):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    write_lines(tmp_path / place / "train.jsonl")
    write_lines(tmp_path / place / "test.jsonl.gz", RECORDS[:1])
    (tmp_path / "README.md").write_text("# train")
    assert len(open_rows(tmp_path, config="main")) == 3
    rows = open_rows(tmp_path, split="test", config="main")
    assert rows.where(0) == f"{tmp_path / place / 'test.jsonl.gz'}, line 1"


def test_a_folder_with_parts(tmp_path):
    for number, ids in enumerate([[0, 1], [2], [3, 4]]):
        name = f"train-{number:05d}-of-00003.parquet"
        parquet.write_table(pa.table({"id": ids}), tmp_path / name)
    rows = open_rows(tmp_path)
    assert [row["id"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows.where(3) == f"{tmp_path / 'train-00002-of-00003.parquet'}, row 1"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "b.json", "c.csv", "d.parquet"])
def test_rows_are_pickled_by_path_and_read_by_forked_processes(tmp_path, name):
    path = tmp_path / name
    records = [{"id": str(index)} for index in range(1000)]
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(records), path)
    elif name.endswith(".csv"):
        path.write_text("id\n" + "\n".join(map(str, range(1000))))
    elif name.endswith(".json"):
        path.write_text(json.dumps(records))
    else:
        write_lines(path, records)
    rows = open_rows(path)
    assert [rows[index]["id"] for index in range(3)] == ["0", "1", "2"]
    data = pickle.dumps(rows)
    assert len(data) < 3000  # what was read does not go along
    assert list(pickle.loads(data)) == records
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(rows.row, range(1000), chunksize=100)
    assert found == records
    assert rows[500] == {"id": "500"}  # the children took nothing away with them


def test_rows_may_be_read_by_several_threads(tmp_path):
    rows = open_rows(write_lines(tmp_path / "a.jsonl", [{"id": index} for index in range(300)]))
    found: dict[int, list[int]] = {}

    def read(thread: int) -> None:
        found[thread] = [row["id"] for row in rows]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: list(range(300)) for number in range(4)}


def test_temporary_files_go_with_the_rows(tmp_path, own_temporary_folder):
    parquet.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    kept = [open_rows(tmp_path / "a.parquet"), open_rows(write_lines(tmp_path / "b.jsonl.gz"))]
    selected = [rows[:1] for rows in kept]
    del kept
    gc.collect()
    assert len(list(own_temporary_folder.iterdir())) == 2
    assert [rows[0]["id"] for rows in selected] == [1, 0]
    del selected
    gc.collect()
    assert list(own_temporary_folder.iterdir()) == []


def drop(kept: list) -> None:
    kept.clear()
    gc.collect()


def test_a_forked_process_leaves_its_parents_temporary_files(tmp_path, own_temporary_folder):
    parquet.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    kept = [open_rows(tmp_path / "a.parquet"), open_rows(write_lines(tmp_path / "b.jsonl.gz"))]
    child = multiprocessing.get_context("fork").Process(target=drop, args=(kept,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert len(list(own_temporary_folder.iterdir())) == 2
    assert [rows[0]["id"] for rows in pickle.loads(pickle.dumps(kept))] == [1, 0]


def test_files_are_closed_with_the_rows(tmp_path):
    path = write_lines(tmp_path / "a.jsonl")

    def num_open() -> int:
        links = list(Path("/proc/self/fd").iterdir())
        return sum(link.exists() and link.samefile(path) for link in links)

    rows = open_rows(path)
    assert num_open() == 1
    del rows
    gc.collect()
    assert num_open() == 0


def test_a_file_that_changed_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl")
    rows = open_rows(path)
    data = pickle.dumps(rows)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        ValueError, match=r"a\.jsonl must stay as it was when opened, and it changed"
    ):
        rows[2]
    with pytest.raises(
        ValueError, match=r"a\.jsonl must stay as it was when opened, and it changed"
    ):
        pickle.loads(data)


def test_columns_are_checked_at_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl")
    assert len(open_rows(path, columns=["id", "messages"])) == 3
    with pytest.raises(
        BadRowError,
        match=r"a\.jsonl, line 1, column 'message': expected a column of this name "
        r"\(is it 'messages'\?\), got \['id', 'messages'\]\.",
    ):
        open_rows(path, columns=["id", "message"])
    with pytest.raises(BadRowError, match=r"column 'zzz': expected a column of this name, got \["):
        open_rows(path, columns=["zzz"])


def test_a_row_that_lacks_a_column_can_be_skipped(tmp_path):
    rows = open_rows(write_lines(tmp_path / "a.jsonl"), columns=["tools"])
    assert rows[1]["tools"] == [{"a": None}]
    with pytest.raises(BadRowError, match=r"line 1, column 'tools'") as caught:
        rows[0]
    assert caught.value.reason == "missing column"


def test_require_columns_names_the_first_that_is_missing():
    require_columns({"a": None, "b": 1}, "a", "b")
    with pytest.raises(BadRowError, match=r"^column 'c': expected .*, got \['a'\]\.$"):
        require_columns({"a": 1}, "a", "c", "d")


def test_the_format_may_be_said(tmp_path):
    path = write_lines(tmp_path / "chats.txt")
    assert len(open_rows(path, format="jsonl")) == 3
    with pytest.raises(ValueError, match=r"chats\.txt must have a name that ends in one of"):
        open_rows(path)
    with pytest.raises(ValueError, match=r"format must be one of \['arrow', .* got 'xml'"):
        open_rows(path, format="xml")


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_lines(tmp_path / "a.jsonl")
    assert len(open_rows("~/a.jsonl")) == 3


def hub(monkeypatch, answer):
    """Replace the hub by one function; what it was called with."""
    called = []

    def load_dataset(*arguments, **options):
        called.append((arguments, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return called


def test_a_data_set_of_the_hub(monkeypatch):
    dataset = datasets.Dataset.from_list([{"a": 1, "b": None}, {"a": 2, "b": "x"}])
    called = hub(monkeypatch, dataset)
    rows = open_rows("someone/something", split="test", config="main", columns=["a"])
    assert called == [(("someone/something", "main"), {"split": "test", "streaming": False})]
    assert list(rows) == [{"a": 1}, {"a": 2, "b": "x"}]
    assert rows.where(1) == "someone/something (test), row 2"


def test_a_stream_of_the_hub(monkeypatch):
    dataset = datasets.Dataset.from_list([{"a": 1, "b": None}, {"b": "x"}]).to_iterable_dataset()
    called = hub(monkeypatch, dataset)
    stream = open_rows("someone/something", streaming=True, columns=["a"])
    assert called[0][1] == {"split": "train", "streaming": True}
    assert next(iter(stream)) == {"a": 1}
    with pytest.raises(BadRowError, match=r"^someone/something \(train\), row 2, column 'a'"):
        list(stream)
    assert list(stream.handle_bad_rows("skip")) == [{"a": 1}]


@pytest.mark.parametrize("error", [ConnectionError("offline"), ValueError("Unknown split")])
def test_a_hub_that_cannot_be_reached(monkeypatch, error):
    hub(monkeypatch, error)
    with pytest.raises(
        ValueError,
        match=r"^some/thing must be a file or folder that exists, or a hub id that can be reached "
        rf"with split 'train' and config None, but {type(error).__name__}: {error}",
    ):
        open_rows("some/thing")


def test_images_of_a_data_set_stay_bytes(tmp_path):
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["x"])}
    )
    # Made by Arrow: datasets would need Pillow.
    record = {"image": {"bytes": b"no image at all", "path": None}, "label": 0}
    table = pa.Table.from_pylist([record], schema=features.arrow_schema)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("saved", "a.parquet"):
        rows = open_rows(tmp_path / name)
        assert list(rows) == [{"image": b"no image at all", "label": 0}]


def halve(row: dict) -> int:
    if row["id"] % 2:
        raise BadRowError("an even number", row["id"], column="id", reason="odd")
    return row["id"] // 2


@pytest.fixture
def stream(tmp_path) -> RowStream[dict]:
    write_lines(tmp_path / "a.jsonl", [{"id": index} for index in range(10)])
    return open_rows(tmp_path / "a.jsonl", streaming=True)


def test_a_stream_begins_anew(stream):
    assert isinstance(iter(stream), types.GeneratorType)
    for _ in range(2):
        assert [row["id"] for row in stream] == list(range(10))


def test_a_stream_raises_bad_rows_or_counts_them(stream):
    halves = stream.map(halve)
    with pytest.raises(BadRowError, match=r"a\.jsonl, line 2, column 'id': expected an even"):
        list(halves)
    skipping = halves.handle_bad_rows("skip")
    for _ in range(2):
        assert list(skipping) == [0, 1, 2, 3, 4]
        assert skipping.skipped.counts == {"odd": 5}
    assert list(skipping.map(str)) == ["0", "1", "2", "3", "4"]
    with pytest.raises(ValueError, match="on_bad_row must be"):
        stream.handle_bad_rows("ignore")


def test_a_stream_of_a_file_with_a_bad_line_goes_on(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id"\n{"id": 3}\n')
    stream = open_rows(tmp_path / "a.jsonl", streaming=True).handle_bad_rows("skip")
    assert list(stream) == [{"id": 1}, {"id": 3}]
    assert stream.skipped.counts == {"not JSON": 1}


def test_a_stream_skips_records_good_or_bad(stream):
    halves = stream.map(halve).handle_bad_rows("skip")
    assert list(halves.skip(3)) == [2, 3, 4]
    assert list(halves.skip(0)) == [0, 1, 2, 3, 4]
    assert list(halves.skip(99)) == []
    with pytest.raises(ValueError, match="num_rows must be 0 or more, got -1"):
        stream.skip(-1)


def test_a_stream_is_shuffled_by_its_seed_alone(stream):
    ids = stream.map(lambda row: row["id"])
    orders = {seed: list(ids.shuffle(seed, buffer_size=4)) for seed in (0, 1, "1/2")}
    assert orders[0] == list(ids.shuffle(0, buffer_size=4))
    assert all(sorted(order) == list(range(10)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 3
    # A row comes at most a buffer before its turn.
    assert all(place >= row - 4 for order in orders.values() for place, row in enumerate(order))
    # What was left out of a shuffled stream is its beginning.
    assert list(ids.shuffle(0, buffer_size=4).skip(3)) == orders[0][3:]
    assert list(ids.shuffle(0, buffer_size=1)) == list(range(10))
    assert sorted(ids.shuffle(0)) == list(range(10))
    with pytest.raises(ValueError, match="buffer_size must be at least 1, got 0"):
        stream.shuffle(0, buffer_size=0)


def test_other_errors_in_a_stream_get_the_place_as_a_note(stream):
    with pytest.raises(KeyError) as caught:
        list(stream.map(lambda row: row["x"]))
    assert caught.value.__notes__[0].endswith("a.jsonl, line 1: this row was being made")


def test_rows_as_a_stream(tmp_path):
    rows = open_rows(write_lines(tmp_path / "a.jsonl"))
    assert list(stream_of(rows)) == RECORDS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.arrow"])
def test_a_file_changed_in_place_is_refused_whatever_its_size(tmp_path, name):
    path = tmp_path / name
    table = pa.table({"a": [f"{number:03}" for number in range(600)]})
    if name == "a.csv":
        path.write_text("\n".join(["a", *table["a"].to_pylist()]))
    elif name == "a.arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        lines = [json.dumps(record) for record in table.to_pylist()]
        path.write_text("\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]")
    rows = open_rows(path)
    assert rows[0] == {"a": "000"}
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"9")
    os.utime(path, ns=(1, 1))  # a clock may be too coarse to show it
    assert path.stat().st_size == size
    error = rf"{name} must stay as it was when opened, and it changed"
    with pytest.raises(ValueError, match=error):
        rows[300]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_another_takes_the_place_of_stays_as_it_was(tmp_path, name):
    rows = open_rows(write_lines(tmp_path / name))
    write_lines(tmp_path / f"b{name}", RECORDS[:1]).rename(tmp_path / name)
    assert list(rows) == RECORDS


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_an_end_while_unpacking_leaves_no_temporary_file(tmp_path, monkeypatch, name, error):
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pa.table({"a": [1]}), path)
    else:
        write_lines(path)

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    monkeypatch.setattr(pa.ipc, "new_stream", fail)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    kind = ValueError if isinstance(error, OSError) else KeyboardInterrupt
    match = rf"temporary must have room for what .*{name} holds, but .*No space left"
    with pytest.raises(kind, match=match if kind is ValueError else None):
        open_rows(path)
    assert list(folder.iterdir()) == []


def test_a_name_that_no_file_can_have(tmp_path):
    error = (
        rf"source must be a file or a folder that can be looked up, got '{'x' * 120}\.\.\.': File"
    )
    with pytest.raises(ValueError, match=error):
        open_rows("x" * 300 + ".jsonl")
    with pytest.raises(ValueError, match=r"got '~no-such-user-here/x\.jsonl': Could not determine"):
        open_rows("~no-such-user-here/x.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "data"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, name):
    link = tmp_path / name
    link.symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=rf"{name} must be .* is a link to '.*gone\.jsonl', which"):
        open_rows(link)
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(ValueError, match=rf"{name} must be .* is a link to '.*{name}', which is"):
        open_rows(link)


def test_a_number_too_large_for_a_float_is_no_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1e308}\n{"a": 1e999}\n{"a": -1e999}\n')
    rows = open_rows(path)
    assert rows[0] == {"a": 1e308}
    error = r"line 2: expected a number that a float can hold, got '1e999'\."
    with pytest.raises(BadRowError, match=error):
        rows[1]
    with pytest.raises(BadRowError, match=r"got '-1e999'\."):
        rows[2]


def test_a_folder_with_one_other_split_names_it(tmp_path):
    (tmp_path / "data").mkdir()
    for part in (0, 1):
        name = f"test-{part:05}-of-00002.jsonl"
        (tmp_path / "data" / name).write_text('{"n": 1}\n')
    with pytest.raises(ValueError, match="; pass split='test', or name the file itself"):
        open_rows(tmp_path)
    assert len(open_rows(tmp_path, split="test")) == 2
    (tmp_path / "dev.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(ValueError, match="; name a split that is there, or name the file itself"):
        open_rows(tmp_path)
