"""Each source on a fixture with the columns and the layout of its data set on the hub."""

import importlib
import json
import pickle
from pathlib import Path

import pyarrow
import pytest
from burnish_data import BadRowError, check_rows, sources, validate_messages
from burnish_data.sources import (
    aime24,
    aime25,
    dapo_math,
    deepscaler,
    helpsteer3,
    math500,
    math_hendrycks,
    mmlu,
    mmlu_pro,
    oasst,
    openai_chats,
    openmathinstruct2,
    openmathinstruct2_problems,
    preferences,
    prompt_responses,
    squad,
    tulu3_preference,
    tulu3_sft,
    with_answer,
)
from pyarrow import parquet

FIXTURES = Path(__file__).parent / "fixtures"


def said(messages):
    return [(message["role"], message["content"]) for message in messages]


def answers(rows):
    return [row["answer"] for row in rows]


# Problems


def test_math_has_the_last_boxed_answer_of_each_solution():
    rows = math_hendrycks(FIXTURES / "math_hendrycks", subjects=["algebra", "geometry"])
    assert answers(rows) == ["4", "3", r"\sqrt{2}"]
    assert [row["level"] for row in rows] == [1, 3, 0]
    assert said(rows[0]["prompt"]) == [
        ("system", "Reason step by step, and put the final answer within \\boxed{}."),
        ("user", "Find $x$ if $2x + 3 = 11$."),
    ]
    assert {row["task"] for row in rows} == {"math"}


def test_math_is_read_whole_from_one_file_and_by_subject_from_folders():
    file = FIXTURES / "math_hendrycks" / "number_theory" / "train.jsonl"
    assert answers(math_hendrycks(file, system=None)) == [r"\{0, 1, 4, 9\}"]
    rows = math_hendrycks(FIXTURES / "math_hendrycks", subjects=["number_theory", "algebra"])
    assert answers(rows) == [r"\{0, 1, 4, 9\}", "4", "3"]
    with pytest.raises(ValueError, match=r"must be some of \['algebra', .* got \['algebra', 'art"):
        math_hendrycks(file, subjects=["algebra", "arts"])


def test_math500():
    rows = math500(FIXTURES / "math500")
    assert answers(rows) == ["6", r"\frac{3}{4}", "1"]
    assert [row["level"] for row in rows] == [2, 1, 5]
    assert rows[0]["id"] == "math500/test/number_theory/9001.json"


def test_deepscaler():
    rows = deepscaler(FIXTURES / "deepscaler")
    assert answers(rows) == ["96", r"6\sqrt{2}", "1"]
    assert rows[1]["prompt"][-1] == {"role": "user", "content": r"Simplify $\sqrt{72}$."}


def test_dapo_math_has_each_problem_once():
    rows = dapo_math(FIXTURES / "dapo_math")
    assert answers(rows) == ["12", "-8", "32"]
    assert rows[0]["id"] == "dapo_math/00000000-0000-4000-8000-000000000001"
    assert [message["role"] for message in rows[0]["prompt"]] == ["user"]
    assert rows[0]["prompt"][0]["content"].endswith("\n\nHow many edges does a cube have?")
    assert answers(dapo_math(FIXTURES / "dapo_math", unique=False)) == [
        "12",
        "-8",
        "12",
        "32",
        "-8",
    ]
    with pytest.raises(ValueError, match="A stream cannot be made unique; give unique=False"):
        dapo_math(FIXTURES / "dapo_math", streaming=True)


def test_aime_answers_are_whole_numbers():
    rows = aime24(FIXTURES / "aime24")
    assert answers(rows) == ["8", "1", "225"]
    assert [row["id"] for row in rows] == ["aime24/901", "aime24/902", "aime24/903"]
    rows = aime25(FIXTURES / "aime25")
    assert answers(rows) == ["210", "324", "24"]  # one has 324^\circ
    assert rows[2]["prompt"][-1]["content"] == "Find the number of ways to order four books."


def test_mmlu_lists_its_choices():
    rows = mmlu(FIXTURES / "mmlu", system=None)
    assert answers(rows) == ["B", "A", "D"]
    assert rows[0]["choices"] == ["21", "29", "33", "39"]
    assert said(rows[0]["prompt"]) == [
        ("user", "Which of these numbers is prime?\n\nA. 21\nB. 29\nC. 33\nD. 39")
    ]


