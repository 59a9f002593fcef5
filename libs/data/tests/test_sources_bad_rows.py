"""A row that a source cannot use: file, line, column, what was expected."""

import json

import pytest
from burnish_data import BadRowError
from burnish_data.sources import (
    aime24,
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
    preferences,
    squad,
    tulu3_preference,
    tulu3_sft,
)
from burnish_data.sources._records import boxed

USER = {"role": "user", "content": "?"}
ASSISTANT = {"role": "assistant", "content": "!"}
AIME = {"id": 1, "problem": "?", "answer": "7"}
MATH = {"problem": "?", "level": "Level 1", "type": "Algebra", "solution": r"\boxed{7}"}
MATH500 = {"problem": "?", "answer": "7", "level": 1, "unique_id": "test/1.json"}
MMLU = {"question": "?", "choices": ["a", "b"], "answer": 1, "subject": "x"}
PRO = {"question_id": 1, "question": "?", "options": ["a", "b"], "answer": "B", "answer_index": 1}
DAPO = {"prompt": [USER], "reward_model": {"ground_truth": "7"}, "extra_info": {"index": "1"}}
STEER = {"context": [USER], "response1": "a", "response2": "b", "overall_preference": 1}
SQUAD = {"context": "c", "question": "?", "answers": {"text": ["a"], "answer_start": [0]}}
OMI = {"problem": "?", "generated_solution": "a", "expected_answer": "a"}
CASES = [
    (aime24, AIME, {"answer": "1000"}, r"column 'answer': expected a whole number from 0 to 999"),
    (aime24, AIME, {"answer": "x"}, r"column 'answer': expected a whole number .*, got 'x'"),
    (aime24, AIME, {"problem": " "}, r"column 'problem': expected text, got ' '"),
    (aime24, AIME, {"answer": True}, r"column 'answer': expected text, got True"),
    (
        math_hendrycks,
        MATH,
        {"solution": "It is 7."},
        r"column 'solution': expected an answer in \\",
    ),
    (
        math_hendrycks,
        MATH,
        {"solution": r"\boxed{7"},
        r"column 'solution': expected an answer in \\",
    ),
    (math_hendrycks, MATH, {"level": "Level 6"}, r"column 'level': expected a level from 1 to 5"),
    (math500, MATH500, {"unique_id": 3}, r"column 'unique_id': expected text, got 3"),
    (deepscaler, MATH500, {"answer": ""}, r"column 'answer': expected text, got ''"),
    (mmlu, MMLU, {"answer": 2}, r": expected one of the 2 choices, counted from 0, got 2"),
    (mmlu, MMLU, {"answer": -1}, r": expected one of the 2 choices, counted from 0, got -1"),
    (mmlu, MMLU, {"answer": 0.5}, r"column 'answer': expected a whole number, got 0\.5"),
    (mmlu, MMLU, {"choices": "ab"}, r"column 'choices': expected a list of texts, got 'ab'"),
    (mmlu, MMLU, {"choices": ["a", " "]}, r"column 'choices': .* none of them empty, got"),
    (mmlu, MMLU, {"choices": ["a"], "answer": 0}, r": expected 2 to 26 choices, got \['a'\]"),
    (mmlu_pro, PRO, {"answer_index": 0}, r"column 'answer_index': .*'B', which is 1, got 0"),
    (mmlu_pro, PRO, {"answer": "b"}, r"column 'answer': expected a letter from A on, got 'b'"),
    (mmlu_pro, PRO, {"answer": "C", "answer_index": 2}, r"one of the 2 choices, .* got 2"),
    (
        dapo_math,
        DAPO,
        {"prompt": [], "extra_info": {"index": 4}},
        r"column 'prompt': expected a list of at least one message",
    ),
    (dapo_math, DAPO, {"prompt": [USER, ASSISTANT], "extra_info": {}}, r"that a user ends, got 'a"),
    (dapo_math, DAPO, {"reward_model": "7", "extra_info": {"index": 2}}, r"with ground_truth, got"),
    (
        dapo_math,
        DAPO,
        {"reward_model": {"truth": "7"}, "extra_info": {"index": 3}},
        r"column 'ground_truth': expected a column of this name .*, got \['truth'\]",
    ),
    (helpsteer3, STEER, {"overall_preference": 4}, r"column 'overall_preference': .* -3 to 3, got"),
    (helpsteer3, STEER, {"overall_preference": None}, r"'overall_preference': expected a value"),
    (helpsteer3, STEER, {"context": [USER, ASSISTANT]}, r"column 'context': .* a user ends, got"),
    (helpsteer3, STEER, {"response2": "a"}, r": expected two different responses, got"),
    (helpsteer3, STEER, {"response1": ""}, r"column 'response1': expected text, got ''"),
    (squad, SQUAD, {"answers": {"text": []}}, r"column 'answers': expected at least one answer"),
    (squad, SQUAD, {"answers": "a"}, r"column 'answers': expected an object with text, got 'a'"),
    (openmathinstruct2, OMI, {"generated_solution": ""}, r"column 'generated_solution': .*text"),
    (
        tulu3_sft,
        {"messages": [USER, ASSISTANT]},
        {"messages": [ASSISTANT]},
        r"'messages\[0\]\.role'",
    ),
    (openai_chats, {"messages": [USER, ASSISTANT]}, {"messages": "?"}, r"column 'messages'"),
    (preferences, {"prompt": "?", "chosen": "a", "rejected": "b"}, {"chosen": ""}, r"'chosen"),
    (
        tulu3_preference,
        {"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "."}]},
        {"rejected": [USER, ASSISTANT]},
        r"expected .*differ",
    ),
]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("source", "good", "changes", "error"),
    CASES,
    ids=[f"{source.__name__}-{number}" for number, (source, *_) in enumerate(CASES)],
)
def test_a_bad_row_is_named_by_file_line_and_column(tmp_path, source, good, changes, error):
    rows = source(write(tmp_path / "bad.jsonl", good, {**good, **changes}))
    assert rows[0]
    with pytest.raises(BadRowError, match=rf"bad\.jsonl, line 2.*{error}"):
        rows[1]


