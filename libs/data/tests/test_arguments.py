"""Arguments of the wrong kind: one sentence at once, with what fits."""

from functools import partial
from itertools import islice

import pytest
from burnish_data import (
    BadRowError,
    ListRows,
    Loader,
    PromptLoader,
    encode_chat,
    encode_chats,
    encode_labels,
    encode_preference,
    encode_preferences,
    encode_problem,
    encode_ranked,
    encode_rows,
    mix,
    mix_streams,
    open_rows,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "up"}, {"role": "assistant", "content": "down"}]}
MANY = partial(encode_rows, show_progress=False)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<eos>", "user", "assistant", "up", "down"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    return open_rows(path, streaming=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: encode_chats(CHAT, t),
            "encode_chats must be given a list of rows, got one row; use encode_chat.",
        ),
        (
            lambda t: encode_chat([CHAT], t),
            "encode_chat must be given one row, got a list; use encode_chats.",
        ),
        (
            lambda t: encode_chats("chats.jsonl", t),
            "encode_chats must be given a list of rows, got a str; open files with open_rows.",
        ),
        (
            lambda t: encode_preferences({"prompt": []}, t),
            "encode_preferences must be given a list of rows, got one row; use encode_preference.",
        ),
        (
            lambda t: encode_preference([], t),
            "encode_preference must be given one row, got a list; use encode_preferences.",
        ),
        (
            lambda t: encode_ranked((), t),
            "encode_ranked must be given one row, got a tuple; use encode_rankings.",
        ),
        (
            lambda t: encode_labels({}, t),
            "encode_labels must be given a list of rows, got one row; use encode_labelled.",
        ),
        (
            lambda t: encode_problem([], t),
            "encode_problem must be given one row, got a list; use a loop over the rows.",
        ),
        (
            lambda t: MANY(ListRows([CHAT, CHAT]), partial(encode_chat, tokenizer=t)),
            "encode_chat must be given one row, got a list; use encode_chats.",
        ),
        (
            lambda t: MANY([CHAT], lambda rows: encode_chat(rows[0], t)),
            "encode must give a list with one result for each row, got one result; pass a "
            "function of many rows, such as encode_chats.",
        ),
        (
            lambda t: MANY([CHAT], t.chat_template),
            "encode must be a function of a list of rows, got a str; pass "
            "functools.partial(encode_chats, tokenizer=tokenizer).",
        ),
        (
            lambda _: encode_chats([CHAT], "models/mine"),
            "tokenizer must be a loaded tokenizer, got 'models/mine'; load it first: "
            "transformers.AutoTokenizer.from_pretrained('models/mine').",
        ),
        (
            lambda _: encode_preferences([], 3),
            "tokenizer must be one of transformers, got a int; load it with "
            "transformers.AutoTokenizer.from_pretrained.",
        ),
        (
            lambda _: mix([[1]], {"a": 1}, num_rows=1, seed=0),
            "sources must be a mapping by name, got a list; pass "
            'mix({"chat": rows, "math": others}, {"chat": 2, "math": 1}, ...).',
        ),
        (
            lambda _: mix({"a": [1]}, [1], num_rows=1, seed=0),
            "weights must be a mapping by name, got a list; pass "
            'mix({"chat": rows, "math": others}, {"chat": 2, "math": 1}, ...).',
        ),
        (
            lambda _: mix_streams({"a": [1]}, {"a": 1}, num_rows=1),
            "mix_streams must be given streams, got a list as 'a'; use mix, or open all of them "
            "with streaming=True.",
        ),
    ],
)
def test_the_wrong_kind(tokenizer, call, message):
    with pytest.raises(ValueError) as caught:
        call(tokenizer)
    assert str(caught.value) == message
    assert not isinstance(caught.value, BadRowError)


TAKE = (
    "must be given rows that have a number, got a stream; open them without streaming=True, or "
    "take as many as are wanted: ListRows(islice(stream, 100_000))."
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: MANY(s, print), f"encode_rows {TAKE}"),
        (lambda s: Loader(s, 2), f"A loader {TAKE}"),
        (lambda s: PromptLoader(s, 2, seed=0), f"A loader {TAKE}"),
        (
            lambda s: mix({"a": [1], "b": s}, {"a": 1, "b": 1}, num_rows=1, seed=0),
            "mix must be given rows that have a number, got a RowStream as 'b'; use mix_streams, "
            "or open all of them without streaming=True.",
        ),
    ],
)
def test_a_stream_has_no_numbers(stream, call, message):
    with pytest.raises(ValueError) as caught:
        call(stream)
    assert str(caught.value) == message
    # What the message says.
    assert [row["n"] for row in ListRows(islice(stream, 2))] == [1, 2]


def test_a_list_is_rows(tokenizer):
    dataset, _ = MANY([CHAT, CHAT], partial(encode_chats, tokenizer=tokenizer))
    assert dataset["token_ids"][:] == [[2, 4, 1, 3, 5, 1]] * 2


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        (
            {"question": "1 + 1?", "answer": "2"},
            "map the rows first: rows.map(prompt_response('question', 'answer')), "
            "got ['question', 'answer'].",
        ),
        (
            {"conversations": []},
            "map the rows first: rows.map(sharegpt), got ['conversations'].",
        ),
        (
            {"prompt": [], "chosen": [], "rejected": []},
            "for rows of prompt and chosen and rejected use encode_preferences, "
            "got ['prompt', 'chosen', 'rejected'].",
        ),
        (
            {"chosen": "a", "rejected": "b"},
            "map the rows first: rows.map(preference) and encode_preferences, "
            "got ['chosen', 'rejected'].",
        ),
        (
            {"lyrics": "la"},
            "make chats of the rows first: rows.map(form), with a function of your own, "
            "got ['lyrics'].",
        ),
    ],
)
def test_rows_that_are_no_chats_say_what_fits(tokenizer, row, fits):
    (error,) = encode_chats([row], tokenizer)
    assert str(error) == f"column 'messages': expected a column of a chat; {fits}"
    assert error.reason == "no column 'messages'"
    with pytest.raises(BadRowError, match="rows, row 1, column 'messages'"):
        MANY([row], partial(encode_chats, tokenizer=tokenizer))
