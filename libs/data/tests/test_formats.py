import copy
import json
import pickle
from typing import Any

import pytest
from burnish_data import BadRowError
from burnish_data.formats import (
    alpaca,
    guess_format,
    labelled,
    openai_chat,
    preference,
    preference_columns,
    prompt_response,
    ranked,
    sharegpt,
)

SCHEMA = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(*calls: tuple[str, dict[str, Any]], content: str = "", **more: Any) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


HI = [said("user", "Hi"), said("assistant", "Ho")]


def test_openai_chats_stay_as_they_are():
    record = {"messages": HI, "id": 7, "tools": None}
    before = copy.deepcopy(record)
    assert openai_chat(record) == {"messages": HI}
    assert record == before


def test_openai_messages_and_tools_may_be_json_text():
    record = {"messages": json.dumps(HI), "tools": json.dumps([TOOL])}
    assert openai_chat(record) == {"messages": HI, "tools": [TOOL]}
    assert openai_chat({"messages": HI, "tools": " "}) == {"messages": HI}
    assert openai_chat({"messages": HI, "tools": []}) == {"messages": HI}
    assert openai_chat({"messages": HI, "tools": [json.dumps(SCHEMA)]})["tools"] == [TOOL]


def test_openai_tool_calls_keep_their_ids():
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"x": 1}'}}
    messages = [
        said("user", "Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        said("assistant", "Sunny."),
    ]
    assert openai_chat({"messages": messages, "tools": [TOOL]})["messages"] == [
        said("user", "Weather?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"x": 1}},
                    "id": "a",
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a"},
        said("assistant", "Sunny."),
    ]


def test_functions_become_tools():
    messages = [
        said("user", "Weather?"),
        {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "sunny"},
        said("assistant", "Sunny."),
    ]
    assert openai_chat({"messages": messages, "functions": [SCHEMA]}) == {
        "messages": [
            said("user", "Weather?"),
            calling(("weather", {})),
            {"role": "tool", "name": "weather", "content": "sunny"},
            said("assistant", "Sunny."),
        ],
        "tools": [TOOL],
    }


def test_parts_with_values_and_loss_weights():
    messages = [
        {"role": "system", "content": [{"type": "text", "value": "Be brief."}], "loss_weight": 0.0},
        {"role": "user", "content": [{"type": "text", "value": "Weather?"}], "loss_weight": 0.0},
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "value": "I must ask."},
                {"type": "text", "value": "Wait."},
                {"type": "tool_call", "value": '{"name": "weather", "arguments": {"x": 1}}'},
            ],
            "loss_weight": 0.5,
        },
        {"role": "tool", "content": [{"type": "text", "value": "sunny"}]},
        {"role": "assistant", "content": "Sunny.", "loss": False},
    ]
    assert openai_chat({"messages": messages})["messages"] == [
        said("system", "Be brief.", weight=0.0),
        said("user", "Weather?", weight=0.0),
        calling(
            ("weather", {"x": 1}), content="Wait.", reasoning_content="I must ask.", weight=0.5
        ),
        said("tool", "sunny"),
        said("assistant", "Sunny.", weight=0.0),
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_its_names(name):
    messages = [said("user", "Hi"), {"role": "assistant", "content": "Ho", name: "So."}]
    made = openai_chat({"messages": messages})["messages"][1]
    assert made == said("assistant", "Ho", reasoning_content="So.")


def test_images_take_the_places_of_their_marks():
    messages = [
        said("user", "<image>\nAnd <image>?"),
        said("assistant", "An <image> too."),
        said("user", "Then<image>"),
        said("assistant", "Yes."),
    ]
    made = openai_chat({"messages": messages, "images": ["a.png", b"png", "c.png"]})["messages"]
    assert made == [
        said(
            "user",
            [
                {"type": "image", "image": "a.png"},
                {"type": "text", "text": "\nAnd "},
                {"type": "image", "image": b"png"},
                {"type": "text", "text": "?"},
            ],
        ),
        said("assistant", "An <image> too."),
        said("user", [{"type": "text", "text": "Then"}, {"type": "image", "image": "c.png"}]),
        said("assistant", "Yes."),
    ]
    # Without images the mark is text.
    assert openai_chat({"messages": messages})["messages"] == messages


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "url": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "image_url", "value": "a.png"},
    ],
)
def test_image_parts_in_their_forms(part):
    record = {"messages": [said("user", [part, {"type": "text", "text": "?"}]), HI[1]]}
    assert openai_chat(record)["messages"][0]["content"] == [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "?"},
    ]