@pytest.mark.parametrize(
    ("source", "good", "column", "near"),
    [
        (aime24, AIME, "problem", ""),
        (math_hendrycks, MATH, "solution", r" \(is it 'solutions'\?\)"),
        (mmlu, MMLU, "choices", ""),
        (helpsteer3, STEER, "response1", r" \(is it 'response2'\?\)"),
        (squad, SQUAD, "question", ""),
        (dapo_math, DAPO, "prompt", ""),
        (openmathinstruct2, OMI, "generated_solution", ""),
    ],
)
def test_a_file_without_a_column_is_refused_at_once(tmp_path, source, good, column, near):
    records = {key: value for key, value in good.items() if key != column}
    if "solutions" in near:
        records["solutions"] = "s"
    path = write(tmp_path / "other.jsonl", records)
    with pytest.raises(
        BadRowError,
        match=rf"other\.jsonl, line 1, column '{column}': expected a column .*{near}, got",
    ):
        source(path)


def test_oasst_needs_its_columns(tmp_path):
    path = write(tmp_path / "flat.jsonl", {"message_id": "a", "role": "prompter"})
    with pytest.raises(BadRowError, match="column 'text': expected a column of this name"):
        oasst(path)
    message = {"message_id": "a", "text": "?", "role": "user"}
    answer = {"message_id": "b", "parent_id": "a", "text": "!", "role": "assistant"}
    rows = oasst(write(tmp_path / "roles.jsonl", message, answer))
    with pytest.raises(BadRowError, match=r"line 1, column 'role': expected one of \['prompter'"):
        rows[0]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So \boxed{4}, or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {5}", "5"),
        (r"\boxed 12 apples", "12"),
        (r"\boxed\pi", r"\pi"),
        (r"\fbox{no}", "no"),
        (
            r"\boxed{\begin{pmatrix} 1 \\{2} \end{pmatrix}}",
            r"\begin{pmatrix} 1 \\{2} \end{pmatrix}",
        ),
        (r"\boxed{cut {off}", None),
        ("none", None),
        (r"\boxed{}", ""),
    ],
)
def test_what_the_last_box_holds(solution, answer):
    assert boxed(solution) == answer
