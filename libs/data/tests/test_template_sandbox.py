"""What Jinja's immutable sandbox refuses stays refused in our faster one."""

import pytest
from burnish_data import BadRowError
from burnish_data._template_spans import render
from burnish_data.encode import encode_chat
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

ASK = {"role": "user", "content": "what"}
SHORT = {"role": "assistant", "content": "down"}
CHAT = {"messages": [{"role": "system", "content": "be brief"}, ASK, SHORT, ASK, SHORT]}
MESSAGES = [{"role": "user", "content": "hi", "items": "of a message"}]


def make_tokenizer(template):
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", chat_template=template
    )


class Danger:
    """What a caller's variables may hold."""

    _hidden = "hidden"

    def burn(self):
        raise AssertionError("called")

    burn.unsafe_callable = True


def variables():
    return {"danger": Danger(), "mutable": [3, 1], "mapping": {"a": 1}, "several": {1, 2}}


REFUSED = [
    # Python's insides, by . and by [], of all that a template can reach.
    *(
        f"{{{{ {value}.__class__ }}}}"
        for value in ("''", "[]", "{}", "1", "()", "none", "messages")
    ),
    *(f"{{{{ {value}['__class__'] }}}}" for value in ("''", "[]", "{}", "1", "()", "danger")),
    "{{ messages[0].__class__ }}",
    "{{ messages[0]['__class__'] }}",
    "{{ messages[0].__class__.__mro__ }}",
    "{{ messages[0].content.__class__ }}",
    "{{ messages[0]['content']['__' ~ 'class__'] }}",
    "{{ messages[0].keys.__self__ }}",
    "{{ messages[0].content.upper.__self__ }}",
    "{{ danger._hidden }}",
    "{{ danger['_hidden'] }}",
    "{{ danger.burn() }}",
    "{{ namespace.__init__ }}",
    "{{ namespace(a=1).__class__ }}",
    "{{ namespace(a=1)['__class__'] }}",
    "{% set n = namespace(a=1) %}{{ n._Namespace__attrs }}",
    "{{ cycler.__init__ }}",
    "{{ cycler('a').__class__ }}",
    "{{ joiner.__init__ }}",
    "{{ joiner()['__init__'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ range.__globals__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% for m in messages %}{{ loop['__class__'] }}{% endfor %}",
    "{% for m in messages %}{{ loop._iterator }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__call__ }}",
    "{% macro f() %}{% endmacro %}{{ f._func }}",
    "{{ self.__init__ }}",
    # Formats.
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0.__class__}'.format(messages[0]) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ '{0[__class__]}'.format(danger) }}",
    "{{ '{0.__class__}'['format'](1) }}",
    "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "{{ '{0._hidden}'.format(danger) }}",
    # Changes.
    "{{ messages.append(1) }}",
    "{{ messages['append'](1) }}",
    "{{ messages.pop() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0]['update']({'role': 'x'}) }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{{ messages[0].clear() }}",
    "{{ messages[0].pop('role') }}",
    "{{ mutable.sort() }}",
    "{{ mutable.reverse() }}",
    "{{ (mutable | attr('clear'))() }}",
    "{{ mapping.popitem() }}",
    "{{ several.add(3) }}",
    # Filters that take attributes.
    "{{ '' | attr('__class__') }}",
    "{{ messages[0] | attr('__class__') }}",
    "{{ messages | map('attr', '__class__') | list | first }}",
    "{{ messages | map(attribute='__class__') | list | first }}",
    "{{ messages | map(attribute='content.__class__') | list | first }}",
    "{{ messages | selectattr('__class__.__mro__') | list }}",
    "{{ messages | groupby('content.__class__.x') }}",
    "{{ messages | sort(attribute='__class__.x') | list }}",
]


def outcome(rendering):
    try:
        return ("text", rendering())
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        return (type(error).__name__, str(error))


