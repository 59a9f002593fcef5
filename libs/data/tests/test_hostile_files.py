"""Files as they should not be: each names its file, its line, and what was expected.

Rows that are bad on their own can be skipped, and are counted under a reason; a file that is broken
as a whole cannot be opened.
"""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from burnish_data import BadRowError, check_rows
from burnish_data.files import open_rows
from burnish_data.formats import (
    alpaca,
    labelled,
    openai_chat,
    preference,
    prompt_response,
    sharegpt,
)
from pyarrow import parquet

GOOD = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}'
ANSWER = {"role": "assistant", "content": "Ho"}
ASK = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": '}}


def chat(*messages: object, **columns: object) -> bytes:
    return json.dumps({"messages": messages, **columns}).encode()


# Name, the second line of a JSONL file whose first and third are good, the reason under which it is
# counted, and the message after "FILE, line 2".
BAD_LINES = [
    ("a line that is cut", GOOD[:40], "not JSON", r", character 41: expected JSON \(Expecting ':'"),
    (
        "a line without its end",
        b'{"messages": [',
        "not JSON",
        r", character 15: expected JSON \(Ex",
    ),
    ("single quotes", b"{'messages': []}", "not JSON", r", character 2: expected JSON \(Expecting"),
    (
        "two objects",
        GOOD + b" " + GOOD,
        "not JSON",
        r", character 91: expected JSON \(Extra data\)",
    ),
    ("a list", b"[1, 2]", "no object", r": expected a JSON object, got \[1, 2\]\."),
    ("a number", b"7", "no object", r": expected a JSON object, got 7\."),
    ("null", b"null", "no object", r": expected a JSON object, got None\."),
    (
        "plain text",
        b"Once upon a time",
        "not JSON",
        r", character 1: expected JSON \(Expecting val",
    ),
    (
        "a key twice",
        b'{"messages": [], "messages": []}',
        "duplicate key",
        r": expected each key of an object once, got 'messages'\.",
    ),
    (
        "a key twice, far inside",
        b'{"messages": [{"role": "user", "role": "tool", "content": "x"}]}',
        "duplicate key",
        r": expected each key of an object once, got 'role'\.",
    ),
    (
        "not a number",
        b'{"score": NaN}',
        "not JSON",
        r": expected JSON, which has no such number, got 'NaN'\.",
    ),
    (
        "minus infinity",
        b'{"score": -Infinity}',
        "not JSON",
        r": expected JSON, which has no such number, got '-Infinity'\.",
    ),
    (
        "a number of 5,000 digits",
        b'{"score": ' + b"7" * 5000 + b"}",
        "not JSON",
        r": expected JSON of usual depth and numbers \(Exceeds the limit",
    ),
    (
        "100,000 brackets",
        b'{"messages": ' + b"[" * 100_000,
        "not JSON",
        r": expected JSON of usual depth and numbers \(.*, got .* \(100,015 characters\)\.$",
    ),
    (
        "Latin-1",
        '{"messages": "café"}'.encode("latin-1"),
        "not UTF-8",
        r": expected UTF-8 \(byte 18 is none\), got b'.*caf\\xe9\"}",
    ),
    (
        "half a character",
        b'{"messages": "\\ud83d"}',
        "not UTF-8",
        r": expected whole characters, no half of a surrogate pair, got ",
    ),
    (
        "a huge row",
        chat({"role": "user", "content": "x" * 5000}, ANSWER),
        "huge row",
        r": expected a row of at most max_row_bytes=2,000 bytes, got 5\d\d\d\.",
    ),
    (
        "no such column",
        b'{"message": []}',
        "missing column",
        r", column 'messages': expected a column of this name \(is it 'message'\?\), got \['messa",
    ),
    (
        "no messages",
        chat(),
        "bad row",
        r", column 'messages': expected a list of at least one mess",
    ),
    (
        "messages that are text",
        b'{"messages": "Hi"}',
        "not JSON",
        r", column 'messages': expected JSON \(Expecting value: .*got 'Hi'\.",
    ),
    (
        "messages that are numbers",
        chat(1, 2),
        "bad row",
        r""", column 'messages\[0\]': expected \{"role": ..., "content": ...\}, got 1\.""",
    ),
    (
        "the assistant first",
        chat(ANSWER, ASK),
        "wrong order of roles",
        r", column 'messages\[0\]\.role': expected 'system' or 'user' first, got 'assistant'\.",
    ),
    (
        "a system message in the middle",
        chat(ASK, {"role": "system", "content": "x"}),
        "wrong order of roles",
        r", column 'messages\[1\]\.role': expected 'user' or 'assistant' after 'user', got 'sys",
    ),
    (
        "the assistant twice",
        chat(ASK, ANSWER, ANSWER),
        "wrong order of roles",
        r", column 'messages\[2\]\.role': expected 'user' or 'tool' after 'assistant', got 'assis",
    ),
    (
        "an unknown role",
        chat({"role": "narrator", "content": "x"}),
        "bad row",
        r", column 'messages\[0\]\.role': expected one of .*, got 'narrator'\.",
    ),
    (
        "no role",
        chat({"content": "x"}),
        "bad row",
        r", column 'messages\[0\]\.role': expected one of .*, got None\.",
    ),
    (
        "an empty answer",
        chat(ASK, {"role": "assistant", "content": " \n"}),
        "empty message",
        r", column 'messages\[1\]\.content': expected text that is not empty, got ' \\n'\.",
    ),
    (
        "an answer of null",
        chat(ASK, {"role": "assistant", "content": None}),
        "empty message",
        r", column 'messages\[1\]\.content': expected text that is not empty, got None\.",
    ),
    (
        "a number as content",
        chat(ASK, {"role": "assistant", "content": 4}),
        "bad row",
        r", column 'messages\[1\]\.content': expected text, or a list of text and image parts, go",
    ),
    (
        "an image to be fetched",
        chat({"role": "user", "content": [{"type": "image", "url": "http://x/y.png"}]}, ANSWER),
        "bad row",
        r", column 'messages\[0\]\.content\[0\]\.image_url\.url': expected a path or data:",
    ),
    (
        "arguments that are cut",
        chat(ASK, {"role": "assistant", "tool_calls": [CALL]}),
        "not JSON",
        r", column 'messages\[1\]\.tool_calls\[0\]\.function\.arguments': expected JSON \(Exp",
    ),
    (
        "tools without names",
        chat(ASK, ANSWER, tools=[{"type": "function", "function": {}}]),
        "bad row",
        r""", column 'tools\[0\]': expected \{"type": "function", "function": \{"name": .*, got """,
    ),
    (
        "tools that are cut",
        chat(ASK, ANSWER, tools='[{"name": "f"'),
        "not JSON",
        r""", column 'tools': expected JSON \(Expecting ',' delimiter""",
    ),
    (
        "a weight below 0",
        chat(ASK, {**ANSWER, "weight": -0.5}),
        "bad row",
        r", column 'messages\[1\]\.weight': expected a finite number of 0 or more, got -0\.5\.",
    ),
    (
        "more images than marks",
        chat({"role": "user", "content": "<image>Which?"}, ANSWER, images=["a.png", "b.png"]),
        "images and marks differ",
        r", column 'messages': expected 2 <image> in the users' text, .*, got 1\.",
    ),
]