def test_sharegpt():
    record = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Weather in Paris and Rome?"},
            {"from": "gpt", "value": "I ask.", "weight": 0},
            {
                "from": "function_call",
                "value": '{"name": "weather", "arguments": {"city": "Paris"}}',
            },
            {"from": "function_call", "value": '{"name": "weather", "arguments": "{}"}'},
            {"from": "observation", "value": "sunny"},
            {"from": "tool", "value": "rain"},
            {"from": "gpt", "value": "Sunny, rain."},
            {"from": "user", "value": "Thanks"},
            {"from": "chatgpt", "value": "Bye."},
        ],
        "tools": json.dumps([SCHEMA]),
    }
    assert sharegpt(record) == {
        "messages": [
            said("system", "Be brief."),
            said("user", "Weather in Paris and Rome?"),
            calling(("weather", {"city": "Paris"}), ("weather", {}), content="I ask.", weight=0.0),
            said("tool", "sunny"),
            said("tool", "rain"),
            said("assistant", "Sunny, rain."),
            said("user", "Thanks"),
            said("assistant", "Bye."),
        ],
        "tools": [TOOL],
    }


@pytest.mark.parametrize("name", ["gpt", "assistant", "model", "bing", "chatgpt", "bard"])
def test_sharegpts_names_of_the_assistant(name):
    turns = [{"from": "human", "value": "Hi"}, {"from": name, "value": "Ho"}]
    for column in ("conversations", "conversation", "messages"):
        assert sharegpt({column: turns}) == {"messages": HI}


def test_sharegpts_calls_as_one_list():
    calls = '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
    turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": calls}]
    assert sharegpt({"conversations": turns})["messages"][1] == calling(("a", {}), ("b", {}))


def test_sharegpts_system_column():
    turns = [{"from": "system", "value": ""}, {"from": "human", "value": "Hi"}]
    turns.append({"from": "gpt", "value": "Ho"})
    for system, made in (("Be brief.", [said("system", "Be brief."), *HI]), ("", HI), (None, HI)):
        assert sharegpt({"conversations": turns, "system": system}) == {"messages": made}
    turns[0]["value"] = "Be long."
    with pytest.raises(BadRowError, match=r"'conversations\[0\]': expected a system message once"):
        sharegpt({"conversations": turns, "system": "Be brief."})
    with pytest.raises(BadRowError, match=r"'system': expected text, got 7"):
        sharegpt({"conversations": turns, "system": 7})


def test_alpaca():
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert alpaca(record) == {"messages": [said("user", "Add.\n1 and 2"), said("assistant", "3")]}
    record |= {"input": "", "system": "Be brief.", "history": [["Hi", "Ho"]]}
    assert alpaca(record) == {
        "messages": [said("system", "Be brief."), *HI, said("user", "Add."), said("assistant", "3")]
    }
    assert (
        alpaca({"instruction": "", "input": "1+2", "output": "3"})["messages"][0]["content"]
        == "1+2"
    )
    with pytest.raises(
        BadRowError, match=r"'instruction': expected text that is not empty, got ''"
    ):
        alpaca({"instruction": "", "output": "3"})
    with pytest.raises(BadRowError, match=r"'instruction': expected text that is not empty, got 7"):
        alpaca({"instruction": 7, "output": "3"})


def test_prompt_and_response_are_text_or_messages():
    read = prompt_response("question", "answer", system="Be brief.")
    system = said("system", "Be brief.")
    assert pickle.loads(pickle.dumps(read))({"question": "Hi", "answer": "Ho"}) == {
        "messages": [system, *HI]
    }
    assert read({"question": HI[:1], "answer": HI[1:]}) == {"messages": [system, *HI]}
    assert read({"question": "Hi", "answer": HI[1]}) == {"messages": [system, *HI]}
    assert read({"question": "Hi", "answer": "Ho", "system": "Be long."}) == {
        "messages": [said("system", "Be long."), *HI]
    }
    assert prompt_response()({"prompt": "Hi", "response": "Ho", "tools": [SCHEMA]}) == {
        "messages": HI,
        "tools": [TOOL],
    }
    # An answer of several messages.
    turns = [HI[1], said("user", "And?"), said("assistant", "Nothing.")]
    assert prompt_response()({"prompt": "Hi", "response": turns})["messages"] == [HI[0], *turns]


