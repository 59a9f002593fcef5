"""What a chat template leaves out, or puts where it is not expected, is an error or right."""

import pytest
from burnish_data import BadRowError, render_prompt
from burnish_data.chat_template import load_template
from burnish_data.encode import render_chat
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

USER = {"role": "user", "content": "what?"}
ANSWER = {"role": "assistant", "content": "two"}
THINKS = {**ANSWER, "reasoning_content": "one\nand one"}
CHAT = [USER, ANSWER, USER, ANSWER]
GENERATION = "{% if add_generation_prompt %}<assistant>{% endif %}"


def make_tokenizer(template, **names):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    backend.add_special_tokens(["</s>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", **({"eos_token": "</s>"} | names)
    )
    tokenizer.chat_template = template
    return tokenizer


def trained(template, messages, *, tokenizer=None, tools=(), **options):
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    chat = render_chat(row, tokenizer or make_tokenizer(template), **options)
    return [chat.text[span.start : span.end] for span in chat.spans if span.weight]


def refusal(template, messages, **options):
    with pytest.raises(BadRowError) as caught:
        trained(template, messages, **options)
    return caught.value.column, caught.value.reason


def loop(body, generation=GENERATION):
    return "{% for m in messages %}" + body + "{% endfor %}" + generation


# Thoughts.


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_the_templates_name(name):
    thought = "{% if m." + name + " %}<think>{{ m." + name + " }}</think>{% endif %}"
    template = loop("<{{ m.role }}>" + thought + "{{ m.content }}</s>")
    assert trained(template, [USER, THINKS]) == ["<think>one\nand one</think>two</s>"]


# After gpt-oss's (Apache-2.0): thoughts in the last turn, and beside calls, which have no content.
HARMONY = loop(
    "<|start|>{{ m.role }}{% if m.role != 'assistant' %}<|message|>{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% elif m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant"
    "{% endif %} to=functions.{{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}{% if 'thinking' in m %}<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>"
    "{{ m.content }}<|return|>{% else %}<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}",
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
)


def test_thoughts_of_gpt_oss():
    assert trained(HARMONY, [USER, THINKS, USER, THINKS]) == [
        "<|channel|>final<|message|>two<|end|>",
        "<|channel|>analysis<|message|>one\nand one<|end|><|start|>assistant<|channel|>final"
        "<|message|>two<|return|>",
    ]
    called = {"role": "assistant", "content": "", "reasoning_content": "a tool"}
    called["tool_calls"] = [call("f", {"k": "v"})]
    assert trained(HARMONY, [USER, called]) == [
        "<|channel|>analysis<|message|>a tool<|end|><|start|>assistant to=functions.f<|message|>"
        '{"k": "v"}<|call|>'
    ]


def test_a_template_that_knows_no_thoughts():
    template = loop("<{{ m.role }}>{{ m.content }}</s>")
    with pytest.raises(
        BadRowError, match=r"drop reasoning_content from the messages, or pass a template that"
    ) as caught:
        trained(template, [USER, THINKS])
    assert caught.value.reason == "reasoning not rendered"
    assert caught.value.column == "messages[1].reasoning_content"
    assert refusal(template, [USER, THINKS, USER, ANSWER]) == (
        "messages[1].reasoning_content",
        "reasoning not rendered",
    )
    assert trained(template, [USER, {**THINKS, "reasoning_content": " "}]) == ["two</s>"]
    # Nothing of a prompt is trained.
    assert render_prompt(make_tokenizer(template), [USER, THINKS, USER])


def test_a_last_thought_that_is_left_out():
    """Thoughts of earlier turns are, by design."""
    thought = "{% if loop.index < 4 %}{{ m.reasoning_content }}{% endif %}"
    template = loop("<{{ m.role }}>" + thought + "{{ m.content }}</s>")
    last = [USER, ANSWER, USER, THINKS]
    assert refusal(template, last) == ("messages[3].reasoning_content", "reasoning not rendered")
    thought = "{% if loop.last %}{{ m.reasoning_content }}!{% endif %}"
    template = loop("<{{ m.role }}>" + thought + "{{ m.content }}</s>")
    assert trained(template, [USER, THINKS, USER, THINKS]) == ["two</s>", "one\nand one!two</s>"]


# Headers.


@pytest.mark.parametrize(
    ("turn", "prompt"),
    [
        ("\n\n{{ m.role | title }}: {{ m.content }}</s>", "Assistant:"),
        (
            "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}</s>",
            "<|im_start|>assistant\n",
        ),
    ],
)
def test_a_prompt_that_no_turn_begins_with(turn, prompt):
    template = loop(turn, "{% if add_generation_prompt %}" + prompt + "{% endif %}")
    assert refusal(template, [USER, ANSWER]) == ("messages[1]", "header not found")
    assert load_template(make_tokenizer(template)).header("user").plain is None


OLD = "{% if m.role == 'user' %}[user]{% elif loop.last %}LAST{% else %}[old]{% endif %}"


def test_a_header_of_the_last_turn_alone():
    prompt = "{% if add_generation_prompt %}<|asst|>{% endif %}"
    template = loop(OLD.replace("LAST", "<|asst|>") + "{{ m.content }}</s>", prompt)
    assert trained(template, [USER, ANSWER]) == ["two</s>"]
    assert refusal(template, CHAT) == ("messages[1]", "header not found")
    assert trained(template, CHAT, train_on="last") == ["two</s>"]
    # Neither is what generation is given.
    template = loop(OLD.replace("LAST", "<new>") + "{{ m.content }}</s>", prompt)
    assert refusal(template, [USER, ANSWER]) == ("messages[1]", "header not found")
    # No generation prompt: earlier turns say what a header is, and an empty one is none.
    template = loop(OLD.replace("LAST", "<new>") + "{{ m.content }}</s>", "")
    assert refusal(template, [USER, ANSWER]) == ("messages[1]", "header not found")
    template = loop(OLD.replace("[old]", "").replace("LAST", "<new>") + "{{ m.content }}</s>", "")
    with pytest.raises(ValueError, match=r"last answer begins with '<new>'.*generation tags"):
        trained(template, [USER, ANSWER])


@pytest.mark.parametrize(
    ("prompt", "turn", "expected"),
    [
        # The prompt opens a thought, or closes it; turns have none, or an empty one.
        ("<assistant><think>\n", "{{ m.content }}", "two</s>"),
        ("<assistant><think>\n", "</think>{{ m.content }}", "</think>two</s>"),
        ("<assistant></think>", "<think></think>{{ m.content }}", "<think></think>two</s>"),
        ("<assistant>[THINK]", "[/THINK]{{ m.content }}", "[/THINK]two</s>"),
        ("<assistant>", "<channel>{{ m.content }}", "<channel>two</s>"),
    ],
)
def test_a_prompt_that_says_how_to_think(prompt, turn, expected):
    template = loop(
        "<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% else %}" + turn + "{% endif %}"
        "</s>",
        "{% if add_generation_prompt %}" + prompt + "{% endif %}",
    )
    assert trained(template, CHAT) == [expected, expected]


# Tool calls.


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*several, content=""):
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(several)}]