@pytest.mark.parametrize(
    ("line", "reason", "error"),
    [case[1:] for case in BAD_LINES],
    ids=[case[0] for case in BAD_LINES],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, reason, error):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    rows = open_rows(path, max_row_bytes=200_000 if b"[[[" in line or b"777" in line else 2000)
    rows = rows.map(openai_chat)
    assert len(rows) == 3
    with pytest.raises(BadRowError, match=rf"^{path}, line 2{error}"):
        check_rows(rows)
    good, skipped = check_rows(rows, on_bad_row="skip")
    assert [row["messages"][1]["content"] for row in good] == ["Ho", "Ho"]
    assert skipped.counts == {reason: 1}
    assert skipped.examples[reason][0].startswith(f"{path}, line 2")


# The columns of a record, the function that reads it, and the message after "FILE, line 1".
BAD_RECORDS = [
    (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "alien", "value": "x"}]},
        sharegpt,
        r", column 'conversations\[1\]\.role': expected one of .*, got 'alien'\.",
    ),
    (
        {"conversations": [{"from": "gpt", "value": "Hi"}]},
        sharegpt,
        r", column 'conversations\[0\]\.role': expected 'system' or 'user' first, got 'assistant'",
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": "f("},
            ]
        },
        sharegpt,
        r", column 'conversations\[1\]\.value': expected JSON \(Expecting value: .*, got 'f\('\.",
    ),
    (
        {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "Hi"}]},
        sharegpt,
        r", column 'conversations\[0\]\.content': expected text that is not empty, got ''\.",
    ),
    (
        {"instruction": "Add.", "outputs": "3"},
        alpaca,
        r", column 'output': expected a column of this name \(is it 'outputs'\?\), got \['instruct",
    ),
    (
        {"instruction": "Add.", "output": ""},
        alpaca,
        r", column 'output': expected text that is not empty, got ''\.",
    ),
    (
        {"instruction": "Add.", "output": "3", "history": [["Hi"]]},
        alpaca,
        r", column 'history\[0\]': expected \[user's text, assistant's text\], got \['Hi'\]\.",
    ),
    (
        {"question": "Why?", "answer": None},
        prompt_response("question", "answer"),
        r", column 'answer': expected text or messages, got None\.",
    ),
    (
        {"chosen": "Yes.", "rejected": "No."},
        preference,
        r", column 'prompt': expected a column of this name, since chosen and rejected are text, ",
    ),
    (
        {"prompt": "Why?", "chosen": [ANSWER], "rejected": ""},
        preference,
        r", column 'rejected': expected text that is not empty, got ''\.",
    ),
    (
        {"chosen": [ASK, ANSWER], "rejected": [{**ASK, "content": "Other"}, ANSWER]},
        preference,
        r", column 'rejected': expected two conversations that begin alike and then differ, got",
    ),
    (
        {"prompt": "Why?", "completion": "So.", "label": "yes"},
        labelled,
        r", column 'label': expected true, false, 1 or 0, got 'yes'\.",
    ),
]


