"""Prompts as token ids."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jinja2

from burnish_data.messages import validate_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[Mapping[str, object]] | str,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """A prompt as the token ids after which a model answers.

    Messages are rendered once, by the template, up to the point where the assistant begins. The
    ids are exactly those of the rendered text: special tokens are the template's, and the tokenizer
    adds none, so that BOS never stands twice. Raw text is tokenised as the tokenizer does it,
    with the special tokens that it adds.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: messages, the last of them not the assistant's; or raw text.
        chat_template: a Jinja template, or the name of one of the tokenizer's; by default the
            tokenizer's own. It is rendered in Jinja's sandbox.
        chat_template_kwargs: further variables of the template (`enable_thinking=False`).

    Raises:
        ValueError: no template, a template that refuses the messages, or an empty prompt.
    """
    if isinstance(prompt, str):
        token_ids = tokenizer(prompt)["input_ids"]
    else:
        text = _render_text(tokenizer, prompt, chat_template, chat_template_kwargs or {})
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not token_ids:
        raise ValueError(f"A prompt must have at least one token, got none from {prompt!r}.")
    return list(token_ids)


def _render_text(
    tokenizer: "PreTrainedTokenizerBase",
    prompt: Sequence[Mapping[str, object]],
    chat_template: str | None,
    chat_template_kwargs: Mapping[str, Any],
) -> str:
    messages = validate_messages(prompt, where="prompt")
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "A prompt must end where the assistant is to speak, got one whose last message is the "
            "assistant's; drop that message."
        )
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            "Messages need a chat template and this tokenizer has none; pass chat_template, or "
            "raw text as the prompt."
        )
    try:
        text = tokenizer.apply_chat_template(
            cast(list[dict[str, str]], messages),
            chat_template=chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **chat_template_kwargs,
        )
    except jinja2.TemplateError as error:
        raise ValueError(
            f"The chat template must render the prompt, but it failed with: {error}; change the "
            f"messages or the template. The roles are {[m['role'] for m in messages]}."
        ) from error
    return cast(str, text)
