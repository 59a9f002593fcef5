"""Where messages stand in the text of a template."""

import pytest
from burnish_data import BadRowError
from burnish_data._template_spans import Turn, compile_template, render
from burnish_data.chat_template import load_template
from burnish_data.encode import Span, render_chat
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "one"},  # says what another says, and is another
    {"role": "assistant", "content": "two"},
]
HEADED = "<{{ m.role }}>{{ m.content }}</s>"
GENERATION = "{% if add_generation_prompt %}<assistant>{% endif %}"


def make_tokenizer(template):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def texts_of(template, messages=CHAT, **variables):
    rendered = render(template, messages, variables)
    return [(turn.message, rendered.text[turn.start : turn.end]) for turn in rendered.turns]


def trained(template, messages=CHAT, **options):
    chat = render_chat({"messages": messages}, make_tokenizer(template), **options)
    return [chat.text[span.start : span.end] for span in chat.spans if span.weight]


PLAIN = [
    (0, "<system>s</s>"),
    (1, "<user>one</s>"),
    (2, "<assistant>two</s>"),
    (3, "<user>one</s>"),
    (4, "<assistant>two</s>"),
]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}" + HEADED + "{% endfor %}",
        "{{ bos_token }}{% set l = messages %}{% for m in l %}" + HEADED + "{% endfor %}the end",
        # A slice, a filter and a condition of the loop keep the messages.
        "{% for m in messages[:] | list if m.content %}" + HEADED + "{% endfor %}",
        # Another loop goes through the messages and says nothing but white space.
        "{% for m in messages %} {% set x = m %} {% endfor %}{% for m in messages %}"
        + HEADED
        + "{% endfor %}",
        # Loops inside a turn.
        "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c }}{% endfor %}</s>"
        "{% endfor %}",
        # The loop's variable gets another value.
        "{% for m in messages %}{% set m = {'role': m.role, 'content': m.content} %}"
        + HEADED
        + "{% endfor %}",
        # continue and break
        "{% for m in messages %}"
        + HEADED
        + "{% if m.role == 'user' %}{% continue %}{% endif %}{% endfor %}",
        "{% for m in messages %}" + HEADED + "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        # A macro that is called in a turn.
        "{% macro say(m) %}" + HEADED + "{% endmacro %}{% for m in messages %}{{ say(m) }}"
        "{% endfor %}",
        # A loop inside a buffer that goes through the messages, too, and another outside.
        "{% set roles %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}"
        "{% for m in messages %}" + HEADED + "{% endfor %}",
    ],
)
def test_every_message_has_its_text(template):
    assert texts_of(template, bos_token="<s>") == PLAIN


def test_text_outside_the_loop_is_nobodys():
    rendered = render("ab{% for m in messages %}{{ m.content }}{% endfor %}cd", CHAT[:2], {})
    assert rendered.text == "absonecd"
    assert rendered.turns == [Turn(0, 2, 3), Turn(1, 3, 6)]


def test_continue_in_an_inner_loop_leaves_the_outer_one():
    template = (
        "{% for m in messages %}[{% for c in m.content %}{% if c == 'n' %}{% continue %}{% endif %}"
        "{% if c == 'w' %}{% break %}{% endif %}{{ c }}{% endfor %}]{% endfor %}"
    )
    assert texts_of(template) == [(0, "[s]"), (1, "[oe]"), (2, "[t]"), (3, "[oe]"), (4, "[t]")]


def test_continue_in_the_else_of_a_loop_belongs_to_the_loop_around_it():
    template = (
        "{% for m in messages %}<{{ m.content }}>{% for x in m.none %}{% else %}{% continue %}"
        "{% endfor %}never{% endfor %}"
    )
    assert texts_of(template)[:2] == [(0, "<s>"), (1, "<one>")]