CALLS = "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
CALLED = loop("<{{ m.role }}>{{ m.content }}" + CALLS + "{% endfor %}</s>")
LOST = ("messages[1].tool_calls[0]", "tool calls not rendered")


def test_a_call_that_is_left_out():
    """Though the function's name is in what is said, or in the header."""
    template = loop("<{{ m.role }}>{{ m.content }}</s>")
    assert refusal(template, calls(call("look", {}), content="I look.")) == LOST
    assert refusal(template, calls(call("assist", {}))) == LOST
    # A second one, of the same function.
    template = loop(
        "<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}</s>"
    )
    assert trained(template, calls(call("f", {"k": "v"}))) == ['f{"k": "v"}</s>']
    assert refusal(template, calls(call("f", {}), call("s", {}))) == (
        "messages[1].tool_calls[1]",
        "tool calls not rendered",
    )


def test_a_calls_arguments_that_are_left_out():
    only = "{% if k == 'probe_key' or k == 'a' %}{{ k }}={{ v }}{% endif %}"
    template = loop(
        "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}" + only + "{% endfor %}{% endfor %}</s>"
    )
    where = ("messages[1].tool_calls[0].function.arguments", "tool calls not rendered")
    assert refusal(template, calls(call("f", {"a": "x", "b": "lost"}))) == where
    assert refusal(template, calls(call("f", {"a": "x", "b": ["y", {"c": 725}]}))) == where
    assert trained(template, calls(call("f", {"a": "x"}))) == ["fa=x</s>"]