def test_mmlu_pro_has_up_to_ten_choices():
    rows = mmlu_pro(FIXTURES / "mmlu_pro")
    assert answers(rows) == ["D", "B", "D"]
    assert rows[0]["id"] == "mmlu_pro/91"
    assert rows[0]["prompt"][-1]["content"].endswith(
        "\nD. 90 km/h\n"
        + ("E. 100 km/h\nF. 110 km/h\nG. 120 km/h\nH. 130 km/h\nI. 140 km/h\nJ. 150 km/h")
    )


def test_openmathinstruct2_as_chats_and_as_problems():
    folder = FIXTURES / "openmathinstruct2"
    assert said(openmathinstruct2(folder)[1]["messages"]) == [
        ("user", "Solve $3x - 7 = 11$."),
        ("assistant", "Add 7: $3x = 18$. Divide by 3: $x = \\boxed{6}$."),
    ]
    assert answers(openmathinstruct2_problems(folder)) == ["96", "6", r"\frac{1}{6}"]


def test_a_problem_with_its_answer_is_a_chat():
    chat = with_answer(aime24(FIXTURES / "aime24", system=None)[2])
    assert said(chat["messages"]) == [
        ("user", "Find the area of a square of side 15."),
        ("assistant", "225"),
    ]
    with pytest.raises(BadRowError, match="column 'prompt': expected a prompt of messages, got 'a"):
        with_answer({"prompt": "a", "answer": "b", "task": "t", "level": 1, "id": "t/1"})


# Chats


def test_squad():
    rows = squad(FIXTURES / "squad", system=None)
    passage = "The stone bridge over the river was built in 1432. It has five arches."
    assert said(rows[0]["messages"]) == [
        ("user", f"{passage}\n\nWhen was the bridge built?"),
        ("assistant", "1432"),
    ]
    assert said(rows[1]["messages"])[1] == ("assistant", "five")


def test_oasst_follows_the_best_reply_and_ends_with_an_answer():
    rows = oasst(FIXTURES / "oasst")
    assert len(rows) == 3
    assert said(rows[0]["messages"]) == [
        ("user", "How do I sharpen a pencil?"),
        ("assistant", "Turn it in a sharpener, or cut it with a knife."),
        ("user", "Which knife?"),
        ("assistant", "A small one; cut away from you."),
    ]
    # The reply of rank 0 is deleted and that of rank 1 refused; the last one has no rank.
    assert said(rows[1]["messages"])[1] == ("assistant", "Wien.")
    with pytest.raises(BadRowError, match=r"oasst/train\.jsonl, line 12, .*someone answered"):
        rows[2]
    good, skipped = check_rows(rows, on_bad_row="skip")
    assert (len(good), skipped.counts) == (2, {"no answer": 1})


def test_oasst_of_one_language():
    rows = oasst(FIXTURES / "oasst", languages=["de"])
    assert said(rows[0]["messages"])[0] == ("user", "Was ist die Hauptstadt von Österreich?")
    assert len(rows) == 1
    assert len(oasst(FIXTURES / "oasst_trees", languages=["de"])) == 1


def test_oasst_from_trees():
    rows = oasst(FIXTURES / "oasst_trees")
    assert said(rows[0]["messages"]) == [
        ("user", "Name a river."),
        ("assistant", "The Danube."),
        ("user", "And a lake?"),
        ("assistant", "Lake Constance."),
    ]
    with pytest.raises(BadRowError, match=r"line 2, column 'prompt\.replies': .*someone answered"):
        rows[1]


def test_oasst_with_a_parent_that_is_not_there(tmp_path):
    lines = (FIXTURES / "oasst" / "train.jsonl").read_text().splitlines()
    path = tmp_path / "messages.jsonl"
    path.write_text("\n".join([*lines[7:11], lines[1]]) + "\n")
    rows = oasst(path)
    _, skipped = check_rows(rows, on_bad_row="skip")
    assert skipped.counts == {"no parent": 1}
    with pytest.raises(BadRowError, match=r"messages\.jsonl, line 5, column 'parent_id': expected"):
        rows[1]