@pytest.mark.parametrize(
    "template",
    [
        # What is set inside the tag is not known outside; trimmed as a block.
        "{% set x = 1 %}{% generation %}\n{% set x = 2 %}{{ x }}{% endgeneration %}\n{{ x }}",
        "{% for m in messages %}\n    {%- generation %}\n  {{ loop.index }}\n{% endgeneration -%}\n"
        "{% endfor %}",
        "{{ {'ä': '<&>', 'b': [1.5, none]} | tojson }}{{ [1] | tojson(indent=2) }}",
        "{{ strftime_now('%Y') }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}"
        "{% endif %}{{ i }}{% endfor %}",
        "  {% if true %}\n  a\n  {% endif %}\n",
        "{{ undefined_name }}{{ messages | length }}{{ tools }}{{ documents }}",
        "{% macro f(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call f(1) %}{{ bos_token }}"
        "{% endcall %}{% filter upper %}ab{% endfilter %}",
    ],
)
def test_the_text_is_that_of_transformers(template):
    tokenizer = make_tokenizer(template)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False)
    variables = {"add_generation_prompt": False, "tools": None, "documents": None}
    assert render(template, CHAT, {**tokenizer.special_tokens_map, **variables}).text == expected
    assert expected  # an empty text would say nothing


def test_a_macro_that_renders_all_messages_needs_generation_tags():
    body = "{% for m in messages %}" + HEADED + "{% endfor %}"
    for template in (
        "{% macro all() %}" + body + "{% endmacro %}{{ all() }}",
        "{% set all %}" + body + "{% endset %}{{ all }}",
        "{% filter trim %}" + body + "{% endfilter %}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}" + body + "{% endcall %}",
        "{% for m in messages recursive %}" + HEADED + "{% endfor %}",
    ):
        with pytest.raises(ValueError, match=r"in a macro, .* put {% generation %}") as caught:
            render_chat({"messages": CHAT}, make_tokenizer(template))
        assert not isinstance(caught.value, BadRowError)  # no row is better


def test_generation_tags_say_what_is_trained():
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    )
    assert trained(template) == ["two!", "two!"]
    assert trained(template, train_on="last") == ["two!"]
    chat = render_chat({"messages": CHAT}, make_tokenizer(template), train_on="last")
    assert chat.spans[0].start == chat.text.rindex("two!")
    weighted = [*CHAT[:2], {**CHAT[2], "weight": 0.5}, *CHAT[3:]]
    chat = render_chat({"messages": weighted}, make_tokenizer(template))
    assert [span.weight for span in chat.spans] == [0.5, 1.0]


def test_generation_tags_go_by_order_where_the_loop_is_over_numbers():
    template = (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ i }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert trained(template) == ["two2", "two4"]
    assert trained(template, train_on="last") == ["two4"]
    once = template.replace("== 'assistant'", "== 'assistant' and i > 2")
    with pytest.raises(BadRowError, match=r"as many {% generation %} blocks .*got '1 for 2'"):
        trained(once)


