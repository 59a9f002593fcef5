"""Chats as token ids and masks: literal ids of a tokenizer of whole words, and of pruned real ones.

Golden conversations of real templates are in test_golden_templates.py.
"""

import importlib.util
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from burnish_data import BadRowError, render_prompt
from burnish_data.encode import LeftOutError, encode_chat, encode_chats
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "golden"
SPECIAL_TOKENS = ["<unk>", "<bos>", "<eos>", "<turn>"]
WORDS = ["system", "user", "assistant", "tool", "be", "brief", "what", "is", "up", "down", "f"]
TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant{% endif %}"
)


def make_tokenizer(template=TEMPLATE, *, adds_bos=False, **names):
    """A tokenizer of whole words; pad is EOS unless something else is said."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL_TOKENS)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        **({"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"} | names),
    )
    tokenizer.chat_template = template
    return tokenizer


def load_golden_tokenizer(family):
    spec = importlib.util.spec_from_file_location("make_golden", GOLDEN / "make_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_pruned(family)


def digits(encoded):
    return "".join("01"[int(trained)] for trained in encoded["token_mask"])


SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "what is up"}
ANSWER = {"role": "assistant", "content": "up is down"}
AGAIN = {"role": "user", "content": "is down"}
SHORT = {"role": "assistant", "content": "down"}
CHAT = {"messages": [SYSTEM, ASK, ANSWER, AGAIN, SHORT]}
#       <turn> system be brief <eos> <turn> user what is up <eos>
IDS = [3, 4, 8, 9, 2, 3, 5, 10, 11, 12, 2]
#       <turn> assistant up is down <eos> <turn> user is down <eos> <turn> assistant down <eos>
IDS += [3, 6, 12, 11, 13, 2, 3, 5, 11, 13, 2, 3, 6, 13, 2]


@pytest.mark.parametrize(
    ("train_on", "mask"),
    [
        ("assistant", "00000000000001111000000011"),
        ("last", "00000000000000000000000011"),
        ("all", "01111111111111111111111111"),
    ],
)
def test_which_tokens_are_trained(train_on, mask):
    encoded = encode_chat(CHAT, make_tokenizer(), train_on=train_on)
    assert encoded["token_ids"].tolist() == IDS
    assert digits(encoded) == mask
    assert encoded["token_ids"].dtype == np.int32
    assert encoded["token_mask"].dtype == np.bool_
    assert set(encoded) == {"token_ids", "token_mask"}


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("template", "token_ids"),
    [
        (TEMPLATE, [3, 5, 12, 2, 3, 6, 13, 2]),
        ("<bos> " + TEMPLATE, [1, 3, 5, 12, 2, 3, 6, 13, 2]),
        ("{{ bos_token }} " + TEMPLATE, [1, 3, 5, 12, 2, 3, 6, 13, 2]),
    ],
    ids=["none", "literal", "variable"],
)
def test_bos_is_the_templates_affair(template, token_ids, adds_bos):
    tokenizer = make_tokenizer(template, adds_bos=adds_bos)
    row = {"messages": [{"role": "user", "content": "up"}, SHORT]}
    encoded = encode_chat(row, tokenizer)
    assert encoded["token_ids"].tolist() == token_ids
    assert token_ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
    assert digits(encoded)[-4:] == "0011"


def test_a_tokenizer_without_bos_and_eos():
    """Then nothing is known to end a turn, and all of it is trained."""
    tokenizer = make_tokenizer(bos_token=None, eos_token=None, pad_token=None)
    assert tokenizer.eos_token is None
    encoded = encode_chat({"messages": [ASK, SHORT]}, tokenizer)
    assert encoded["token_ids"].tolist() == [3, 5, 10, 11, 12, 2, 3, 6, 13, 2]
    assert digits(encoded) == "0000000011"


def test_the_ending_eos_is_trained_where_it_is_the_padding():
    tokenizer = make_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    encoded = encode_chat({"messages": [ASK, SHORT]}, tokenizer)
    assert encoded["token_ids"][encoded["token_mask"]].tolist() == [13, 2]


def test_thoughts_of_earlier_turns():
    """The template drops them: rendered once, each trained token is there once."""
    template = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1].strip()", 1)
    messages = [
        ASK,
        {"role": "assistant", "content": "what is </think> up"},
        AGAIN,
        {"role": "assistant", "content": "be </think> down"},
    ]
    encoded = encode_chat({"messages": messages}, make_tokenizer(template))
    assert encoded["token_ids"].tolist() == [
        *(3, 5, 10, 11, 12, 2, 3, 6, 12, 2),
        *(3, 5, 11, 13, 2, 3, 6, 13, 2),
    ]
    assert digits(encoded) == "0000000011000000011"


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
TOOL_CHAT = {
    "messages": [
        ASK,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "up"},
        SHORT,
    ]
}
TOOL_TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }}"
    "{% for c in m.tool_calls %} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %} <eos> {% endfor %}{% if add_generation_prompt %}<turn> assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("train_on", "mask"),
    [
        # <turn> user what is up <eos> <turn> assistant f {} <eos> <turn> tool up <eos>
        # <turn> assistant down <eos>
        ("assistant", "000000001110000" + "0011"),
        ("last", "000000000000000" + "0011"),
        ("all", "011111111110000" + "1111"),
    ],
)
def test_tools_are_never_trained(train_on, mask):
    encoded = encode_chat(TOOL_CHAT, make_tokenizer(TOOL_TEMPLATE), train_on=train_on)
    ids = [3, 5, 10, 11, 12, 2, 3, 6, 14, 0, 2, 3, 7, 12, 2, 3, 6, 13, 2]
    assert encoded["token_ids"].tolist() == ids
    assert digits(encoded) == mask


def test_tools_that_a_template_leaves_out_are_an_error():
    with pytest.raises(BadRowError, match=r"tool_calls\[0\]'.*leaves this one out, got 'f'"):
        encode_chat(TOOL_CHAT, make_tokenizer())
    row = {"messages": [ASK, SHORT], "tools": [CALL]}
    with pytest.raises(BadRowError, match=r"no place for them; .*got \['f'\]"):
        encode_chat(row, make_tokenizer())
    # What is said beside the call is lost, too.
    template = "{% if m.tool_calls %}{{ m.tool_calls[0].function }}{% else %}{{ m.content }}"
    template = "{% for m in messages %}<turn> " + template + "{% endif %} <eos> {% endfor %}"
    said = {"role": "assistant", "content": "brief", "tool_calls": [CALL]}
    with pytest.raises(BadRowError, match=r"messages\[1\].content'.*beside tool calls"):
        encode_chat({"messages": [ASK, said]}, make_tokenizer(template))


def test_weights_of_messages():
    messages = [SYSTEM, ASK, {**ANSWER, "weight": 0.5}, AGAIN, {**SHORT, "weight": 2}]
    encoded = encode_chat({"messages": messages}, make_tokenizer())
    assert digits(encoded) == "00000000000001111000000011"
    assert encoded["token_weights"].dtype == np.float32
    expected = [0.0] * 13 + [0.5] * 4 + [0.0] * 7 + [2.0] * 2
    assert encoded["token_weights"].tolist() == expected


def test_a_weight_of_0_is_a_mask():
    messages = [SYSTEM, ASK, {**ANSWER, "weight": 0}, AGAIN, SHORT]
    encoded = encode_chat({"messages": messages}, make_tokenizer())
    assert digits(encoded) == "00000000000000000000000011"
    assert "token_weights" not in encoded
    encoded = encode_chat({"messages": messages}, make_tokenizer(), train_on="all")
    assert digits(encoded) == "01111111111" + "000000" + "111111111"


def test_a_weight_does_not_reach_the_template():
    template = "{% for m in messages %}<turn> {{ m | length }} {{ m.content }} <eos> {% endfor %}"
    tokenizer = make_tokenizer(template)
    plain = encode_chat({"messages": [ASK, SHORT]}, tokenizer)
    weighted = encode_chat({"messages": [ASK, {**SHORT, "weight": 1.0}]}, tokenizer)
    assert plain["token_ids"].tolist() == weighted["token_ids"].tolist()


@pytest.mark.parametrize(
    ("max_length", "ids", "mask"),
    [
        (16, IDS[:16], "0000000000000111"),
        (25, IDS[:25], "0000000000000111100000001"),
    ],
)
def test_truncation_cuts_the_tail_and_invents_no_eos(max_length, ids, mask):
    encoded = encode_chat(CHAT, make_tokenizer(), max_length=max_length, too_long="truncate")
    assert encoded["token_ids"].tolist() == ids
    assert ids[-1] != 2
    assert digits(encoded) == mask
    assert encoded["truncated"] is True


def test_what_fits_is_not_truncated():
    encoded = encode_chat(CHAT, make_tokenizer(), max_length=26, too_long="truncate")
    assert encoded["token_ids"].tolist() == IDS
    assert "truncated" not in encoded


def test_truncated_weights():
    messages = [ASK, {**SHORT, "weight": 0.5}]
    encoded = encode_chat(
        {"messages": messages}, make_tokenizer(), max_length=9, too_long="truncate"
    )
    assert encoded["token_weights"].tolist() == [0.0] * 8 + [0.5]


def test_a_prompt_longer_than_the_limit_leaves_nothing_to_train():
    with pytest.raises(
        BadRowError, match=r"at least one trained token, got 'none of 13, the first of 26'"
    ) as caught:
        encode_chat(CHAT, make_tokenizer(), max_length=13, too_long="truncate")
    assert caught.value.reason == "nothing to train"
    assert str(caught.value).endswith(
        "Max_length cut off all that is trained: raise it, or leave such rows out."
    )
    assert not isinstance(caught.value, LeftOutError)


@pytest.mark.parametrize(("too_long", "kind"), [("error", BadRowError), ("skip", LeftOutError)])
def test_a_row_that_is_too_long(too_long, kind):
    with pytest.raises(BadRowError, match="expected at most 25 tokens, got 26") as caught:
        encode_chat(CHAT, make_tokenizer(), max_length=25, too_long=too_long)
    assert type(caught.value) is kind
    assert caught.value.reason == "too long"


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, ASK],  # the assistant says nothing
        [ASK, {**ANSWER, "weight": 0}],
    ],
)
def test_nothing_to_train_is_an_error(messages):
    with pytest.raises(BadRowError, match="at least one trained token") as caught:
        encode_chat({"messages": messages}, make_tokenizer())
    assert caught.value.reason == "nothing to train"
    assert str(caught.value).endswith(
        "No message is the assistant's, or those that are have a weight of 0."
    )


def test_bad_rows_stand_in_their_places():
    rows = [
        CHAT,
        {"messages": [ASK, ASK, {"role": "wizard", "content": "up"}]},
        {"messages": [ASK, SHORT]},
        {},
        {"messages": [ASK, {"role": "assistant", "content": " "}]},
    ]
    encoded = encode_chats(rows, make_tokenizer(), max_length=12, too_long="skip")
    assert [type(one) for one in encoded] == [
        LeftOutError,
        BadRowError,
        dict,
        BadRowError,
        BadRowError,
    ]
    assert encoded[2]["token_ids"].tolist() == [3, 5, 10, 11, 12, 2, 3, 6, 13, 2]
    assert [error.column for error in encoded if isinstance(error, BadRowError)] == [
        "messages",
        "messages[2].role",
        "messages",
        "messages[1].content",
    ]
    assert encode_chats([], make_tokenizer()) == []


def test_a_template_that_refuses_a_row():
    template = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    tokenizer = make_tokenizer(template + TEMPLATE)
    with pytest.raises(ValueError, match=r"must render a user's message.*failed with: too many"):
        encode_chat({"messages": [ASK, SHORT]}, tokenizer)  # not even the plainest conversation
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refused, good = encode_chats(
        [CHAT, {"messages": [ASK, SHORT]}], make_tokenizer(template + TEMPLATE)
    )
    assert digits(good) == "0000000011"
    assert refused.reason == "refused by the chat template"
    assert "failed with: no system, got ['system', 'user', 'assistant'" in str(refused)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for m in messages %}{{ m.update({'role': 'user'}) }}{% endfor %}",
    ],
)
def test_a_template_that_calls_python_is_refused(template):
    with pytest.raises(ValueError, match="must render in Jinja's sandbox") as caught:
        encode_chats([CHAT], make_tokenizer(template))
    assert not isinstance(caught.value, BadRowError)


def test_templates_by_name_string_and_file(tmp_path):
    other = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}{{ ' brief' if fast }}")
    row = {"messages": [ASK, SHORT]}
    longer = [3, 5, 10, 11, 12, 9, 2, 3, 6, 13, 9, 2]
    fast = {"chat_template_kwargs": {"fast": True}}
    encode = partial(encode_chat, row, make_tokenizer({"default": TEMPLATE, "other": other}))
    assert encode()["token_ids"].tolist() == [3, 5, 10, 11, 12, 2, 3, 6, 13, 2]
    assert encode(chat_template="other", **fast)["token_ids"].tolist() == longer
    assert encode(chat_template=other, **fast)["token_ids"].tolist() == longer
    path = tmp_path / "mine.jinja"
    path.write_text(other, encoding="utf-8")
    assert encode(chat_template=path, **fast)["token_ids"].tolist() == longer
    assert encode(chat_template=str(path), **fast)["token_ids"].tolist() == longer
    with pytest.raises(ValueError, match=r"names \['default', 'other'\], got 'othre'"):
        encode(chat_template="othre")
    with pytest.raises(ValueError, match=r"file must exist, got '/nowhere/mine.jinja'"):
        encode(chat_template="/nowhere/mine.jinja")
    with pytest.raises(ValueError, match="must be Jinja, got an error in its line 2"):
        encode(chat_template="\n{% for m in messages %}")
    with pytest.raises(ValueError, match="this tokenizer has none"):
        encode_chat(row, make_tokenizer(None))


def test_the_template_for_tools():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with_tools = "{% for t in tools %}{{ t.function.name }} {% endfor %}" + TEMPLATE
    tokenizer = make_tokenizer({"default": TEMPLATE, "tool_use": with_tools})
    plain = encode_chat({"messages": [ASK, SHORT]}, tokenizer)
    called = encode_chat({"messages": [ASK, SHORT], "tools": [tool]}, tokenizer)
    assert called["token_ids"].tolist() == [14, *plain["token_ids"].tolist()]
    assert digits(called) == "0" + digits(plain)


def test_bad_arguments():
    for options, message in (
        ({"train_on": "user"}, r"train_on must be one of .*'assistant'.* got 'user'"),
        ({"too_long": "cut"}, r"too_long must be one of .*'truncate'.* got 'cut'"),
        ({"max_length": 1}, r"at least 2 tokens, .*got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_chats([CHAT], make_tokenizer(), **options)


class SlowTokenizer(PreTrainedTokenizer):
    """Whole words, in Python."""

    @property
    def vocab_size(self):
        return 1

    def get_vocab(self):
        return {"<unk>": 0}

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return 0


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match="a fast tokenizer alone knows, got SlowTokenizer"):
        encode_chats([CHAT], SlowTokenizer(unk_token="<unk>", chat_template=TEMPLATE))


def test_images_are_for_processors():
    image = {"type": "image", "image": "a.png"}
    row = {"messages": [{"role": "user", "content": [image]}, SHORT]}
    with pytest.raises(BadRowError, match=r"messages\[0\].content'.*encode_images") as caught:
        encode_chat(row, make_tokenizer())
    assert caught.value.reason == "images"


# After SmolVLM's (Apache-2.0) and LLaVA's, which know content as a list of parts alone.
PARTS_TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ' be' }}{% endif %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %} {{ part['text'] }}{% endif %}"
    "{% endfor %} <eos> {% endfor %}{% if add_generation_prompt %}<turn> assistant{% endif %}"
)
FILTER_TEMPLATE = (
    "{% for m in messages %}<turn> {{ m.role }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %} {{ part['text'] }}"
    "{% endfor %} <eos> {% endfor %}{% if add_generation_prompt %}<turn> assistant{% endif %}"
)
# Fails on text, as letters have no key "text".
INDEX_TEMPLATE = TEMPLATE.replace("m['content']", "' ' + m['content'][0]['text']")


@pytest.mark.parametrize("template", [PARTS_TEMPLATE, FILTER_TEMPLATE, INDEX_TEMPLATE])
def test_templates_that_know_parts_alone(template):
    """They leave letters out, and say nothing: text is given to them as its one part."""
    tokenizer = make_tokenizer(template)
    encoded = encode_chat(CHAT, tokenizer)
    assert encoded["token_ids"].tolist() == IDS
    assert digits(encoded) == "00000000000001111000000011"
    assert render_prompt(tokenizer, CHAT["messages"][:2]) == [*IDS[:11], 3, 6]
    lists = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in CHAT["messages"]
    ]
    assert tokenizer.apply_chat_template(lists, return_dict=False) == IDS


def test_tools_in_templates_that_know_parts_alone():
    calls = (
        "{% for c in m.tool_calls %} {{ c.function.name }} {{ c.function.arguments | tojson }}"
        "{% endfor %} <eos>"
    )
    tokenizer = make_tokenizer(PARTS_TEMPLATE.replace(" <eos>", calls))
    encoded = encode_chat(TOOL_CHAT, tokenizer)
    assert encoded["token_ids"].tolist() == [
        *(3, 5, 10, 11, 12, 2, 3, 6, 14, 0, 2, 3, 7, 12, 2, 3, 6, 13, 2)
    ]
    assert digits(encoded) == "0000000011100000011"


def test_text_is_text_where_a_template_takes_both():
    template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m.content if m.content is string else 'down' }}"
    )
    encoded = encode_chat(CHAT, make_tokenizer(template))
    assert encoded["token_ids"].tolist() == IDS


def test_a_template_that_renders_no_text_is_an_error():
    """Of no form: each turn would be its header and its end."""
    template = "{% for m in messages %}<turn> {{ m['role'] }} <eos> {% endfor %}"
    for use in (encode_chat, lambda row, tokenizer: render_prompt(tokenizer, [ASK])):
        with pytest.raises(ValueError, match="neither as text nor as a list of parts") as caught:
            use(CHAT, make_tokenizer(template))
        assert not isinstance(caught.value, BadRowError)


@pytest.mark.parametrize(
    ("said", "rendered"),
    [
        ("{{ m.content if not loop.last else '' }}", "up is down"),  # drops the last answer
        ("{{ m.content.split('brief')[0] }}", "up brief down"),  # cuts an answer
        ("{{ m.content.split('\n')[0] }}", "up\nis\ndown down"),
        ("{{ m.content.split('</think>')[-1] }}", "<think>up is</think>"),  # nothing but a thought
    ],
)
def test_what_the_assistant_says_is_not_lost(said, rendered):
    template = TEMPLATE.replace("{{ m['content'] }}", said)
    row = {"messages": [ASK, {"role": "assistant", "content": rendered}]}
    for train_on in ("assistant", "last", "all"):
        with pytest.raises(BadRowError, match=r"that the chat template renders, but") as caught:
            encode_chat(row, make_tokenizer(template), train_on=train_on)
        assert caught.value.reason == "content not rendered"
        assert caught.value.column == "messages[1].content"


def test_reasoning_that_is_all_an_answer_has_is_not_lost():
    answer = {"role": "assistant", "content": "", "reasoning_content": "up is down"}
    with pytest.raises(BadRowError) as caught:
        encode_chat({"messages": [ASK, answer]}, make_tokenizer())
    assert caught.value.reason == "content not rendered"
    template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m.reasoning_content }}")
    encoded = encode_chat({"messages": [ASK, answer]}, make_tokenizer(template))
    assert encoded["token_ids"][encoded["token_mask"]].tolist() == [12, 11, 13, 2]


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("{{ m.content | trim }}", "\n up is down \n\n"),
        ("{{ m.content.split('</think>')[-1].strip() }}", "<think>\nbe\n</think>\n\nup\ndown\n"),
        ("{{ m.content.replace('\n', ' ') }}", "up\nis\n\ndown"),
        ("{{ m.content | replace('<think>', '') | replace('</think>', '') }}", "<think>up</think>"),
        ("{{ m.content | tojson }}", 'up "is" \\ down é'),
        ("{{ m.content | tojson(ensure_ascii=true) }}", 'up "is" \\ down é'),
        ("{{ {'text': m.content} }}", "up is down"),
    ],
)
def test_templates_that_change_what_is_said_are_no_error(said, content):
    template = TEMPLATE.replace("{{ m['content'] }}", said)
    answer = {"role": "assistant", "content": content}
    assert encode_chat({"messages": [ASK, answer]}, make_tokenizer(template))["token_mask"].any()


# Real tokenizers, on what a tokenizer of whole words has not.


def test_characters_of_several_tokens_are_trained_whole():
    tokenizer = load_golden_tokenizer("qwen3")
    row = {
        "messages": [
            {"role": "user", "content": "🤖"},
            {"role": "assistant", "content": "🤖🤖"},
        ]
    }
    encoded = encode_chat(row, tokenizer, chat_template_kwargs={"enable_thinking": False})
    per_character = len(tokenizer("🤖", add_special_tokens=False)["input_ids"])
    assert per_character > 1
    assert encoded["token_mask"].sum() == 2 * per_character + 1
    trained = encoded["token_ids"][encoded["token_mask"]]
    assert tokenizer.decode(trained) == "🤖🤖<|im_end|>"


def test_a_tokenizer_that_composes_characters():
    """Qwen's makes one character of e and its accent: offsets are those of the text before."""
    tokenizer = load_golden_tokenizer("qwen3")
    decomposed = "ne\u0301 e\u0301e\u0301"
    row = {
        "messages": [
            {"role": "user", "content": decomposed},
            {"role": "assistant", "content": decomposed},
        ]
    }
    encoded = encode_chat(row, tokenizer, chat_template_kwargs={"enable_thinking": False})
    trained = encoded["token_ids"][encoded["token_mask"]]
    assert tokenizer.decode(trained) == "n\u00e9 \u00e9\u00e9<|im_end|>"