@pytest.mark.parametrize(("record", "read", "error"), BAD_RECORDS)
def test_a_bad_record_of_another_form_is_named(tmp_path, record, read, error):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(BadRowError, match=rf"^{path}, line 1{error}"):
        check_rows(open_rows(path).map(read))


def small_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({"a": ["x" * 100] * 100}), sink)
    return sink.getvalue().to_pybytes()


def small_arrow() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"a": ["x" * 100] * 100})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


PARQUET, ARROW = small_parquet(), small_arrow()
LINES = (GOOD + b"\n") * 20

# A file's name, its bytes, and the message after its path.
BROKEN_FILES = [
    ("empty.jsonl", b"", r" must hold at least one row, and it is empty\."),
    ("blank.jsonl", b"\n  \n\n", r" must hold at least one row, and it holds none\."),
    ("header.csv", b"a,b\n", r" must hold at least one row, and it holds none\."),
    ("empty.json", b"", r" must hold at least one row, and it is empty\."),
    ("no_row.json", b"[]", r" must hold at least one row, and it holds none\."),
    ("empty.parquet", b"", r" must be a whole Parquet file, but "),
    (
        "utf16.jsonl",
        LINES.decode().encode("utf-16"),
        r" must be text in UTF-8, and it is UTF-16; co",
    ),
    (
        "utf16le.jsonl",
        LINES.decode().encode("utf-16-le"),
        r" must be text in UTF-8, and it holds zero bytes; it is binary, or UTF-16\.",
    ),
    (
        "model.jsonl",
        b"\x7fELF\x02\x01\x01\x00\x00",
        r" must be text in UTF-8, and it holds zero byt",
    ),
    (
        "packed.jsonl",
        gzip.compress(LINES),
        r" must be text in UTF-8, and it is gzip; name it with \.g",
    ),
    ("a.csv", PARQUET, r" must be text in UTF-8, and it is Parquet; name it \.parquet\."),
    ("b.jsonl", ARROW, r" must be text in UTF-8, and it is Arrow; name it \.arrow\."),
    (
        "zip.jsonl",
        b"PK\x03\x04abc",
        r" must be text in UTF-8, and it is a zip archive; unpack it\.",
    ),
    (
        "cut.jsonl.gz",
        gzip.compress(LINES)[:-20],
        r" must be a whole gzip, but Compressed file ended",
    ),
    (
        "cut.json.gz",
        gzip.compress(b"[]" + LINES)[:-20],
        r" must be a whole gzip, but Compressed fi",
    ),
    ("other.jsonl.gz", LINES, r" must be a whole gzip, but Not a gzipped file .*; fetch it anew\."),
    (
        "array.jsonl",
        b"[\n" + GOOD + b"\n]",
        r" must hold a JSON object on each line, and it begins an",
    ),
    (
        "pretty.json",
        b'{\n"messages": []\n}',
        r" must hold a JSON .*, and it begins an object over sev",
    ),
    (
        "cut.json",
        b"[\n" + GOOD + b",\n" + GOOD[:40],
        r", line 3, character 41: expected a whole JSON array of objects \(Expecting ':'",
    ),
    (
        "comma.json",
        b"[" + GOOD + b",]",
        r", line 1, character 92: expected a whole JSON array of objects \(Illegal trailing comma",
    ),
    (
        "more.json",
        b"[" + GOOD + b"] x",
        r", line 1, character 93: expected a whole JSON array of objects \(Extra data",
    ),
    (
        "latin.json",
        '[{"a": "x"},\n{"a": "é"}]'.encode("latin-1"),
        r", line 2: expected UTF-8 \(byte 21 is none\), got b'.*\\xe9",
    ),
    (
        "twice.csv",
        b"a,a\n1,2\n",
        r" must begin with a line of the columns' names, each once, got \['a",
    ),
    (
        "unnamed.csv",
        b"a,\n1,2\n",
        r" must begin with a line of the columns' names, .*, got \['a', ''\]",
    ),
    ("cut.parquet", PARQUET[:-10], r" must be a whole Parquet file, but "),
    ("text.parquet", LINES, r" must be a whole Parquet file, but "),
    ("cut.arrow", ARROW[:-30], r" must be a whole Arrow file, but "),
    ("text.arrow", LINES, r" must be a whole Arrow file, but "),
    ("notes.docx", b"x", r" must have a name that ends in one of \['\.arrow', '\.csv', "),
    ("a.parquet.gz", b"x", r" must have a name that ends in one of "),
]


