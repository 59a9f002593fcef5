"""Preferences, rankings, labels and problems as token ids."""

import numpy as np
import pytest
from burnish_data import BadRowError
from burnish_data.encode import LeftOutError, encode_chat
from burnish_data.tasks import (
    encode_labelled,
    encode_labels,
    encode_preference,
    encode_preferences,
    encode_problem,
    encode_ranked,
    encode_rankings,
    ranked_to_pairs,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<unk>", "<bos>", "<eos>", "<turn>"]
WORDS = ["system", "user", "assistant", "tool", "be", "brief", "what", "is", "up", "down"]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}"
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL_TOKENS)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )
    made.chat_template = TEMPLATE
    return made


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def digits(encoded):
    return "".join("01"[int(trained)] for trained in encoded["token_mask"])


PROMPT = [user("what"), assistant("is"), user("up")]
PROMPT_IDS = [3, 5, 10, 2, 3, 6, 11, 2, 3, 5, 12, 2]
PAIR = {"prompt": PROMPT, "chosen": [assistant("down")], "rejected": [assistant("be brief")]}


def test_a_preference_is_trained_on_its_completions_alone(tokenizer):
    encoded = encode_preference(PAIR, tokenizer)
    assert set(encoded) == {"chosen", "rejected"}
    assert encoded["chosen"]["token_ids"].tolist() == [*PROMPT_IDS, 3, 6, 13, 2]
    assert encoded["rejected"]["token_ids"].tolist() == [*PROMPT_IDS, 3, 6, 8, 9, 2]
    # The prompt's own turn of the assistant is not trained.
    assert digits(encoded["chosen"]) == "0" * 14 + "11"
    assert digits(encoded["rejected"]) == "0" * 14 + "111"
    assert set(encoded["chosen"]) == {"token_ids", "token_mask"}


def test_each_side_is_the_whole_conversations_render(tokenizer):
    encoded = encode_preference(PAIR, tokenizer)
    for side in ("chosen", "rejected"):
        whole = encode_chat({"messages": [*PROMPT, *PAIR[side]]}, tokenizer)
        assert encoded[side]["token_ids"].tolist() == whole["token_ids"].tolist()


def test_a_completion_of_several_turns(tokenizer):
    longer = [assistant("is"), user("be"), assistant("down")]
    encoded = encode_preference({**PAIR, "chosen": longer}, tokenizer)
    assert encoded["chosen"]["token_ids"].tolist() == [
        *PROMPT_IDS,
        *(3, 6, 11, 2, 3, 5, 8, 2, 3, 6, 13, 2),
    ]
    assert digits(encoded["chosen"]) == "0" * 14 + "11" + "0" * 6 + "0011"[2:]


def test_a_completion_that_begins_with_a_user(tokenizer):
    encoded = encode_preference({**PAIR, "chosen": [user("is"), assistant("up")]}, tokenizer)
    assert digits(encoded["chosen"]) == "0" * 18 + "11"


def test_margin_tools_and_weights(tokenizer):
    row = {
        **PAIR,
        "margin": 2,
        "tools": [{"name": "up"}],
        "chosen": [{**assistant("down"), "weight": 0.5}],
    }
    encoded = encode_preference(row, tokenizer)
    assert encoded["margin"] == 2.0
    assert encoded["chosen"]["token_ids"].tolist() == [12, *PROMPT_IDS, 3, 6, 13, 2]
    assert encoded["chosen"]["token_weights"].tolist() == [0.0] * 15 + [0.5, 0.5]


def test_two_sides_that_are_the_same(tokenizer):
    same = {**PAIR, "rejected": PAIR["chosen"]}
    with pytest.raises(BadRowError, match="two completions that differ") as caught:
        encode_preference(same, tokenizer)
    assert caught.value.reason == "chosen and rejected are the same"
    # Two texts may be the same to a template, or to a tokenizer.
    spaced = {**PAIR, "rejected": [assistant("  down ")]}
    with pytest.raises(BadRowError, match="two completions that differ"):
        encode_preference(spaced, tokenizer)


@pytest.mark.parametrize(
    ("change", "column", "message"),
    [
        ({"chosen": [assistant("down"), assistant("up")]}, "chosen[1].role", "after 'assistant'"),
        ({"rejected": [assistant(" ")]}, "rejected[0].content", "text that is not empty"),
        ({"rejected": [{"role": "wizard", "content": "up"}]}, "rejected[0].role", "one of"),
        ({"chosen": []}, "chosen", "at least one message"),
        ({"chosen": "down"}, "chosen", "at least one message"),
        ({"prompt": [assistant("up")]}, "prompt[0].role", "first, got"),
        ({"prompt": [user("up"), user("")]}, "prompt[1].content", "text that is not empty"),
        ({"prompt": PROMPT[:2]}, "prompt[1].role", "ends where the assistant is to speak"),
    ],
)
def test_errors_name_the_rows_own_column(change, column, message, tokenizer):
    with pytest.raises(BadRowError, match=message) as caught:
        encode_preference({**PAIR, **change}, tokenizer)
    assert caught.value.column == column


def test_bad_preferences_stand_in_their_places(tokenizer):
    rows = [
        PAIR,
        {**PAIR, "rejected": PAIR["chosen"]},
        {**PAIR, "rejected": [assistant("up is what down")]},
        PAIR,
    ]
    encoded = encode_preferences(rows, tokenizer, max_length=18, too_long="skip")
    assert [type(one) for one in encoded] == [dict, BadRowError, LeftOutError, dict]
    assert encoded[2].reason == "too long"
    for one in (encoded[0], encoded[3]):
        assert one["chosen"]["token_ids"].tolist() == [*PROMPT_IDS, 3, 6, 13, 2]
        assert one["rejected"]["token_ids"].tolist() == [*PROMPT_IDS, 3, 6, 8, 9, 2]


