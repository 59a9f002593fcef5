"""Chat templates: which one, what it is given, and where an assistant's turn begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.exceptions import SecurityError

from burnish_data._render_checks import check_reasoning, check_rendered
from burnish_data._template_forms import (
    CONTENT,
    REASONING_NAMES,
    TEMPLATE_ERRORS,
    THOUGHT,
    TOOL,
    Form,
    Header,
    begins_to_speak,
    check_variables,
    common_prefix,
    find_header,
    probe_call,
)
from burnish_data._template_spans import Rendered, compile_template, render, template_variables
from burnish_data.messages import validate_messages
from burnish_data.rows import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Mapping[str, object]] | str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | Path | None = None,
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
        tools: JSON schemas of what the assistant may call.
        chat_template: see `find_template`.
        chat_template_kwargs: further variables of the template (`enable_thinking=False`); names
            that it does not have are an error.

    Raises:
        ValueError: no template, a template that refuses the messages, or an empty prompt.
    """
    if isinstance(prompt, str):
        token_ids = tokenizer(prompt)["input_ids"]
    else:
        messages = validate_messages(prompt, where="prompt")
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                "A prompt must end where the assistant is to speak, got one whose last message is "
                "the assistant's; drop that message."
            )
        template = load_template(tokenizer, chat_template, chat_template_kwargs, tools=bool(tools))
        text = template.render(messages, tools, add_generation_prompt=True).text
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not token_ids:
        raise ValueError(f"A prompt must have at least one token, got none from {prompt!r}.")
    return list(token_ids)


def find_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | Path | None, *, tools: bool = False
) -> str:
    """A template's source.

    Args:
        tokenizer: may have one template, several by name, or none.
        chat_template: Jinja; or the name of one of the tokenizer's; or a file (a path, or text
            that ends with ".jinja"); None is the tokenizer's own.
        tools: where the tokenizer has several, its "tool_use" is taken for chats with tools.

    Raises:
        ValueError: there is no such template.
    """
    own = tokenizer.chat_template
    names = sorted(own) if isinstance(own, dict) else []
    if chat_template is None:
        if not own:
            raise ValueError(
                "Messages need a chat template and this tokenizer has none; pass chat_template, "
                "or raw text as the prompt."
            )
        return str(tokenizer.get_chat_template(None, tools=[{}] if tools else None))
    if isinstance(chat_template, str) and chat_template in names:
        return str(own[chat_template])
    if isinstance(chat_template, Path) or chat_template.endswith(".jinja"):
        path = Path(chat_template).expanduser()
        if not path.is_file():
            raise ValueError(
                f"A chat template's file must exist, got {str(path)!r}; check the path."
            )
        return path.read_text(encoding="utf-8")
    if "{{" not in chat_template and "{%" not in chat_template:
        raise ValueError(
            "chat_template must be Jinja, a file that ends with .jinja, or one of the tokenizer's "
            f"names {names}, got {chat_template!r}; check the spelling."
        )
    return chat_template


def load_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: bool = False,
) -> ChatTemplate:
    """A template with its variables, the tokenizer's special tokens among them.

    Raises:
        ValueError: there is no such template, it is no Jinja, or it has no such variables.
    """
    source = find_template(tokenizer, chat_template, tools=tools)
    variables = {**tokenizer.special_tokens_map, **(chat_template_kwargs or {})}
    template = _load(source, _Variables(variables), tools)
    own = tokenizer.chat_template
    # One that is for tools may know more than the one for chats without, and has the same kwargs.
    several = own.values() if chat_template is None and isinstance(own, dict) else ()
    check_variables(chat_template_kwargs or {}, [source, *several])
    return template