def test_a_wrong_answer_is_numbered_in_its_own_column():
    turns = [HI[1], said("assistant", "Again")]
    with pytest.raises(
        BadRowError, match=r"column 'response\[1\]\.role': expected 'user' or 'tool'"
    ):
        prompt_response()({"prompt": "Hi", "response": turns})
    with pytest.raises(BadRowError, match=r"column 'response\[0\]\.content': expected text"):
        prompt_response()(
            {"prompt": [said("system", "x"), HI[0]], "response": said("assistant", "")}
        )
    with pytest.raises(
        BadRowError, match=r"column 'prompt\[1\]': expected a prompt that ends where"
    ):
        prompt_response()({"prompt": HI, "response": "x"})


CHOSEN, REJECTED = [said("assistant", "Yes")], [said("assistant", "No")]
PAIR = {"prompt": HI[:1], "chosen": CHOSEN, "rejected": REJECTED}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"prompt": HI[:1], "chosen": CHOSEN, "rejected": REJECTED},
        {"prompt": "Hi", "chosen": CHOSEN[0], "rejected": REJECTED[0]},
        {"prompt": "Hi", "chosen": [HI[0], *CHOSEN], "rejected": [HI[0], *REJECTED]},
        {"chosen": [HI[0], *CHOSEN], "rejected": [HI[0], *REJECTED]},
        {"chosen_messages": [HI[0], *CHOSEN], "rejected_messages": [HI[0], *REJECTED]},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Yes"},
            "rejected": {"from": "gpt", "value": "No"},
        },
    ],
)
def test_preferences_in_their_forms(record):
    before = copy.deepcopy(record)
    assert preference(record) == PAIR
    assert record == before


def test_a_preference_with_system_tools_and_margin():
    system = said("system", "Be brief.")
    record = {"prompt": "Hi", "chosen": "Yes", "rejected": "No", "system": "Be brief."}
    record |= {"tools": [SCHEMA], "margin": 2}
    expected = {**PAIR, "prompt": [system, HI[0]], "tools": [TOOL], "margin": 2.0}
    assert preference(record) == expected
    # The conversations may repeat the prompt with or without the system message.
    record |= {"chosen": [HI[0], *CHOSEN], "rejected": [system, HI[0], *REJECTED]}
    assert preference(record) == expected


@pytest.mark.parametrize(
    ("scores", "margin"),
    [
        ({"score_chosen": 8.5, "score_rejected": 6}, 2.5),
        ({"chosen_score": 1, "rejected_score": 3}, -2.0),
        ({"margin": 0, "score_chosen": 8.5, "score_rejected": 6}, 0.0),
    ],
)
def test_the_margin_is_given_or_the_difference_of_scores(scores, margin):
    assert preference({"prompt": "Hi", "chosen": "Yes", "rejected": "No", **scores}) == {
        **PAIR,
        "margin": margin,
    }