def test_a_thought_before_a_tool_call_may_be_left_out():
    tokenizer = load_golden_tokenizer("qwen3")
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": "v"}}}
    called = {
        "role": "assistant",
        "content": "<think>\nA tool.\n</think>\n\nWait.",
        "tool_calls": [call],
    }
    messages = [ASK, called, {"role": "tool", "content": "1"}, SHORT, AGAIN, SHORT]
    encoded = encode_chat({"messages": messages}, tokenizer)
    trained = tokenizer.decode(encoded["token_ids"][encoded["token_mask"]])
    assert trained == (
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call><|im_end|>'
        "down<|im_end|><think>\n\n</think>\n\ndown<|im_end|>"
    )


def trimming(tokenizer):
    """The same tokenizer with offsets that leave white space out, as Llama 3 has it."""
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def test_offsets_without_white_space():
    """A header's line break would seem to begin where the answer does."""
    row = {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "  \n Hello! "},
        ]
    }
    plain = encode_chat(row, load_golden_tokenizer("smollm2"))
    tokenizer = trimming(load_golden_tokenizer("smollm2"))
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert any(start == end for start, end in offsets["offset_mapping"])  # what this test is for
    trimmed = encode_chat(row, tokenizer)
    assert trimmed["token_ids"].tolist() == plain["token_ids"].tolist()
    assert digits(trimmed) == digits(plain)
    text = tokenizer.decode(trimmed["token_ids"][trimmed["token_mask"]])
    assert text.endswith("Hello! <|im_end|>")