def plainly(template):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"raise_exception": print_nothing, "strftime_now": print_nothing}
    return environment.from_string(template).render(
        **variables(), messages=[dict(message) for message in MESSAGES]
    )


def print_nothing():
    """Stands for a function."""


def ours(template):
    given, messages = variables(), [dict(message) for message in MESSAGES]
    try:
        return render(template, messages, given).text
    finally:
        assert messages == MESSAGES
        assert given["mutable"] == [3, 1]
        assert given["mapping"] == {"a": 1}
        assert given["several"] == {1, 2}


@pytest.mark.parametrize("template", REFUSED)
def test_what_the_sandbox_refuses_is_refused(template):
    kind, said = outcome(lambda: ours(template))
    assert kind in ("SecurityError", "UndefinedError") or said in ("", "[]")
    theirs = outcome(lambda: plainly(template))
    assert theirs[0] == kind
    if kind == "text":
        assert theirs[1] == said


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].items }}",  # a method, not the key, as in plain Jinja
        "{{ messages[0]['items'] }}",
        "{{ messages[0].nothing }}|{{ messages[0].nothing is defined }}",
        "{{ messages[0].keys() | list }}",
        "{{ mapping.a }}{{ mapping.get('b', 2) }}",
        "{{ '{0} {a}'.format(1, a=messages[0].content) }}",
        "{{ 'a-b'.split('-')[1].upper() }}",
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}",
        "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ n.b }}",
        "{{ messages | map(attribute='content') | join }}",
    ],
)
def test_what_the_sandbox_allows_is_the_same(template):
    def tidy(result):
        return result[0], result[1].split(" at 0x")[0]

    found = tidy(outcome(lambda: ours(template)))
    assert found[0] == "text"
    assert found == tidy(outcome(lambda: plainly(template)))


def test_a_key_that_looks_like_pythons_is_no_way_in():
    message = {"role": "user", "content": "hi", "__class__": "mine", "_x": "under"}
    with pytest.raises(SecurityError):
        render("{{ messages[0].__class__.x }}", [message], {})
    # As items they are data, in plain Jinja as well.
    assert render("{{ messages[0]['__class__'] }}{{ messages[0]._x }}", [message], {}).text == (
        "mineunder"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ 5 | _burnish_enter(0, false) }}",
        "{{ 0 | _burnish_leave(false) }}",
        "{{ false | _burnish_generation_begins }}",
        "{{ none | _burnish_generation_ends }}",
        "{{ _burnish_recorder.leave(0, false) }}",
        "{% set _burnish_recorder = 1 %}",
        "{{ [0] | map('_burnish_leave', false) | list }}",
    ],
)
def test_the_recorders_names_are_not_for_templates(template):
    with pytest.raises(ValueError, match=r"error in its line 2: names that begin with '_burnish_'"):
        encode_chat({"messages": [ASK, SHORT]}, make_tokenizer("\n" + template))


def test_the_recorders_names_put_together():
    for name in ("leave', false", "generation_ends'"):
        template = "{{ [0] | map('_burn' ~ 'ish_" + name + ") | list }}"
        with pytest.raises(ValueError, match="must render in Jinja's sandbox"):
            encode_chat({"messages": [ASK, SHORT]}, make_tokenizer(template))


@pytest.mark.parametrize(
    "fault",
    [
        "{{ 'a' * 10 ** 18 }}",  # MemoryError
        "{{ 2.0 ** 5000 }}",  # OverflowError
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",  # RecursionError
    ],
)
def test_a_template_that_fails_on_a_row_is_that_rows_error(fault):
    template = (
        "{% if messages | length == 5 %}" + fault + "{% endif %}{% for m in messages %}<turn> "
        "{{ m.role }} {{ m.content }} <eos> {% endfor %}"
    )
    with pytest.raises(BadRowError) as caught:
        encode_chat(CHAT, make_tokenizer(template))
    assert caught.value.reason == "refused by the chat template"