def test_an_implicit_prompt_of_several_turns():
    turns = [*HI, said("user", "And?")]
    record = {"chosen": [*turns, *CHOSEN], "rejected": [*turns, *REJECTED]}
    assert preference(record) == {"prompt": turns, "chosen": CHOSEN, "rejected": REJECTED}


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (
            {"chosen": HI, "rejected": HI},
            r"'rejected': expected two conversations that begin alike",
        ),
        (
            {"chosen": HI, "rejected": [said("user", "Hey"), HI[1]]},
            r"'rejected': expected two conversations that begin alike",
        ),
        (
            {"chosen": [*HI, said("user", "A")], "rejected": [*HI, said("user", "B")]},
            r"'chosen\[2\]\.role': expected the assistant's answer here, got 'user'",
        ),
        (
            {"prompt": "Hey", "chosen": HI, "rejected": HI},
            r"'chosen\[0\]': expected an assistant's answer, or the prompt followed by one, got \{",
        ),
        (
            {"prompt": "Hi", "chosen": HI[:1], "rejected": HI},
            r"'chosen\[0\]': expected an assistant's answer, or the prompt followed by one",
        ),
        ({"prompt": "Hi", "chosen": "a", "rejected": []}, r"'rejected': expected text or messages"),
        ({"prompt": "Hi", "chosen": "a", "rejected": 7}, r"'rejected': expected text or messages"),
        ({"prompt": "Hi", "chosen": "a"}, r"'rejected': expected a column of this name, got"),
        (
            {"prompt": "Hi", "chosen": "a", "rejected": "b", "margin": "big"},
            r"'margin': expected a finite number, got 'big'",
        ),
    ],
)
def test_preferences_that_are_none(record, error):
    with pytest.raises(BadRowError, match=error):
        preference(record)


def test_ranked_completions():
    record = {"prompt": "Hi", "completions": ["Yes", REJECTED, REJECTED[0]], "scores": [1, 0.5, -2]}
    made = {
        "prompt": HI[:1],
        "completions": [CHOSEN, REJECTED, REJECTED],
        "scores": [1.0, 0.5, -2.0],
    }
    assert ranked(record) == made
    record["responses"] = record.pop("completions")
    assert ranked(record) == made


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"completions": ["a"], "scores": [1]}, r"'completions': expected a list of at least two"),
        (
            {"completions": "ab", "scores": [1, 2]},
            r"'completions': expected a list of at least two",
        ),
        ({"completions": ["a", "b"], "scores": [1]}, r"'scores': expected a list of 2 scores, got"),
        (
            {"completions": ["a", "b"], "scores": [1, float("nan")]},
            r"'scores\[1\]': expected a finite number, got nan",
        ),
        (
            {"completions": ["a", ""], "scores": [1, 2]},
            r"'completions\[1\]': expected text that is",
        ),
        ({"completions": ["a", "b"]}, r"'scores': expected a column of this name"),
    ],
)
def test_ranked_completions_that_are_none(columns, error):
    with pytest.raises(BadRowError, match=error):
        ranked({"prompt": "Hi", **columns})


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "completion": "Ho", "label": True},
        {"prompt": HI[:1], "completion": HI[1:], "label": 1},
        {"messages": HI, "label": True},
        {"conversations": [{"from": "human", "value": "Hi"}, HI[1]], "kto_tag": True},
    ],
)
def test_labelled_completions_in_their_forms(record):
    assert labelled(record) == {"prompt": HI[:1], "completion": HI[1:], "label": True}
    flipped = {key: False if key in ("label", "kto_tag") else item for key, item in record.items()}
    assert labelled(flipped)["label"] is False


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"prompt": "Hi", "completion": "Ho"}, r"'label': expected a column of this name"),
        ({"prompt": "Hi", "label": True}, r"'completion': expected a column of this name"),
        ({"messages": HI[:1], "label": True}, r"'messages': expected an assistant's message last"),
        ({"messages": HI, "label": None}, r"'label': expected true, false, 1 or 0, got None"),
        ({"messages": HI, "label": 2}, r"'label': expected true, false, 1 or 0, got 2"),
    ],
)
def test_labelled_completions_that_are_none(record, error):
    with pytest.raises(BadRowError, match=error):
        labelled(record)


@pytest.mark.parametrize(
    ("record", "made"),
    [
        ({"messages": HI, "id": 1}, {"messages": HI}),
        ({"conversations": [{"from": "human", "value": "Hi"}, HI[1]]}, {"messages": HI}),
        ({"instruction": "Hi", "input": "", "output": "Ho"}, {"messages": HI}),
        ({"prompt": "Hi", "response": "Ho"}, {"messages": HI}),
        ({"prompt": "Hi", "completion": "Ho"}, {"messages": HI}),
        ({"question": "Hi", "answer": "Ho", "id": 1}, {"messages": HI}),
        ({"problem": "Hi", "solution": "Ho", "answer": "7"}, {"messages": HI}),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "No", "messages": HI}, PAIR),
        (
            {"prompt": "Hi", "completion": "Ho", "label": 0},
            {"prompt": HI[:1], "completion": HI[1:], "label": False},
        ),
        (
            {"prompt": "Hi", "completions": ["Yes", "No"], "scores": [2, 1]},
            {"prompt": HI[:1], "completions": [CHOSEN, REJECTED], "scores": [2.0, 1.0]},
        ),
    ],
)
def test_the_form_is_guessed_from_the_columns(record, made):
    assert guess_format(record)(record) == made


