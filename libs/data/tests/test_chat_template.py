import pytest
from burnish_data import render_prompt
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<unk>", "<bos>", "<eos>", "<turn>"]
WORDS = ["system", "user", "assistant", "be", "brief", "what", "is", "up", "think", "fast"]

# Each role's turn is `<turn> role words <eos>`.
TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant{% endif %}"
)


def make_tokenizer(
    *, template: str | None = TEMPLATE, adds_bos: bool = False, special: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with or without BOS from the template and the tokenizer."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL_TOKENS)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        chat_template=template,
        **(names if special else {}),
    )


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is up"},
]
# <turn> system be brief <eos> <turn> user what is up <eos> <turn> assistant
RENDERED = [3, 4, 7, 8, 2, 3, 5, 9, 10, 11, 2, 3, 6]
BOS = 1


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("template", "token_ids"),
    [
        (TEMPLATE, RENDERED),
        ("<bos> " + TEMPLATE, [BOS, *RENDERED]),
        ("{{ bos_token }} " + TEMPLATE, [BOS, *RENDERED]),
    ],
    ids=["none", "literal", "variable"],
)
def test_bos_is_the_templates_affair(template, token_ids, adds_bos):
    tokenizer = make_tokenizer(template=template, adds_bos=adds_bos)
    assert render_prompt(tokenizer, MESSAGES) == token_ids
    assert token_ids == tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )


def test_a_tokenizer_without_special_tokens():
    tokenizer = make_tokenizer(special=False)
    assert tokenizer.bos_token is None
    assert tokenizer.eos_token is None
    assert render_prompt(tokenizer, MESSAGES) == RENDERED


@pytest.mark.parametrize(("adds_bos", "token_ids"), [(False, [9, 10]), (True, [BOS, 9, 10])])
def test_raw_text_is_tokenised_as_the_tokenizer_does_it(adds_bos, token_ids):
    assert render_prompt(make_tokenizer(adds_bos=adds_bos), "what is") == token_ids


def test_raw_text_needs_no_template():
    assert render_prompt(make_tokenizer(template=None), "what is") == [9, 10]


def test_earlier_turns_are_rendered_as_the_template_likes_it():
    """A template may drop what an earlier turn thought: ids are the whole render's, not a sum."""
    template = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1].strip()")
    messages = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": "think </think> up"},
        {"role": "user", "content": "is"},
    ]
    token_ids = render_prompt(make_tokenizer(template=template), messages)
    assert token_ids == [3, 5, 9, 2, 3, 6, 11, 2, 3, 5, 10, 2, 3, 6]


def test_another_template_and_its_variables():
    template = "{{ messages[0]['content'] }}{% if fast %} fast{% endif %}"
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "think"}]
    assert render_prompt(tokenizer, messages, chat_template=template) == [12]
    assert render_prompt(
        tokenizer, messages, chat_template=template, chat_template_kwargs={"fast": True}
    ) == [12, 13]


def test_a_template_that_calls_python_is_refused():
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match=r"chat template must render .* unsafe"):
        render_prompt(make_tokenizer(template=template), MESSAGES)


def test_a_template_that_refuses_the_messages_is_quoted():
    template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"System role not supported.*\['system', 'user'\]"):
        render_prompt(make_tokenizer(template=template), MESSAGES)


def test_what_is_no_prompt_is_an_error():
    with pytest.raises(ValueError, match="this tokenizer has none"):
        render_prompt(make_tokenizer(template=None), MESSAGES)
    with pytest.raises(ValueError, match="must end where the assistant is to speak"):
        render_prompt(make_tokenizer(), [*MESSAGES, {"role": "assistant", "content": "up"}])
    with pytest.raises(ValueError, match="at least one token"):
        render_prompt(make_tokenizer(), "")
    with pytest.raises(ValueError, match=r"'prompt': expected a list of at least one message"):
        render_prompt(make_tokenizer(), [])
