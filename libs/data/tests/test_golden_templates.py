# ruff: noqa: RUF001  (DeepSeek's tags)
"""Token ids and masks of whole conversations, for the templates and tokenizers that people use.

`golden/` holds the ids that the full tokenizers give (see its README); the trained texts below were
written by hand. The slow tests fetch the full tokenizers from the package registries.
"""

import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from burnish_data.encode import encode_chat, encode_chats, render_chat
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "golden"


def load_make():
    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN / "make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()

DEFAULT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
}
MULTI = {
    "messages": [
        {"role": "system", "content": "Be brief. 请简短。"},
        {"role": "user", "content": "Hi 🙂, what is 1 + 234?"},
        {"role": "assistant", "content": "235, voilà 👩‍🔬"},
        {"role": "user", "content": "And in words?"},
        {"role": "assistant", "content": "Two hundred\nthirty-five.  "},
    ]
}
THINK = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes, 4.", "reasoning_content": "They ask\nagain."},
    ]
}
THINK_INLINE = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>\nThey ask again.\n</think>\n\nYes, 4."},
    ]
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(city, call_id):
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"id": call_id, "type": "function", "function": function}


TOOLS = {
    "messages": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Zürich and Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("Zürich", "call00001"), call("Rome", "call00002")],
        },
        {"role": "tool", "content": "21", "tool_call_id": "call00001"},
        {"role": "tool", "content": "30", "tool_call_id": "call00002"},
        {"role": "assistant", "content": "21 °C and 30 °C ☀️"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Any time."},
    ],
    "tools": [WEATHER],
}
# DeepSeek's templates leave it to the system's message to say which tools there are.
CALLS = {"messages": TOOLS["messages"]}


@dataclass(frozen=True)
class Case:
    """A conversation and what of it is trained, as text, one entry per stretch."""

    family: str
    name: str
    row: dict
    trained: list[str]
    train_on: str = "assistant"
    kwargs: dict = field(default_factory=dict)

    @property
    def id(self):
        return f"{self.family}-{self.name}"