@pytest.mark.parametrize(
    ("name", "data", "error"), BROKEN_FILES, ids=[case[0] for case in BROKEN_FILES]
)
def test_a_file_that_is_broken_cannot_be_opened(tmp_path, name, data, error):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"^{path}{error}"):
        open_rows(path)


# A line of a CSV file with the columns a and b, the reason, and the message.
BAD_CSV_LINES = [
    (b"1,2,3\n", "ragged line", r": expected 2 fields \['a', 'b'\], got \['1', '2', '3'\]\."),
    (b"1\n", "ragged line", r": expected 2 fields \['a', 'b'\], got \['1'\]\."),
    (b'1,"x" y\n', "not CSV", r": expected CSV \(',' expected after '\"'\), got "),
    (b"caf\xe9,1\n", "not UTF-8", r": expected UTF-8 \(byte 4 is none\), got b'caf\\xe9,1"),
]


@pytest.mark.parametrize(("line", "reason", "error"), BAD_CSV_LINES)
def test_a_bad_line_of_csv_is_named_or_skipped_and_counted(tmp_path, line, reason, error):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,b\n1,2\n" + line + b"3,4\n")
    rows = open_rows(path)
    with pytest.raises(BadRowError, match=rf"^{path}, line 3{error}"):
        check_rows(rows)
    good, skipped = check_rows(rows, on_bad_row="skip")
    assert list(good) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert skipped.counts == {reason: 1}


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_quote_that_is_never_closed_is_counted_as_the_lines_it_swallows(tmp_path, end):
    path = tmp_path / "rows.csv"
    path.write_text(f'a,b\n1,2\n3,"4\n5,6\n7,8{end}')
    good, skipped = check_rows(open_rows(path), on_bad_row="skip")
    assert list(good) == [{"a": "1", "b": "2"}]
    got = repr(f'3,"4\n5,6\n7,8{end}')
    assert skipped.counts == {"not CSV": 3}
    assert skipped.examples == {
        "not CSV": [
            f"{path}, line 3: expected CSV (unexpected end of data; a quote swallowed 3 lines), "
            f"got {got}."
        ]
    }


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_quote_that_swallows_more_than_a_row_may_hold(tmp_path, end):
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,2\n3,"4\n' + "5,6\n" * 9 + f"7,8{end}")
    good, skipped = check_rows(open_rows(path, max_row_bytes=20), on_bad_row="skip")
    assert list(good) == [{"a": "1", "b": "2"}]
    assert skipped.counts == {"huge row": 11}
    (example,) = skipped.examples["huge row"]
    assert "at most max_row_bytes=20 bytes; a quote swallowed 11 lines, got 4" in example


