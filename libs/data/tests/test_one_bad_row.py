"""Whatever one row is, it is a BadRowError in its place, and the rows beside it are encoded."""

import json
from functools import partial

import pytest
from burnish_data import BadRowError
from burnish_data.encode import encode_chat, encode_chats
from burnish_data.encode_rows import encode_rows
from burnish_data.files import open_rows
from burnish_data.formats import alpaca, number, openai_chat
from burnish_data.rows import check_rows
from burnish_data.tasks import (
    encode_labels,
    encode_preferences,
    encode_problem,
    encode_rankings,
    ranked_to_pairs,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HUGE = 10**400  # of which there is no float
HALF = "\ud83d"  # half of a surrogate pair
ASK = {"role": "user", "content": "up"}
ANSWER = {"role": "assistant", "content": "down"}
CHAT = {"messages": [ASK, ANSWER]}
PAIR = {"prompt": [ASK], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "up"}]}
RANKED = {"prompt": [ASK], "completions": [PAIR["chosen"], PAIR["rejected"]], "scores": [2, 1]}
LABELLED = {"prompt": [ASK], "completion": [ANSWER], "label": True}


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<unk>", "<eos>", "user", "assistant", "up", "down"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<eos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    made.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }} {% endfor %}"
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return made


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


BAD_ROWS = [
    (encode_chats, CHAT, None, r"^expected \{\"messages\": .*, got None\."),
    (encode_chats, CHAT, {"tools": []}, r"'messages': expected "),
    (encode_chats, CHAT, {**CHAT, "tools": "x"}, r"'tools': expected a list of tools' .* got 'x'"),
    (encode_chats, CHAT, {**CHAT, "tools": ["x"]}, r"'tools\[0\]': expected \{\"type\": "),
    (encode_chats, CHAT, {**CHAT, "tools": [{"function": 7}]}, r"'tools\[0\]': expected \{\"type"),
    (encode_chats, CHAT, {**CHAT, "tools": [{"name": HALF}]}, r"'tools\[0\]': expected whole cha"),
    (
        encode_chats,
        CHAT,
        {"messages": [ASK, {**ANSWER, "weight": HUGE}]},
        r"'messages\[1\]\.weight': expected 0, or a finite number that float32 can hold",
    ),
    (encode_preferences, PAIR, None, r"^expected a row with prompt, chosen, rejected, got None\."),
    *(
        (
            encode_preferences,
            PAIR,
            without(PAIR, name),
            rf"'{name}': expected a column of this name",
        )
        for name in PAIR
    ),
    (encode_preferences, PAIR, {**PAIR, "margin": HUGE}, r"'margin': expected a finite number"),
    (encode_preferences, PAIR, {**PAIR, "margin": "x"}, r"'margin': expected a finite .*got 'x'"),
    (encode_preferences, PAIR, {**PAIR, "tools": "x"}, r"'tools': expected a list of tools'"),
    (encode_rankings, RANKED, 7, r"^expected a row with prompt, completions, scores, got 7\."),
    *(
        (encode_rankings, RANKED, without(RANKED, name), rf"'{name}': expected a column of this")
        for name in RANKED
    ),
    (encode_rankings, RANKED, {**RANKED, "scores": [1, HUGE]}, r"'scores\[1\]': expected a fini"),
    (encode_rankings, RANKED, {**RANKED, "scores": 5}, r"'scores': expected a list of scores"),
    (encode_rankings, RANKED, {**RANKED, "completions": 5}, r"'completions': expected a list of"),
    (encode_labels, LABELLED, [], r"^expected a row with prompt, completion, label, got \[\]\."),
    *(
        (encode_labels, LABELLED, without(LABELLED, name), rf"'{name}': expected a column of this")
        for name in LABELLED
    ),
]


@pytest.mark.parametrize(("encode", "good", "bad", "error"), BAD_ROWS)
def test_it_is_an_error_in_its_place(tokenizer, encode, good, bad, error):
    before, refused, after = encode([good, bad, good], tokenizer)
    assert not isinstance(before, BadRowError)
    assert not isinstance(after, BadRowError)
    with pytest.raises(BadRowError, match=error):
        raise refused


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (None, r"^expected a row with prompt, got None\."),
        ({}, r"'prompt': expected a column of this name"),
        ({"prompt": ""}, r"'prompt': expected text that is not empty, got ''"),
        ({"prompt": HALF}, r"'prompt': expected whole characters"),
        ({"prompt": [ASK, ANSWER]}, r"'prompt\[1\]\.role': expected a prompt that ends where"),
    ],
)
def test_a_problem_without_a_prompt(tokenizer, row, error):
    with pytest.raises(BadRowError, match=error):
        encode_problem(row, tokenizer)


def test_pairs_of_no_ranking():
    with pytest.raises(BadRowError, match="'scores': expected a column of this name"):
        ranked_to_pairs(without(RANKED, "scores"))
    with pytest.raises(BadRowError, match=r"'scores\[0\]': expected a finite number"):
        ranked_to_pairs({**RANKED, "scores": [HUGE, 1]})


@pytest.mark.parametrize("value", [HUGE, -HUGE, float("inf"), True, "1", None])
def test_what_is_no_number(value):
    with pytest.raises(BadRowError, match="column 'a': expected a finite number, got "):
        number(value, "a")


@pytest.mark.parametrize("history", [5, {"a": 1}, "text"])
def test_a_history_that_is_no_list(history):
    with pytest.raises(BadRowError, match=r"'history': expected a list of \[user's text"):
        alpaca({"instruction": "up", "output": "down", "history": history})


CALL = {"name": "f", "arguments": r'{"x": "\ud83d"}'}
BAD_CHATS = [
    {"messages": [ASK, {**ANSWER, "content": HALF}]},  # written as \ud83d, which JSON allows
    {"messages": json.dumps([ASK, {**ANSWER, "content": HALF}])},
    {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": CALL}]}]},
    {**CHAT, "tools": json.dumps([{"name": "f", "description": HALF}])},
    {"messages": [ASK, {**ANSWER, "weight": HUGE}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file://[b"}]}]},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": "data:image/png;base64,é"}],
            }
        ]
    },
    {"messages": [ASK, {**ANSWER, "tool_calls": 5}, {"from": "function_call", "value": "{}"}]},
    {"messages": [ASK, {**ANSWER, "loss": "no"}]},
]


@pytest.mark.parametrize("bad", BAD_CHATS)
def test_a_run_that_skips_goes_on_after_it(tokenizer, tmp_path, bad):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (CHAT, bad, CHAT)))
    encode = partial(encode_chats, tokenizer=tokenizer)
    dataset, skipped = encode_rows(
        open_rows(path).map(openai_chat), encode, on_bad_row="skip", show_progress=False
    )
    assert len(dataset) == 2
    assert skipped.total == 1
    ((message,),) = skipped.examples.values()
    assert message.startswith(f"{path}, line 2")


@pytest.mark.parametrize("depth", [400, 900])
def test_json_that_is_nested_deeply_is_read_or_a_bad_row(tmp_path, depth):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"a": "\\ud83d\\ude00"}\n{"a": ' + "[" * depth + '"\\ud83d"' + "]" * depth + "}\n"
    )
    good, skipped = check_rows(open_rows(path), on_bad_row="skip")
    assert list(good) == [{"a": "😀"}]
    assert skipped.counts == {"not UTF-8": 1}


def test_a_weight_is_kept_as_it_is(tokenizer):
    chat = {"messages": [ASK, {**ANSWER, "weight": 2}]}
    assert encode_chat(chat, tokenizer)["token_weights"].tolist() == [0, 0, 0, 0, 2, 2]