CASES = [
    Case("smollm2", "default system", DEFAULT, ["Hello!<|im_end|>"]),
    Case(
        "smollm2",
        "multi",
        MULTI,
        ["235, voilà 👩‍🔬<|im_end|>", "Two hundred\nthirty-five.  <|im_end|>"],
    ),
    Case("smollm2", "last", MULTI, ["Two hundred\nthirty-five.  <|im_end|>"], train_on="last"),
    # What is said last is rendered with an empty thought, which generation has to make itself...
    Case(
        "qwen3",
        "multi",
        MULTI,
        [
            "235, voilà 👩‍🔬<|im_end|>",
            "<think>\n\n</think>\n\nTwo hundred\nthirty-five.  <|im_end|>",
        ],
    ),
    # ... unless it is given one.
    Case(
        "qwen3",
        "multi without thinking",
        MULTI,
        ["235, voilà 👩‍🔬<|im_end|>", "Two hundred\nthirty-five.  <|im_end|>"],
        kwargs={"enable_thinking": False},
    ),
    # The first turn's thought is not rendered, since a user spoke after it.
    Case(
        "qwen3",
        "think",
        THINK,
        ["4<|im_end|>", "<think>\nThey ask\nagain.\n</think>\n\nYes, 4.<|im_end|>"],
    ),
    Case(
        "qwen3",
        "think without thinking",
        THINK,
        ["4<|im_end|>", "<think>\nThey ask\nagain.\n</think>\n\nYes, 4.<|im_end|>"],
        kwargs={"enable_thinking": False},
    ),
    Case(
        "qwen3",
        "think inline",
        THINK_INLINE,
        ["4<|im_end|>", "<think>\nThey ask again.\n</think>\n\nYes, 4.<|im_end|>"],
    ),
    Case(
        "qwen3",
        "tools",
        TOOLS,
        [
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
            "<|im_end|>",
            "21 °C and 30 °C ☀️<|im_end|>",
            "<think>\n\n</think>\n\nAny time.<|im_end|>",
        ],
    ),
    Case(
        "qwen3",
        "tools last",
        TOOLS,
        ["<think>\n\n</think>\n\nAny time.<|im_end|>"],
        train_on="last",
    ),
    # All but the first token and the two tools' answers.
    Case(
        "qwen3",
        "tools all",
        TOOLS,
        [
            "system\nUse tools.\n\n# Tools\n\nYou may call one or more functions to assist with the"
            " user query.\n\nYou are provided with function signatures within <tools></tools> XML "
            'tags:\n<tools>\n{"type": "function", "function": {"name": "get_weather", '
            '"description": "The weather of a city.", "parameters": {"type": "object", '
            '"properties": {"city": {"type": "string"}}}}}\n</tools>\n\nFor each function call, '
            "return a json object with function name and arguments within <tool_call></tool_call> "
            'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
            "</tool_call><|im_end|>\n<|im_start|>user\nZürich and Rome?<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
            '"Zürich"}}\n</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
            '"Rome"}}\n</tool_call><|im_end|>\n',
            "<|im_start|>assistant\n21 °C and 30 °C ☀️<|im_end|>\n<|im_start|>user\nThanks"
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nAny time.<|im_end|>\n",
        ],
        train_on="all",
    ),
    Case(
        "deepseek_v3_1",
        "multi",
        MULTI,
        [
            "235, voilà 👩‍🔬<｜end▁of▁sentence｜>",
            "Two hundred\nthirty-five.  <｜end▁of▁sentence｜>",
        ],
    ),
    # Generation would begin with <think>; these turns begin with </think>, which is then trained.
    Case(
        "deepseek_v3_1",
        "multi with thinking",
        MULTI,
        [
            "</think>235, voilà 👩‍🔬<｜end▁of▁sentence｜>",
            "</think>Two hundred\nthirty-five.  <｜end▁of▁sentence｜>",
        ],
        kwargs={"thinking": True},
    ),
    Case(
        "deepseek_v3_1",
        "think inline",
        THINK_INLINE,
        ["\n\n4<｜end▁of▁sentence｜>", "\n\nYes, 4.<｜end▁of▁sentence｜>"],
    ),
    Case(
        "deepseek_v3_1",
        "tools",
        CALLS,
        [
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich"}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "21 °C and 30 °C ☀️<｜end▁of▁sentence｜>",
            "Any time.<｜end▁of▁sentence｜>",
        ],
    ),
    Case(
        "deepseek_r1",
        "think inline",
        THINK_INLINE,
        ["\n\n4<｜end▁of▁sentence｜>", "\n\nYes, 4.<｜end▁of▁sentence｜>"],
    ),
    # What closes the tools' answers comes out in the assistant's turn, and is not trained.
    Case(
        "deepseek_r1",
        "tools",
        CALLS,
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function'
            '<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "21 °C and 30 °C ☀️<｜end▁of▁sentence｜>",
            "Any time.<｜end▁of▁sentence｜>",
        ],
    ),
    # No header: the space before the answer is the assistant's.
    Case(
        "mistral_v0_3",
        "multi",
        MULTI,
        [" 235, voilà 👩‍🔬</s>", " Two hundred\nthirty-five.</s>"],
    ),
    Case(
        "mistral_v0_3",
        "tools",
        TOOLS,
        [
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich"}, "id": '
            '"call00001"}, {"name": "get_weather", "arguments": {"city": "Rome"}, "id": '
            '"call00002"}]</s>',
            " 21 °C and 30 °C ☀️</s>",
            " Any time.</s>",
        ],
    ),
    Case("llama3_1", "default", DEFAULT, ["Hello!<|eot_id|>"]),
    Case(
        "llama3_1",
        "multi",
        MULTI,
        ["235, voilà 👩‍🔬<|eot_id|>", "Two hundred\nthirty-five.<|eot_id|>"],
    ),
    Case("gemma3", "default", DEFAULT, ["Hello!<end_of_turn>"]),
    Case(
        "gemma3",
        "multi",
        MULTI,
        ["235, voilà 👩‍🔬<end_of_turn>", "Two hundred\nthirty-five.<end_of_turn>"],
    ),
]
# Meta's and Google's licences are not this library's: their ids alone are here.
PRUNED = [case for case in CASES if case.family not in ("llama3_1", "gemma3")]