class _Variables:
    """Variables of a template that a cache can tell apart."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.key = repr(sorted(values.items(), key=lambda item: item[0]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Variables) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=64)
def _load(source: str, variables: _Variables, tools: bool) -> ChatTemplate:
    try:
        compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"A chat template must be Jinja, got an error in its line {error.lineno}: {error}; "
            "correct the template."
        ) from error
    return ChatTemplate(source, variables.values, tools)


class ChatTemplate:
    """A template with its variables; made by `load_template`, which keeps it.

    What it needs to know of the template it learns from short conversations ("probes"), each
    rendered once. The sandbox keeps a template from Python's insides, not from running long or
    taking much memory: a template is a program, to be taken from whom one trusts.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tools: bool) -> None:
        self.source, self.variables, self.tools = source, variables, tools
        self.takes_tools = "tools" in template_variables(source)
        self._headers: dict[str, Header] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Checked messages as text, with each one's place.

        Raises:
            BadRowError: the template refuses the messages, or leaves out tools, tool calls or what
                the assistant says.
            ValueError: the template renders no text at all, or does what the sandbox forbids.
        """
        has_calls = any("tool_calls" in message for message in messages)
        form = self._call_form if has_calls else self._text_form
        has_reasoning = any("reasoning_content" in message for message in messages)
        reasoning = self._reasoning_name if has_reasoning else None
        try:
            rendered = self._render(
                [form.of(message, reasoning) for message in messages], tools, add_generation_prompt
            )
        except SecurityError as error:
            raise ValueError(
                f"The chat template must render in Jinja's sandbox, but it failed with: {error}; "
                "change the template."
            ) from error
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in messages]
            raise BadRowError(
                f"messages that the chat template must render, but it failed with: {error}",
                roles,
                column="messages",
                reason="refused by the chat template",
            ) from error
        if tools and not self.takes_tools:
            raise BadRowError(
                "no tools, as the chat template has no place for them; pass a template that has",
                [tool.get("function", tool).get("name") for tool in tools],
                column="tools",
                reason="tools not rendered",
            )
        if has_calls:
            self._check_calls(messages)
        check_rendered(messages, rendered)
        if has_reasoning and not add_generation_prompt:  # of a prompt, nothing is trained
            check_reasoning(messages, rendered, is_known=reasoning is not None)
        return rendered

    def header(self, after: str) -> Header:
        """The header of an assistant's turn that comes after a message of this role.

        Raises:
            ValueError: the template refuses the simplest conversation.
        """
        if after not in self._headers:
            self._headers[after] = self._find_header(after)
        return self._headers[after]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> Rendered:
        variables = {
            "tools": list(tools) if tools else None,
            "documents": None,
            **self.variables,
            "add_generation_prompt": add_generation_prompt,
        }
        return render(self.source, messages, variables)

    def _find_header(self, after: str) -> Header:
        history: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        if after == "tool":
            history.append({"role": "assistant", "content": "", "tool_calls": [probe_call()]})
            history.append({"role": "tool", "content": "b", "tool_call_id": probe_call()["id"]})
        try:
            return self._probe_header(history)
        except TEMPLATE_ERRORS as error:
            if after != "user":
                return self.header("user")
            raise ValueError(
                "A chat template must render a user's message, an assistant's and a user's, but it "
                f"failed with: {error}; change the template, or add generation tags to it."
            ) from error

    def _probe_header(self, history: list[dict[str, Any]]) -> Header:
        answer = {"role": "assistant", "content": CONTENT}
        form = self._call_form if len(history) > 1 else self._text_form
        answered = [form.of(message) for message in [*history, answer, history[0]]]
        history = answered[: len(history)]
        tools = [TOOL] if self.tools else None
        whole = self._render(answered, tools, False)
        places = [turn.start for turn in whole.turns if turn.message == len(history)]
        if len(places) != 1:
            raise ValueError("the assistant's message is not rendered once")
        turn = whole.text[places[0] :]
        if CONTENT not in turn:
            raise ValueError("the assistant's content is not rendered")
        prompt = self._render(history, tools, True).text
        has_history = any(turn.message == len(history) - 1 for turn in whole.turns)
        if has_history and prompt.startswith(whole.text[: places[0]]):
            header = prompt[places[0] :]
        else:  # the last user's message is rendered otherwise, or no more
            unprompted = self._render(history, tools, False).text
            header = prompt[len(common_prefix(prompt, unprompted)) :]
        found = find_header(header, turn)
        self._check_last(found, answered[:-1], len(history), tools)
        return found

    def _check_last(
        self,
        header: Header,
        answered: Sequence[Mapping[str, Any]],
        number: int,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """The answer at the end: an empty header must be right there, too."""
        last = self._render(answered, tools, False)
        turns = [last.text[t.start : t.end] for t in last.turns if t.message == number]
        if len(turns) != 1 or CONTENT not in turns[0]:
            return
        if header.length(turns[0]) == 0 and not begins_to_speak(turns[0].lstrip()):
            raise ValueError(
                f"the last answer begins with {turns[0].partition(CONTENT)[0]!r}, which is neither "
                "in the generation prompt nor in earlier answers"
            )

    @cached_property
    def _text_form(self) -> Form:
        """Text as it is, unless only lists of parts come out (SmolVLM, LLaVA).

        Letters are no parts: such a template leaves them out, and says nothing.
        """
        failures = 0
        for form in (Form(), Form(content_as_parts=True)):
            roles = ("user", "assistant")
            messages = [form.of({"role": role, "content": CONTENT}) for role in roles]
            try:
                text = self._render(messages, [TOOL] if self.tools else None, False).text
            except TEMPLATE_ERRORS:
                failures += 1
                continue
            if CONTENT in text and "'type': 'text'" not in text:  # parts as Python writes them
                return form
        if failures == 2:
            return Form()  # the template refuses the row, too, and says why
        raise ValueError(
            "A chat template must render the text of messages, but of a user's message and an "
            "assistant's it renders none, neither as text nor as a list of parts; change it."
        )

    @cached_property
    def _call_form(self) -> Form:
        forms = [
            replace(self._text_form, arguments_as_text=as_text, content_is_none=is_none)
            for as_text in (False, True)
            for is_none in (False, True)
        ]
        return next(filter(self._renders_calls, forms), self._text_form)

    def _renders_calls(self, form: Form) -> bool:
        """Whether tool calls of this form come out, and not as Python writes them."""
        text = self._probe_calls(form, 1)
        words = ("probe_name", "probe_key", "probe_value")
        return text is not None and "'probe_key'" not in text and all(w in text for w in words)

    def _probe_calls(self, form: Form, count: int) -> str | None:
        """Text of a message with so many calls; None where the template refuses it."""
        calls = [probe_call(number + 1) for number in range(count)]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        history = [form.of({"role": "user", "content": "a"}), form.of(call)]
        try:
            return self._render(history, [TOOL] if self.tools else None, False).text
        except TEMPLATE_ERRORS:
            return None

    @cached_property
    def _calls_rendered(self) -> int | None:
        """How many calls of one message come out; None is all, also if probes are refused."""
        for count in (1, 2):
            text = self._probe_calls(self._call_form, count)
            if text is not None and probe_call(count)["function"]["name"] not in text:
                return count - 1
        return None

    def _check_calls(self, messages: Sequence[Mapping[str, Any]]) -> None:
        most = self._calls_rendered
        for number, message in enumerate(messages):
            calls = message.get("tool_calls", [])
            if most is not None and len(calls) > most:
                raise BadRowError(
                    "tool calls that the chat template renders, but it leaves this one out",
                    calls[most]["function"]["name"],
                    column=f"messages[{number}].tool_calls[{most}]",
                    reason="tool calls not rendered",
                )

    @cached_property
    def _reasoning_name(self) -> str | None:
        """The template's name for what the assistant thought; None if it renders no thought.

        Some render a thought in the last turn alone, some beside tool calls alone.
        """
        said = {"role": "assistant", "content": CONTENT}
        called = {"role": "assistant", "content": "", "tool_calls": [probe_call()]}
        for name in REASONING_NAMES:
            for form, answer in ((self._text_form, said), (self._call_form, called)):
                answer = {**answer, "reasoning_content": THOUGHT}
                history = [form.of({"role": "user", "content": "a"}), form.of(answer, name)]
                try:
                    text = self._render(history, [TOOL] if self.tools else None, False).text
                except TEMPLATE_ERRORS:
                    continue
                if THOUGHT in text:
                    return name
        return None
