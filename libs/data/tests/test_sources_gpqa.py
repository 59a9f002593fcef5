"""GPQA. Its questions are in no file of this repository: these ones are made here."""

import builtins
import csv
import io
import os
import struct
import zlib

import pytest
from burnish_data import BadRowError
from burnish_data.sources import gpqa

COLUMNS = (
    "Record ID",
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)
RECORDS = [
    dict(
        zip(
            COLUMNS,
            (f"rec{i}", f"What is {i} + {i}?\n", f"{2 * i}", "odd", "nil", "all"),
            strict=True,
        )
    )
    for i in range(1, 41)
]
PASSWORD = "made-up-words"


def as_csv():
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows(RECORDS)
    return file.getvalue().encode()


def encrypted_zip(name, data, password):
    """A zip file with one stored member, by the cipher of PKZIP, which zipfile only reads."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
        table.append(value)
    keys = [0x12345678, 0x23456789, 0x34567890]

    def crc(key, byte):
        return key >> 8 ^ table[(key ^ byte) & 255]

    def update(byte):
        keys[0] = crc(keys[0], byte)
        keys[1] = ((keys[1] + (keys[0] & 255)) * 134775813 + 1) & 0xFFFFFFFF
        keys[2] = crc(keys[2], keys[1] >> 24)

    def encrypt(byte):
        mixed = keys[2] | 2
        update(byte)
        return byte ^ (mixed * (mixed ^ 1) >> 8 & 255)

    for byte in password.encode():
        update(byte)
    check = zlib.crc32(data)
    body = bytes(map(encrypt, bytes(11) + bytes([check >> 24]) + data))
    fields = (20, 1, 0, 0, 33, check, len(body), len(data), len(name), 0)
    local = b"PK\3\4" + struct.pack("<5H3I2H", *fields) + name.encode() + body
    central = b"PK\1\2" + struct.pack("<6H3I5H2I", 20, *fields, 0, 0, 0, 0, 0) + name.encode()
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, 1, 1, len(central), len(local), 0)
    return local + central + end


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "dataset.zip"
    path.write_bytes(encrypted_zip("dataset/gpqa_diamond.csv", as_csv(), PASSWORD))
    return path


@pytest.fixture
def nothing_is_written(monkeypatch, tmp_path):
    """Fails when a file is opened to be written, or made by another way that Python has."""
    real_open, real_os_open = builtins.open, os.open

    def refuse(path):
        raise AssertionError(f"GPQA must not be written to a disk: {path}")

    def checked_open(file, mode="r", *arguments, **settings):
        return (
            refuse(file)
            if set(mode) & set("wax+")
            else real_open(file, mode, *arguments, **settings)
        )

    def checked_os_open(path, flags, *arguments, **settings):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse(path)
        return real_os_open(path, flags, *arguments, **settings)

    monkeypatch.setattr(builtins, "open", checked_open)
    monkeypatch.setattr(io, "open", checked_open)
    monkeypatch.setattr(os, "open", checked_os_open)
    with pytest.raises(AssertionError, match="must not be written"):
        (tmp_path / "control").write_text("")  # the fixture sees what it should see


def test_the_authors_zip_is_read_in_memory(archive, nothing_is_written):
    rows = gpqa(archive, password=PASSWORD, system=None)
    assert len(rows) == 40
    for number, row in enumerate(rows, start=1):
        assert sorted(row["choices"]) == sorted([str(2 * number), "odd", "nil", "all"])
        assert row["choices"]["ABCD".index(row["answer"])] == str(2 * number)
        assert row["id"] == f"gpqa/rec{number}"
    lines = rows[0]["prompt"][0]["content"].split("\n")
    assert lines[:2] == ["What is 1 + 1?", ""]
    assert lines[2:] == [
        f"{letter}. {text}" for letter, text in zip("ABCD", rows[0]["choices"], strict=True)
    ]


def test_a_csv_file_and_a_folder_are_read_without_a_copy(tmp_path, archive, request):
    (tmp_path / "gpqa_diamond.csv").write_bytes(as_csv())
    request.getfixturevalue("nothing_is_written")
    expected = list(gpqa(archive, password=PASSWORD))
    assert list(gpqa(tmp_path / "gpqa_diamond.csv")) == expected
    assert list(gpqa(tmp_path)) == expected


def test_the_hub_is_streamed(monkeypatch, archive):
    asked = []

    class Streamed:
        def with_format(self, kind):
            import pyarrow

            assert kind == "arrow"
            return [pyarrow.Table.from_pylist([record]) for record in RECORDS]

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        return Streamed()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = gpqa(subset="main")
    assert asked == [(("Idavidrein/gpqa", "gpqa_main"), {"split": "train", "streaming": True})]
    assert list(rows) == list(gpqa(archive, password=PASSWORD))
    assert rows.where(2) == "Idavidrein/gpqa (gpqa_main), row 3"


def test_the_order_of_the_choices_is_of_the_seed_and_the_question(archive):
    first = [row["answer"] for row in gpqa(archive, password=PASSWORD, seed=1)]
    assert first == [row["answer"] for row in gpqa(archive, password=PASSWORD, seed=1)]
    assert first != [row["answer"] for row in gpqa(archive, password=PASSWORD, seed=2)]
    assert set(first) == set("ABCD")
    assert "".join(first[:8]) == "ADCAACCA"


def test_sources_that_cannot_be_used(archive, tmp_path):
    with pytest.raises(
        ValueError, match=r"password must be the one in GPQA's README, but .*encrypt"
    ):
        gpqa(archive)
    with pytest.raises(
        ValueError, match="password must be the one in GPQA's README, but Bad passw"
    ):
        gpqa(archive, password="other")
    with pytest.raises(ValueError, match=r"must hold gpqa_main\.csv, got \['dataset/gpqa_diam"):
        gpqa(archive, subset="main", password=PASSWORD)
    with pytest.raises(
        ValueError, match='subset must be "diamond", "main" or "extended", got \'hard\''
    ):
        gpqa(archive, subset="hard")
    (tmp_path / "gpqa.zip").write_bytes(b"no zip")
    with pytest.raises(
        ValueError, match=r"gpqa\.zip must be a zip file that can be read, but File"
    ):
        gpqa(tmp_path / "gpqa.zip")
    with pytest.raises(
        ValueError, match=r"none\.zip must be a zip file that can be read, but .*No such"
    ):
        gpqa(tmp_path / "none.zip")
    (tmp_path / "gpqa_diamond.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ValueError, match=r"must be a \.zip, \.csv, \.json or \.jsonl file, got .*parq"
    ):
        gpqa(tmp_path / "gpqa_diamond.parquet")


def test_a_row_without_an_answer_is_named(archive, tmp_path):
    path = tmp_path / "gpqa_diamond.csv"
    path.write_text(
        "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
        "Why?,,b,c,d\n"
    )
    with pytest.raises(
        BadRowError, match=r"diamond\.csv, line 2, column 'Correct Answer': expected text, got ''"
    ):
        gpqa(path)[0]