@pytest.mark.parametrize(
    "form",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments | tojson(ensure_ascii=true) }}",
        "{{ {'arguments': c.function.arguments | tojson} | tojson }}",  # JSON within JSON
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | string | trim }}{% endfor %}",
        "{{ c }}",  # as Python writes it: the arguments are given as JSON text
    ],
)
def test_arguments_in_any_form_are_no_error(form):
    template = loop(
        "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} "
        + form
        + "{% endfor %}</s>"
    )
    arguments = {
        "text": ' "é"\n\\ it\'s ',
        "numbers": [1, 2.5, 1e30],
        "others": {"yes": True, "none": None, "empty": ""},
    }
    assert len(trained(template, calls(call("f", arguments)))) == 1


def test_two_calls_of_one_function():
    assert trained(CALLED, calls(call("f", {"k": 1}), call("f", {"k": 2}))) == [
        'f {"k": 1}f {"k": 2}</s>'
    ]


def test_what_is_said_beside_a_call_is_not_taken_for_it():
    said = calls(call("get_weather", {"city": "Rome"}), content="get")
    assert trained(CALLED, said) == ['getget_weather {"city": "Rome"}</s>']
    first = loop("<{{ m.role }}>" + CALLS + "{% endfor %}{{ m.content }}</s>")
    assert trained(first, said) == ['get_weather {"city": "Rome"}get</s>']
    # The thought, which names the function, is left out.
    strips = CALLED.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    said = calls(call("look", {}), content="<think>I look.</think>Well")
    assert trained(strips, said) == ["Welllook {}</s>"]


# What others say.

PHI3 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n"
    "<|assistant|>\n{% elif m.role == 'assistant' %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)


def test_a_template_that_leaves_out_the_systems_message():
    system = {"role": "system", "content": "Be brief."}
    assert trained(PHI3, CHAT) == ["two<|end|>", "two<|end|>"]
    for use in (trained, lambda template, chat: render_prompt(make_tokenizer(template), chat[:2])):
        with pytest.raises(BadRowError, match=r"leaves this out, got 'Be brief\.'") as caught:
            use(PHI3, [system, *CHAT])
        assert caught.value.reason == "content not rendered"
        assert caught.value.column.endswith("[0].content")


def test_a_template_that_leaves_out_a_tools_answer():
    template = loop(
        "{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}" + CALLS + "{% endfor %}</s>"
        "{% endif %}"
    )
    messages = [*calls(call("f", {})), {"role": "tool", "content": '{"t": 21}'}, ANSWER]
    lost = ("messages[2].content", "content not rendered")
    assert refusal(template, messages) == lost
    assert refusal(template, messages, train_on="last") == lost


def test_a_template_that_leaves_out_a_user():
    template = "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    messages = [{**USER, "content": "first"}, ANSWER, USER, ANSWER]
    assert refusal(template + GENERATION, messages, train_on="last") == (
        "messages[0].content",
        "content not rendered",
    )


@pytest.mark.parametrize(
    "said",
    [
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ {'content': m.content} | tojson(ensure_ascii=true) }}",
        "{{ m.content.replace('\n', ' ') }}",
        "{{ m.content.split('\n')[-2] }}",
    ],
)
def test_templates_that_change_what_others_say_are_no_error(said):
    template = loop("<{{ m.role }}>" + said + CALLS + "{% endfor %}</s>")
    template = template.replace(
        "<{{", "{% if m.role == 'assistant' %}<assistant>{{ m.content }}{% else %}<{{", 1
    ).replace(said, said + "{% endif %}", 1)
    tool = {"role": "tool", "content": ' {"é": [\n1] \n'}
    messages = [*calls(call("f", {})), tool, ANSWER]
    messages[0] = {"role": "user", "content": "  many\nlines\n "}
    assert trained(template, messages) == ["f {}</s>", "two</s>"]


def test_a_system_message_that_is_moved_is_no_error():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index == 4 and "
        "messages[0].role == 'system' %}"
        "{{ messages[0].content | trim }}\n\n{% endif %}{{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert trained(template, [{"role": "system", "content": " Be brief. "}, *CHAT]) == [
        " two</s>",
        " two</s>",
    ]


# Ends.

SAID = "<{{ m.role }}>{{ m.content }}"
NEXT = "{% if m.role == 'user' and not loop.first %}GAP</s>{% endif %}"