def test_a_quote_that_does_not_begin_a_field_is_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n5" nail,x\n6,a "b" c\n "7,8"\n9,"x, ""y""\nz"\r\n"",1\n')
    good, skipped = check_rows(open_rows(path), on_bad_row="skip")
    assert list(good) == [
        {"a": '5" nail', "b": "x"},
        {"a": "6", "b": 'a "b" c'},
        {"a": ' "7', "b": '8"'},
        {"a": "9", "b": 'x, "y"\nz'},
        {"a": "", "b": "1"},
    ]
    assert skipped.total == 0


def test_a_tab_or_a_quote_at_the_end_of_a_piece(tmp_path):
    """Lines are read in pieces of 2**20 bytes, of which each must know where the last left off."""
    for length in range(2**20 - 6, 2**20 + 2):
        path = tmp_path / f"{length}.tsv"
        path.write_text(f'a\tb\n{"x" * length}\t"y""\n\t""z"\n1\t2\n')
        rows = open_rows(path)
        assert list(rows) == [
            {"a": "x" * length, "b": 'y"\n\t"z'},
            {"a": "1", "b": "2"},
        ]


def test_a_bad_row_of_an_array_is_named_and_the_others_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1},\n {"a": 1,\n "a": 2},\n 7, {"a": 3}]')
    good, skipped = check_rows(open_rows(path), on_bad_row="skip")
    assert list(good) == [{"a": 1}, {"a": 3}]
    assert skipped.examples == {
        "duplicate key": [f"{path}, row 2 (line 2): expected each key of an object once, got 'a'."],
        "no object": [f"{path}, row 3 (line 4): expected a JSON object, got 7."],
    }


def test_every_row_bad_is_an_error_even_when_skipping(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{x\n{\n")
    with pytest.raises(
        ValueError, match=r"At least one row must be good, got none of 2: 2 skipped"
    ):
        check_rows(open_rows(path), on_bad_row="skip")


def in_folder(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        make(folder)
        return folder

    return made


def write(*names: str) -> Callable[[Path], Path]:
    return in_folder(lambda folder: [(folder / name).write_bytes(LINES) for name in names])


def cut_saved(folder: Path) -> Path:
    datasets.Dataset.from_list([{"a": "x" * 100}] * 100).save_to_disk(folder / "saved")
    path = folder / "saved" / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-9000])
    return folder / "saved"


def lost_saved(folder: Path) -> Path:
    datasets.Dataset.from_list([{"a": 1}]).save_to_disk(folder / "saved")
    (folder / "saved" / "data-00000-of-00001.arrow").unlink()
    return folder / "saved"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


# What makes the source in a folder, and the message; FOLDER is the folder's path.
BROKEN_SOURCES = [
    (in_folder(lambda folder: None), r"^The folder FOLDER must hold train\.jsonl, .*, got \[\];"),
    (write("notes.txt"), r"^The folder FOLDER must hold train\.jsonl, .*, got \['notes\.txt'\];"),
    (
        write("test.jsonl"),
        r"^The folder FOLDER must hold train\.jsonl, .*, got \['test\.jsonl'\]; pass split='test'",
    ),
    (
        write("train.jsonl", "train.csv"),
        r"^The folder FOLDER must hold split 'train' in one format, got \['train\.csv', 'train\.js",
    ),
    (
        write("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"),
        r"^The folder FOLDER must hold all 3 parts of the split, and number 00001 of 00003 is miss",
    ),
    (cut_saved, r"^FOLDER/saved must be a whole folder of save_to_disk, but "),
    (lost_saved, r"^FOLDER/saved must be a whole folder of save_to_disk, but "),
    (pipe, r"^FOLDER/pipe must be a file or a folder, and it is neither\."),
    (
        lambda folder: folder / "no.jsonl",
        r"^FOLDER/no\.jsonl must be a file that exists, .* none\.$",
    ),
    (
        lambda folder: write("train.jsonl")(folder) / "trian.jsonl",
        r"^FOLDER/trian\.jsonl must be a file that exists, and there is none; there is 'train\.jso",
    ),
    (lambda folder: "", r"^source must be a file, a folder or a hub id, got an empty text\.$"),
    (lambda folder: folder / "no_folder", r"^FOLDER/no_folder must be a file that exists, and"),
]


@pytest.mark.parametrize(("make", "error"), BROKEN_SOURCES)
def test_a_source_that_is_none_is_named(tmp_path, make, error):
    source = make(tmp_path)
    with pytest.raises(ValueError, match=error.replace("FOLDER", str(tmp_path))):
        open_rows(source)