def test_oasst_with_a_broken_line(tmp_path):
    lines = (FIXTURES / "oasst" / "train.jsonl").read_text().splitlines()
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join([*lines[:7], "{", *lines[7:11]]) + "\n")
    rows = oasst(path)
    good, skipped = check_rows(rows, on_bad_row="skip")
    assert (len(rows), len(good), skipped.total) == (3, 2, 1)
    with pytest.raises(BadRowError, match=r"broken\.jsonl, line 8, character 2: expected JSON"):
        rows[1]
    trees = (FIXTURES / "oasst_trees" / "train.jsonl").read_text().splitlines()
    path.write_text("\n".join([trees[0], "{", trees[2]]) + "\n")
    good, skipped = check_rows(oasst(path, languages=["en"]), on_bad_row="skip")
    assert (len(good), skipped.total) == (1, 1)


def test_tulu3_sft():
    rows = tulu3_sft(FIXTURES / "tulu3_sft")
    assert said(rows[1]["messages"]) == [
        ("system", "You answer in one word."),
        ("user", "What barks?"),
        ("assistant", "Dogs."),
        ("user", "What meows?"),
        ("assistant", "Cats."),
    ]


def test_openai_chats_keep_tools_and_weights():
    rows = openai_chats(FIXTURES / "openai_chats")
    assert set(rows[0]) == {"messages"}
    assert rows[1]["tools"][0]["function"]["name"] == "weather"
    assert rows[1]["messages"][0] == {"role": "system", "content": "Use tools."}
    call = rows[1]["messages"][2]["tool_calls"][0]["function"]
    assert call == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert [message.get("weight") for message in rows[2]["messages"]] == [None, 0, None, 1]


def test_prompt_responses_have_any_columns():
    rows = prompt_responses(FIXTURES / "prompt_responses", prompt="input", response="output")
    assert said(rows[2]["messages"]) == [("user", "Name a year."), ("assistant", "1969")]
    with pytest.raises(BadRowError, match=r"train\.jsonl, line 1, column 'prompt': .*'input'"):
        prompt_responses(FIXTURES / "prompt_responses")


# Preferences


def test_tulu3_preference_has_what_both_chats_begin_with_as_its_prompt():
    rows = tulu3_preference(FIXTURES / "tulu3_preference")
    assert said(rows[1]["prompt"]) == [
        ("user", "Name a colour."),
        ("assistant", "Green."),
        ("user", "And a warm one?"),
    ]
    assert said(rows[1]["chosen"]) == [("assistant", "Red.")]
    assert said(rows[1]["rejected"]) == [("assistant", "Blue.")]


def test_helpsteer3_counts_ties():
    rows = helpsteer3(FIXTURES / "helpsteer3")
    assert said(rows[0]["chosen"]) == [
        ("assistant", "Six minutes for a soft yolk, ten for a hard one.")
    ]
    assert (said(rows[0]["rejected"]), rows[0]["margin"]) == ([("assistant", "Long.")], 3.0)
    assert (said(rows[1]["chosen"]), rows[1]["margin"]) == ([("assistant", "a[::-1]")], 1.0)
    assert said(rows[1]["prompt"])[-1] == ("user", "a")
    with pytest.raises(BadRowError, match=r"train\.jsonl, line 3, .*one response to be better"):
        rows[2]
    good, skipped = check_rows(rows, on_bad_row="skip")
    assert (len(good), skipped.counts) == (2, {"tie": 1})


def test_preferences_in_three_forms():
    rows = preferences(FIXTURES / "preferences")
    pairs = [(said(row["prompt"]), said(row["chosen"]), said(row["rejected"])) for row in rows]
    assert pairs == [
        ([("user", "Name a bird.")], [("assistant", "A wren.")], [("assistant", "A trout.")]),
        ([("user", "Name a fish.")], [("assistant", "A trout.")], [("assistant", "A wren.")]),
        ([("user", "Name a tree.")], [("assistant", "An oak.")], [("assistant", "A wren.")]),
    ]


# All of them