@pytest.mark.parametrize("gap", ["", " \n"])
def test_an_end_that_comes_out_behind_the_turn(gap):
    end = "{% if add_generation_prompt %}<assistant>{% else %}" + gap + "</s>{% endif %}"
    # Behind the loop: the last turn alone has one.
    assert trained(loop(SAID, end), [USER, ANSWER]) == [f"two{gap}</s>"]
    assert trained(loop(SAID, end), CHAT) == ["two", f"two{gap}</s>"]
    # In the next iteration, and behind the last.
    template = loop(NEXT.replace("GAP", gap) + SAID, end)
    assert trained(template, CHAT) == [f"two{gap}</s>", f"two{gap}</s>"]
    assert trained(template, CHAT, train_on="last") == [f"two{gap}</s>"]
    # Every turn begins with the end of the one before: a header has it, too.
    template = loop(
        "{% if not loop.first %}" + gap + "</s>{% endif %}" + SAID,
        "{% if add_generation_prompt %}" + gap + "</s><assistant>{% else %}</s>{% endif %}",
    )
    assert trained(template, CHAT) == [f"two{gap}</s>", "two</s>"]


def test_what_is_no_end_of_the_turn():
    # The turn has one.
    end = "{% if add_generation_prompt %}<assistant>{% else %}</s>{% endif %}"
    assert trained(loop(SAID + "<|end|>\n", end), CHAT) == ["two<|end|>", "two<|end|>"]
    # Text is between them.
    template = loop(SAID + "\n", end.replace("</s>", "Bye</s>"))
    assert trained(template, CHAT) == ["two\n", "two\n"]
    # Another special token, which begins the user's turn: GLM-4 stops at it.
    template = loop("{% if m.role == 'user' %}<|end|>{% endif %}" + SAID)
    assert trained(template, CHAT) == ["two", "two"]
    # A tokenizer without EOS.
    tokenizer = make_tokenizer(loop(SAID, end), eos_token=None)
    assert trained("", [USER, ANSWER], tokenizer=tokenizer) == ["two"]


# Variables.


def test_misspelt_variables():
    template = "{% if enable_thinking is defined and enable_thinking %}!{% endif %}" + loop(
        "<{{ m.role }}>{{ m.content }}</s>"
    )
    tokenizer = make_tokenizer(template)
    kwargs = {"chat_template_kwargs": {"enable_thinkin": True}}
    message = r"must be variables .*\['enable_thinking'\], got 'enable_thinkin'; did you mean 'enab"
    with pytest.raises(ValueError, match=message) as caught:
        trained(template, CHAT, **kwargs)
    assert not isinstance(caught.value, BadRowError)
    with pytest.raises(ValueError, match=message):
        render_prompt(tokenizer, [USER], **kwargs)
    with pytest.raises(ValueError, match=r"got 'zzz'; drop it"):
        render_prompt(tokenizer, [USER], chat_template_kwargs={"zzz": 1})
    known = {"chat_template_kwargs": {"enable_thinking": True}}
    assert trained(template, CHAT, **known) == ["two</s>", "two</s>"]


def test_variables_that_a_template_also_sets_are_known():
    sets = "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}"
    sets += "{% set mode = mode | default('slow') %}{{ mode }}"
    tokenizer = make_tokenizer(sets + loop("<{{ m.role }}>{{ m.content }}</s>"))
    template = load_template(tokenizer, None, {"date": "now", "mode": "fast"})
    assert template.render([USER]).text.startswith("nowfast<user>")


def test_variables_of_the_template_for_tools():
    plain = loop("<{{ m.role }}>{{ m.content }}</s>")
    tokenizer = make_tokenizer({"default": plain, "tool_use": "{{ tools }}{{ style }}" + plain})
    load_template(tokenizer, None, {"style": 1})
    load_template(tokenizer, None, {"style": 1}, tools=True)
    with pytest.raises(ValueError, match="got 'style'"):
        load_template(tokenizer, "default", {"style": 1})


@pytest.mark.parametrize("name", ["add_generation_prompt", "messages", "tools"])
def test_variables_that_other_arguments_give(name):
    template = loop("<{{ m.role }}>{{ m.content }}</s>")
    with pytest.raises(ValueError, match=rf"must leave alone what other .*got '{name}'; drop it"):
        trained(template, CHAT, chat_template_kwargs={name: True})


def test_a_turn_of_weight_0_needs_no_tags():
    template = loop(
        "<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}"
        "</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}"
    )
    untagged = {**ANSWER, "weight": 0}
    assert trained(template, [USER, untagged, USER, ANSWER]) == ["two</s>"]
    assert refusal(template, CHAT) == ("messages[1]", "not rendered once")
