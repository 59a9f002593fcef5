import gzip
import json

import pyarrow
import pytest
from burnish_data import gsm8k, validate_messages
from burnish_data.sources import gsm8k_solutions
from pyarrow import parquet

RECORDS = [
    {"question": "How much is 3 + 4?", "answer": "It is <<3+4=7>>7.\n#### 7"},
    {"question": "And 1,000 more, twice?", "answer": "<<7+1000=1007>> <<2*1007=2014>>\n#### 2,014"},
    {"question": "Less than nothing?", "answer": "#### -3"},
]
GOOD = json.dumps(RECORDS[0])


def write_jsonl(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def write_parquet(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    return path


def contents(rows):
    return [(row["prompt"][-1]["content"], row["answer"], row["level"]) for row in rows]


EXPECTED = [
    ("How much is 3 + 4?", "7", 1),
    ("And 1,000 more, twice?", "2014", 2),
    ("Less than nothing?", "-3", 1),
]


def test_bundled_rows():
    train, test = gsm8k(), gsm8k(split="test")
    assert (len(train), len(test)) == (256, 128)
    assert train[0]["prompt"][-1]["content"].startswith("Natalia sold clips to 48 of her friends")
    assert (train[0]["answer"], train[0]["level"], train[0]["id"]) == ("72", 2, "gsm8k/train/0")
    assert test[0]["prompt"][-1]["content"].endswith("at the farmers' market?")
    assert test[0]["answer"] == "18"
    for row in train + test:
        validate_messages(row["prompt"])
        assert float(row["answer"]) == int(row["answer"])
    questions = [row["prompt"][-1]["content"] for row in train + test]
    assert len(set(questions)) == 384


def test_the_system_message_is_the_callers():
    assert gsm8k()[0]["prompt"][0]["role"] == "system"
    assert [m["role"] for m in gsm8k(system=None)[0]["prompt"]] == ["user"]
    assert gsm8k(system="Be brief.")[0]["prompt"][0] == {"role": "system", "content": "Be brief."}


def test_local_files(tmp_path):
    jsonl = write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, RECORDS), "")
    assert contents(gsm8k(jsonl)) == EXPECTED
    assert contents(gsm8k(str(write_parquet(tmp_path / "a.parquet")))) == EXPECTED


def test_ids_name_the_file_that_is_read(tmp_path):
    jsonl = write_jsonl(tmp_path / "test.jsonl", *map(json.dumps, RECORDS))
    assert [row["id"] for row in gsm8k(jsonl)] == ["gsm8k/test/0", "gsm8k/test/1", "gsm8k/test/2"]
    packed = tmp_path / "mine.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    assert gsm8k(packed, split="test")[2]["id"] == "gsm8k/mine/2"
    assert gsm8k(tmp_path, split="test")[0]["id"] == "gsm8k/test/0"


def test_a_folder_holds_a_file_for_each_split(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", GOOD)
    write_parquet(tmp_path / "test.parquet")
    assert contents(gsm8k(tmp_path)) == EXPECTED[:1]
    assert contents(gsm8k(tmp_path, split="test")) == EXPECTED


def test_a_hub_data_set(tmp_path, monkeypatch):
    """A folder laid out as the hub's repository, read by `datasets` as it reads the hub."""
    import datasets

    repository = tmp_path / "gsm8k"
    write_parquet(repository / "main" / "test-00000-of-00001.parquet")
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: test\n    path: main/test-*\n---\n"
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    load_dataset, asked = datasets.load_dataset, []

    def load_from_the_folder(name, *arguments, **settings):
        asked.append((name, *arguments, settings["split"]))
        return load_dataset(str(repository), *arguments, **settings)

    monkeypatch.setattr("datasets.load_dataset", load_from_the_folder)
    assert contents(gsm8k("openai/gsm8k", split="test")) == EXPECTED
    assert asked == [("openai/gsm8k", "main", "test")]
    assert contents(gsm8k(repository, split="test")) == EXPECTED  # the repository, cloned


def test_a_draw_repeats_nothing_and_is_seeded():
    rows = gsm8k(num_rows=50, seed=1)
    assert len({row["id"] for row in rows}) == 50
    assert rows == gsm8k(num_rows=50, seed=1)
    assert rows != gsm8k(num_rows=50, seed=2)
    assert gsm8k(num_rows=0) == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"question": "How', r"line 2, character \d+: expected JSON \("),
        ("[1, 2]", r"line 2: expected a JSON object, got \[1, 2\]"),
        ('{"question": "?"}', r"line 2, column 'answer': expected a column .*got \['question'\]"),
        ('{"question": 7, "answer": "#### 7"}', r"line 2, column 'question': expected text, got 7"),
        ('{"question": " ", "answer": "#### 7"}', r"line 2, column 'question': expected text"),
        ('{"question": "?", "answer": ""}', r"line 2, column 'answer': expected text, got ''"),
        ('{"question": "?", "answer": "7"}', r"line 2, column 'answer': expected a number after"),
        ('{"question": "?", "answer": "####"}', r"line 2, column 'answer': expected a number"),
        ('{"question": "?", "answer": "#### x"}', r"line 2, column 'answer': .* got '#### x'"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_column(tmp_path, line, error):
    path = write_jsonl(tmp_path / "bad.jsonl", GOOD, line, GOOD)
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {error}"):
        gsm8k(path)


def test_a_wrong_encoding_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"question": "caf\xe9?", "answer": "#### 7"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl, line 2: expected UTF-8 \(byte 18 is none"):
        gsm8k(path)


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl must be a file that exists"):
        gsm8k(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"must hold train\.jsonl, train-\*\.parquet or the like"):
        gsm8k(tmp_path)
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'validation'"):
        gsm8k(split="validation")
    with pytest.raises(ValueError, match=r"bundled \(test\), which is 128, got 129"):
        gsm8k(split="test", num_rows=129)


def test_worked_solutions_are_chats() -> None:
    rows = gsm8k_solutions(split="test")
    assert len(rows) == 128
    roles = [message["role"] for message in rows[0]["messages"]]
    assert roles == ["system", "user", "assistant"]
    assert "####" in str(rows[0]["messages"][-1]["content"])
    assert [m["role"] for m in gsm8k_solutions(system=None)[0]["messages"]] == ["user", "assistant"]
    with pytest.raises(ValueError, match="must be 'train' or 'test', got 'validation'"):
        gsm8k_solutions(split="validation")  # type: ignore[arg-type]