def test_a_preference_whose_one_side_is_cut(tokenizer):
    encoded = encode_preference(PAIR, tokenizer, max_length=16, too_long="truncate")
    assert "truncated" not in encoded["chosen"]
    assert encoded["rejected"]["truncated"] is True
    assert digits(encoded["rejected"]) == "0" * 14 + "11"
    with pytest.raises(BadRowError, match="at least one trained token"):
        encode_preference(PAIR, tokenizer, max_length=14, too_long="truncate")


def test_two_sides_that_differ_only_behind_the_cut(tokenizer):
    row = {**PAIR, "chosen": [assistant("be down")]}
    with pytest.raises(BadRowError, match="two completions that differ"):
        encode_preference(row, tokenizer, max_length=15, too_long="truncate")


RANKED = {
    "prompt": [user("what")],
    "completions": [[assistant("up")], [assistant("down")], [assistant("is")], [assistant("be")]],
    "scores": [1, 3.5, 1, 0],
}


def test_a_ranking(tokenizer):
    encoded = encode_ranked(RANKED, tokenizer)
    assert encoded["scores"] == [1.0, 3.5, 1.0, 0.0]
    assert [one["token_ids"].tolist() for one in encoded["completions"]] == [
        [3, 5, 10, 2, 3, 6, word, 2] for word in (12, 13, 11, 8)
    ]
    assert {digits(one) for one in encoded["completions"]} == {"00000011"}


def said(pairs):
    return [(p["chosen"][0]["content"], p["rejected"][0]["content"], p["margin"]) for p in pairs]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("best_worst", [("down", "be", 3.5)]),
        # up and is are as good: no pair
        ("adjacent", [("down", "up", 2.5), ("is", "be", 1.0)]),
        (
            "all",
            [
                ("down", "up", 2.5),
                ("down", "is", 2.5),
                ("down", "be", 3.5),
                ("up", "be", 1.0),
                ("is", "be", 1.0),
            ],
        ),
    ],
)
def test_pairs_of_a_ranking(pairs, expected):
    made = ranked_to_pairs({**RANKED, "tools": [{"name": "up"}]}, pairs)
    assert said(made) == expected
    assert all(
        pair["prompt"] == [user("what")] and pair["tools"] == [{"name": "up"}] for pair in made
    )


def test_equal_scores_give_no_pair():
    row = {**RANKED, "scores": [2, 2, 2, 2]}
    assert [ranked_to_pairs(row, pairs) for pairs in ("best_worst", "adjacent", "all")] == [
        [],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("scores", "column"),
    [([1, 2], "scores"), ([1, 2, float("nan"), 0], "scores[2]"), ([1, "2", 3, 4], "scores[1]")],
)
def test_scores_that_are_none(scores, column, tokenizer):
    row = {**RANKED, "scores": scores}
    with pytest.raises(BadRowError) as caught:
        ranked_to_pairs(row)
    assert caught.value.column == column
    bad, good = encode_rankings([row, RANKED], tokenizer)
    assert bad.column == column
    assert len(good["completions"]) == 4


def test_another_way_of_pairing():
    with pytest.raises(ValueError, match='"best_worst", "adjacent" or "all", got \'random\''):
        ranked_to_pairs(RANKED, "random")


def test_a_bad_completion_of_a_ranking(tokenizer):
    row = {**RANKED, "completions": [*RANKED["completions"][:3], [assistant("")]]}
    with pytest.raises(BadRowError) as caught:
        encode_ranked(row, tokenizer)
    assert caught.value.column == "completions[3][0].content"


def test_labels(tokenizer):
    row = {"prompt": [user("what")], "completion": [assistant("up")], "label": True}
    encoded = encode_labelled(row, tokenizer)
    assert encoded["label"] is True
    assert encoded["completion"]["token_ids"].tolist() == [3, 5, 10, 2, 3, 6, 12, 2]
    assert digits(encoded["completion"]) == "00000011"
    bad, good = encode_labels([{**row, "label": 1}, {**row, "label": False}], tokenizer)
    assert bad.column == "label"
    assert good["label"] is False


def test_a_problem(tokenizer):
    row = {"prompt": PROMPT, "answer": "1", "task": "t", "level": 1, "id": "t-1"}
    encoded = encode_problem(row, tokenizer)
    assert encoded["token_ids"].tolist() == [*PROMPT_IDS, 3, 6]
    assert encoded["token_ids"].dtype == np.int32
    text = {**row, "prompt": "what is"}
    assert encode_problem(text, tokenizer)["token_ids"].tolist() == [10, 11]
    assert len(encode_problem(row, tokenizer, max_length=14)["token_ids"]) == 14
    with pytest.raises(BadRowError, match="at most 13 tokens, got 14") as caught:
        encode_problem(row, tokenizer, max_length=13)
    assert type(caught.value) is BadRowError
    assert caught.value.column == "prompt"
    with pytest.raises(LeftOutError):
        encode_problem(row, tokenizer, max_length=13, too_long="skip")
    with pytest.raises(ValueError, match="a prompt, which is not cut, got 'truncate'"):
        encode_problem(row, tokenizer, too_long="truncate")


def test_rows_are_left_as_they_are(tokenizer):
    row = {"prompt": [user("what"), assistant("is"), user("up")], "chosen": [assistant("down")]}
    row["rejected"] = [assistant("be")]
    encode_preference(row, tokenizer)
    assert row == {
        "prompt": [user("what"), assistant("is"), user("up")],
        "chosen": [assistant("down")],
        "rejected": [assistant("be")],
    }