def ids_of(cases):
    return [case.id for case in cases]


def load_golden(case):
    golden = json.loads((GOLDEN / f"{case.family}.json").read_text(encoding="utf-8"))
    return golden[case.name]


def check(case, tokenizer):
    """Ids and mask are the golden ones, and the trained text is the one above."""
    golden = load_golden(case)
    encoded = encode_chat(
        case.row, tokenizer, train_on=case.train_on, chat_template_kwargs=case.kwargs
    )
    assert encoded["token_ids"].dtype == np.int32
    assert encoded["token_mask"].dtype == np.bool_
    assert encoded["token_ids"].tolist() == golden["token_ids"]
    assert "".join("01"[int(trained)] for trained in encoded["token_mask"]) == golden["mask"]
    assert make.trained_texts(tokenizer, encoded) == case.trained
    assert set(encoded) == {"token_ids", "token_mask"}


@pytest.fixture(scope="module", params=sorted({case.family for case in PRUNED}))
def pruned(request):
    return request.param, make.load_pruned(request.param)


def test_golden_ids_and_masks(pruned):
    family, tokenizer = pruned
    cases = [case for case in PRUNED if case.family == family]
    assert cases
    for case in cases:
        check(case, tokenizer)


def test_the_text_is_that_of_apply_chat_template(pruned):
    family, tokenizer = pruned
    for case in PRUNED:
        if case.family != family:
            continue
        text = render_chat(case.row, tokenizer, chat_template_kwargs=case.kwargs).text
        assert text == make.reference_text(case, tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == load_golden(case)["token_ids"]


def test_many_at_once_are_each_as_alone(pruned):
    family, tokenizer = pruned
    cases = [
        case
        for case in PRUNED
        if case.family == family and case.train_on == "assistant" and not case.kwargs
    ]
    encoded = encode_chats([case.row for case in cases], tokenizer)
    for case, one in zip(cases, encoded, strict=True):
        golden = load_golden(case)
        assert one["token_ids"].tolist() == golden["token_ids"]
        assert one["token_mask"].astype(int).tolist() == [int(digit) for digit in golden["mask"]]


@pytest.mark.parametrize(
    ("family", "bos"), [("mistral_v0_3", "<s>"), ("deepseek_v3_1", "<｜begin▁of▁sentence｜>")]
)
def test_bos_stands_once(family, bos):
    tokenizer = make.load_pruned(family)
    ids = encode_chat(MULTI, tokenizer)["token_ids"].tolist()
    assert ids.count(tokenizer.convert_tokens_to_ids(bos)) == 1


def test_the_pruned_tokenizers_are_small():
    for path in GOLDEN.glob("*.tokenizer.json"):
        assert path.stat().st_size < 100_000, path.name
    assert len(list(GOLDEN.glob("*.tokenizer.json"))) == 4


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """Fetches the full tokenizers, each once."""
    folder = tmp_path_factory.mktemp("tokenizers")
    loaded = {}

    def load(family: str) -> PreTrainedTokenizerFast:
        if family not in loaded:
            loaded[family] = make.fetch(family, folder)
        return loaded[family]

    return load


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=ids_of(CASES))
def test_the_full_tokenizers_give_the_same(case, full):
    tokenizer = full(case.family)
    check(case, tokenizer)
    text = render_chat(case.row, tokenizer, chat_template_kwargs=case.kwargs).text
    assert text == make.reference_text(case, tokenizer)