def test_a_turn_without_generation_tags_where_others_have_them():
    template = (
        "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert trained(template, train_on="last") == ["two"]
    with pytest.raises(BadRowError, match=r"messages\[2\]'.*block for every message.*got 'none'"):
        trained(template)


def test_generation_tags_whose_place_is_not_known():
    template = (
        "{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ f(m) }}{% endfor %}"
    )
    with pytest.raises(BadRowError, match="generation tags inside a macro"):
        trained(template)


def test_a_turn_that_is_left_out_or_comes_twice_is_an_error():
    headed = "{% for m in messages %}" + HEADED + "{% endfor %}"
    with pytest.raises(BadRowError, match=r"messages\[2\]'.*renders once.*got '2 turns of it'"):
        trained(headed + headed)
    with pytest.raises(BadRowError, match=r"messages\[2\]'.*renders once.*got '0 turns of it'"):
        trained("{% for m in messages[:2] + messages[3:] %}" + HEADED + "{% endfor %}" + GENERATION)
    # Messages that the template makes itself are not those of the chat.
    made = "{% for r in messages | map(attribute='content') %}{{ r }}{% endfor %}"
    with pytest.raises(BadRowError, match=r"messages\[2\]'.*add {% generation %}"):
        trained(made)


def test_one_that_is_not_trained_may_be_left_out():
    template = "{% for m in messages[-2:] %}" + HEADED + "{% endfor %}" + GENERATION
    with pytest.raises(BadRowError, match=r"messages\[2\]'"):
        trained(template)
    assert trained(template, train_on="last") == ["two</s>"]


def test_another_message_inside_a_turn_is_not_trained():
    """Some templates put a tool's answer into the turn of the assistant that called it."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
        "{% for t in messages if t.tool_call_id == c.id %}[{{ t.content }}]{% endfor %}{% endfor %}"
        "</s>{% endif %}{% endfor %}" + GENERATION
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"k": "v"}}}
    messages = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "said", "tool_call_id": "a"},
        CHAT[2],
    ]
    chat = render_chat({"messages": messages}, make_tokenizer(template))
    assert chat.text == '<user>one</s><assistant>f {"k": "v"}[said]</s><assistant>two</s>'
    assert chat.spans == [Span(24, 46, 1.0), Span(36, 42, 0.0), Span(57, 64, 1.0)]


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments }}",  # would be Python's form of an object
        "{{ '' + c.function.arguments }}",  # fails for an object
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
    ],
)
def test_arguments_are_json_whatever_form_a_template_wants(arguments):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.name }}" + arguments + "{% endfor %}</s>{% endfor %}" + GENERATION
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": ["é", None]}}}
    messages = [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained(template, messages) == ['f{"k": ["é", null]}</s>']


def test_a_template_that_wants_no_content_beside_calls():
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}</s>"
        "{% endfor %}" + GENERATION
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"k": 1}}}
    messages = [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained(template, messages) == ['{"name": "f", "arguments": {"k": 1}}</s>']


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The usual one, and what ends the turn is followed by white space of the template.
        ("<{{ m.role }}>{{ m.content }}</s>\n", ["two</s>", "two</s>"]),
        # No special token ends the turn: its white space does.
        ("<{{ m.role }}>{{ m.content }}\n\n", ["two\n\n", "two\n\n"]),
    ],
)
def test_where_a_turn_ends(template, expected):
    assert trained("{% for m in messages %}" + template + "{% endfor %}" + GENERATION) == expected


def test_a_header_that_generation_is_not_given():
    """A template that knows no generation prompt: what stands before the content."""
    assert trained("{% for m in messages %}" + HEADED + "{% endfor %}") == ["two</s>", "two</s>"]


def test_a_header_in_the_users_turn():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<assistant>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert trained(template) == ["two</s>", "two</s>"]


def test_content_that_begins_as_the_generation_prompt_goes_on():
    """The prompt gives a thought; an answer without one may begin with the same characters."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    for content, said in (
        ("<b>two</b>", "<b>two</b></s>"),
        ("<thin>", "<thin></s>"),
        # What the prompt gives is not trained where the turn has it.
        ("<think>hm", "hm</s>"),
    ):
        messages = [CHAT[1], {"role": "assistant", "content": content}]
        assert trained(template, messages) == [said]


def test_a_turn_that_begins_otherwise_is_an_error():
    template = (
        "{% for m in messages %}{% if m.name %}({{ m.name }}){% else %}<{{ m.role }}>{% endif %}"
        "{{ m.content }}</s>{% endfor %}" + GENERATION
    )
    named = [CHAT[1], {"role": "assistant", "content": "two", "name": "bob"}]
    with pytest.raises(BadRowError, match=r"begins as generation does \('<assistant>'\).*\(bob\)"):
        trained(template, named)


def test_a_template_that_renders_no_plain_chat_needs_generation_tags():
    """What generation is given is learnt from a plain conversation."""
    only = "{% if messages[0].content == 'a' %}{{ raise_exception('no probes') }}{% endif %}"
    headed = "{% for m in messages %}" + HEADED + "{% endfor %}"
    with pytest.raises(ValueError, match=r"failed with: no probes; change .* generation tags"):
        trained(only + headed)


def test_a_template_that_knows_nothing_but_parts():
    template = (
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text + '' }}{% endfor %}"
        "</s>{% endfor %}" + GENERATION
    )
    part = {"type": "image", "image": "a.png"}
    messages = [
        {"role": "user", "content": [part | {"text": ""}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "two"},
    ]
    with pytest.raises(BadRowError, match=r"text alone, as images need a processor"):
        trained(template, messages)
    header = load_template(make_tokenizer(template)).header("user")
    assert (header.prompt, header.plain) == ("<assistant>", "<assistant>")


def test_templates_are_compiled_once():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}once{{ fast }}"
    assert compile_template(source) is compile_template(source)
    tokenizer = make_tokenizer(source)
    assert load_template(tokenizer) is load_template(tokenizer)
    assert load_template(tokenizer) is not load_template(tokenizer, None, {"fast": True})