WHOLE = {
    "aime24": 3,
    "aime25": 3,
    "dapo_math": 3,
    "deepscaler": 3,
    "math500": 3,
    "math_hendrycks": 8,
    "mmlu": 3,
    "mmlu_pro": 3,
    "openai_chats": 3,
    "openmathinstruct2": 3,
    "preferences": 3,
    "squad": 3,
    "tulu3_preference": 3,
    "tulu3_sft": 3,
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_row_is_valid_and_rows_travel_to_other_processes(name):
    rows = getattr(sources, name)(FIXTURES / name)
    assert len(rows) == WHOLE[name]
    for row in rows:
        for column in ("messages", "prompt"):
            if column in row:
                assert validate_messages(row[column]) == row[column]
    assert list(pickle.loads(pickle.dumps(rows))) == list(rows)
    ids = [row["id"] for row in rows if "id" in row]
    assert len(set(ids)) == len(ids)


# Arrow gives every row the keys of all: these must not be told from the JSON they were.
AS_PARQUET = [
    "aime24",
    "dapo_math",
    "deepscaler",
    "helpsteer3",
    "math500",
    "mmlu",
    "mmlu_pro",
    "oasst",
    "openai_chats",
    "openmathinstruct2",
    "squad",
    "tulu3_preference",
    "tulu3_sft",
]


@pytest.mark.parametrize("name", AS_PARQUET)
def test_parquet_gives_the_same_rows(name, tmp_path):
    source = getattr(sources, name)
    (file,) = (FIXTURES / name).iterdir()
    text = file.read_text()
    records = json.loads(text) if file.suffix == ".json" else map(json.loads, text.splitlines())
    records = list(records)
    every_key = dict.fromkeys(key for record in records for key in record)
    table = pyarrow.Table.from_pylist([{**every_key, **record} for record in records])
    parquet.write_table(table, tmp_path / "rows.parquet")
    expected, lost = check_rows(source(file), on_bad_row="skip")
    made, skipped = check_rows(source(tmp_path / "rows.parquet"), on_bad_row="skip")
    assert list(made) == list(expected)
    assert skipped.counts == lost.counts


STREAMED = [
    "dapo_math",
    "deepscaler",
    "helpsteer3",
    "mmlu",
    "mmlu_pro",
    "openai_chats",
    "openmathinstruct2",
    "openmathinstruct2_problems",
    "preferences",
    "squad",
    "tulu3_preference",
    "tulu3_sft",
]


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_gives_the_same_rows(name):
    source = getattr(sources, name)
    folder = FIXTURES / name.removesuffix("_problems")
    options = {"unique": False} if name == "dapo_math" else {}
    rows = check_rows(source(folder, **options), on_bad_row="skip")[0]
    stream = source(folder, streaming=True, **options).handle_bad_rows("skip")
    assert list(stream) == list(rows)
    assert list(stream) == list(rows)  # a stream begins anew each time


def test_a_question_has_the_same_id_wherever_it_stands():
    ids = [row["id"] for row in deepscaler(FIXTURES / "deepscaler")]
    streamed = [row["id"] for row in deepscaler(FIXTURES / "deepscaler", streaming=True).skip(1)]
    assert streamed == ids[1:]
    assert ids[0].startswith("deepscaler/")
    assert len(ids[0]) == len("deepscaler/") + 16


def test_the_hub_is_asked_for_each_data_set_as_its_card_names_it(monkeypatch):
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((*arguments, settings["split"]))
        raise ConnectionError("offline")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    names = [name for name in WHOLE if name not in ("openai_chats", "preferences")]
    for name in [*names, "helpsteer3", "oasst", "gpqa", "clevr", "geometry3k"]:
        with pytest.raises(ValueError, match=r"hub id that can be reached .* offline"):
            getattr(sources, name)()
    assert asked == [
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("opencompass/AIME2025", "AIME2025-I", "test"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
        ("agentica-org/DeepScaleR-Preview-Dataset", None, "train"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("EleutherAI/hendrycks_math", "algebra", "train"),
        ("cais/mmlu", "all", "test"),
        ("TIGER-Lab/MMLU-Pro", None, "test"),
        ("nvidia/OpenMathInstruct-2", None, "train"),
        ("rajpurkar/squad", None, "train"),
        ("allenai/llama-3.1-tulu-3-8b-preference-mixture", None, "train"),
        ("allenai/tulu-3-sft-mixture", None, "train"),
        ("nvidia/HelpSteer3", "preference", "train"),
        ("OpenAssistant/oasst2", None, "train"),
        ("Idavidrein/gpqa", "gpqa_diamond", "train"),
        ("MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", None, "train"),
        ("hiyouga/geometry3k", None, "train"),
    ]


def test_a_recipe_can_name_every_source_by_its_dotted_path():
    for name in sources.__all__:
        function = getattr(sources, name)
        module = importlib.import_module(function.__module__)
        assert getattr(module, name) is function