def test_a_tokenizer_that_has_learnt_a_token_since():
    tokenizer = trimming(load_golden_tokenizer("smollm2"))
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "new!"}]
    }
    before = encode_chat(row, tokenizer)
    tokenizer.add_tokens(["new!"])
    after = encode_chat(row, tokenizer)
    number = tokenizer.convert_tokens_to_ids("new!")
    assert number not in before["token_ids"]
    assert after["token_ids"][after["token_mask"]].tolist() == [number, 2]


def test_earlier_padding_and_truncation_do_not_last():
    tokenizer = make_tokenizer()
    tokenizer(["up", "up is"], padding="max_length", truncation=True, max_length=30)
    assert encode_chat(CHAT, tokenizer)["token_ids"].tolist() == IDS
    tokenizer(["up is down"], truncation=True, max_length=1)
    assert encode_chat(CHAT, tokenizer)["token_ids"].tolist() == IDS


def test_a_token_that_begins_before_the_answer_is_not_trained():
    """The header's last character and the answer's first are one token."""
    template = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    tokenizer = load_golden_tokenizer("qwen3")
    tokenizer.chat_template = template
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\nHi"}]
    }
    encoded = encode_chat(row, tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(encoded["token_ids"])
    assert tokens[-4:] == [":", "ĊĊ", "Hi", "Ċ"]
    assert digits(encoded)[-4:] == "0011"
    assert encoded["token_mask"].sum() == 2


@given(
    contents=st.lists(
        st.text(alphabet="ab é🙂\n\t<>|\u0301", min_size=1, max_size=12).filter(str.strip),
        min_size=2,
        max_size=6,
    ).filter(lambda texts: len(texts) % 2 == 0)
)
def test_ids_are_the_whole_renders_and_trained_text_is_the_answers(contents):
    """Whatever is said, ids are those of the whole text and each answer is trained once."""
    tokenizer = PROPERTY_TOKENIZER
    roles = ["user", "assistant"] * (len(contents) // 2)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    encoded = encode_chat({"messages": messages}, tokenizer)
    assert encoded["token_ids"].tolist() == tokenizer.apply_chat_template(
        messages, return_dict=False
    )
    said = "".join(f"{content}<|im_end|>" for content in contents[1::2])
    assert tokenizer.decode(encoded["token_ids"][encoded["token_mask"]]) == said


PROPERTY_TOKENIZER = load_golden_tokenizer("smollm2")


def test_it_goes_to_worker_processes():
    encode = pickle.loads(
        pickle.dumps(partial(encode_chats, tokenizer=make_tokenizer(), train_on="last"))
    )
    (encoded,) = encode([CHAT])
    assert digits(encoded) == "00000000000000000000000011"
    error = LeftOutError("at most 2 tokens", 3, reason="too long")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is LeftOutError
    assert copy.reason == "too long"


def test_rows_are_left_as_they_are():
    row = {"messages": [dict(ASK), {**SHORT, "weight": 0.5}], "tools": []}
    copy = pickle.loads(pickle.dumps(row))
    encode_chat(row, make_tokenizer())
    assert row == copy


def test_what_the_page_says_of_qwen3_and_of_special_tokens_that_are_typed():
    tokenizer = load_golden_tokenizer("qwen3")
    said = [("user", "Hi <|im_end|>"), ("assistant", "Ho")]
    row = {"messages": [{"role": role, "content": text} for role, text in said]}
    plain = encode_chat(row, tokenizer)
    ids, mask = plain["token_ids"], plain["token_mask"]
    assert tokenizer.decode(ids[mask]) == "<think>\n\n</think>\n\nHo<|im_end|>"
    assert ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 3
    plain = encode_chat(row, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(plain["token_ids"][plain["token_mask"]]) == "Ho<|im_end|>"
    assert plain["token_ids"].tolist() == ids.tolist()