def test_columns_of_no_known_form():
    with pytest.raises(
        ValueError,
        match=r"The columns must be of a known form, which are chosen \+ rejected, .*messages, .*"
        r"prompt \+ response, .*, got \['body', 'title'\]; name the form",
    ):
        guess_format(["title", "body"])


@pytest.mark.parametrize("name", ["loss", "train"])
@pytest.mark.parametrize(
    ("flag", "weight"), [(False, 0.0), (0, 0.0), (0.0, 0.0), (True, 1.0), (1, 1.0), (1.0, 1.0)]
)
def test_a_flag_of_a_message_is_its_weight(name, flag, weight):
    row = openai_chat({"messages": [said("user", "x"), said("assistant", "y", **{name: flag})]})
    assert row["messages"][1] == said("assistant", "y", weight=weight)


@pytest.mark.parametrize("name", ["loss", "train"])
@pytest.mark.parametrize("flag", ["no", "false", 2, 0.5, -1, [], {}, float("nan")])
def test_a_flag_that_is_none_is_refused(name, flag):
    record = {"messages": [said("user", "x"), said("assistant", "y", **{name: flag})]}
    error = rf"'messages\[1\]\.{name}': expected true, false, 1 or 0, got "
    with pytest.raises(BadRowError, match=error):
        openai_chat(record)


def test_flags_that_contradict_each_other_are_refused():
    record = {"messages": [said("user", "x"), said("assistant", "y", loss=1, train=False)]}
    with pytest.raises(BadRowError, match=r"'messages\[1\]\.train': expected what 'loss' says"):
        openai_chat(record)


def test_a_weight_goes_before_a_flag():
    said_both = said("assistant", "y", weight=0.5, loss=True)
    row = openai_chat({"messages": [said("user", "x"), said_both]})
    assert row["messages"][1] == said("assistant", "y", weight=0.5)


def test_choices_are_not_an_answers_text():
    with pytest.raises(ValueError, match=r"one of options; read multiple choice by sources\.mmlu"):
        guess_format(["question", "options", "answer"])
    # Where the chat is there, other columns do not matter.
    assert guess_format(["messages", "choices"]) is openai_chat


def test_preferences_with_columns_of_other_names():
    form = preference_columns(prompt="q", chosen="good", rejected="bad")
    row = form({"q": "Hi", "good": "Ho", "bad": "Hm", "margin": 2})
    assert row == {
        "prompt": [said("user", "Hi")],
        "chosen": [said("assistant", "Ho")],
        "rejected": [said("assistant", "Hm")],
        "margin": 2.0,
    }
    with pytest.raises(BadRowError, match=r"^column 'bad': expected a column of this name"):
        form({"q": "Hi", "good": "Ho"})
    with pytest.raises(BadRowError, match=r"^column 'q': expected a column of this name"):
        form({"good": "Ho", "bad": "Hm"})
    whole = preference_columns(prompt=None, chosen="good", rejected="bad")
    sides = {"good": HI, "bad": [HI[0], said("assistant", "Hm")]}
    assert whole(sides) == preference({"chosen": sides["good"], "rejected": sides["bad"]})


def test_roles_in_any_case():
    capital = [said("User", "Hi"), said("ASSISTANT", "Ho")]
    assert openai_chat({"messages": capital}) == {"messages": HI}
    turns = [{"from": "Human", "value": "Hi"}, {"from": "GPT", "value": "Ho"}]
    assert sharegpt({"conversations": turns}) == {"messages": HI}
    answer = {"prompt": "Hi", "chosen": [capital[1]], "rejected": "Hm"}
    assert preference(answer)["chosen"] == [said("assistant", "Ho")]
