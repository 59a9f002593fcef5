"""Chat templates: which one, what it is given, and where an assistant's turn begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.exceptions import SecurityError

from burnish_data._template_spans import Rendered, compile_template, render, template_variables
from burnish_data.messages import validate_messages
from burnish_data.rows import BadRowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template may stumble over in a row: it is a program, and not ours.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# A character of private use: no template has it, so that nothing else looks like this content.
_CONTENT = "\ue000"
_CALL = {
    "id": "probe0001",  # nine letters and digits, as Mistral's templates demand
    "type": "function",
    "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


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
        chat_template_kwargs: further variables of the template (`enable_thinking=False`).

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
        ValueError: there is no such template, or it is no Jinja.
    """
    source = find_template(tokenizer, chat_template, tools=tools)
    variables = {**tokenizer.special_tokens_map, **(chat_template_kwargs or {})}
    return _load(source, _Variables(variables), tools)


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


@dataclass(frozen=True)
class _CallForm:
    """How a template wants an assistant's tool calls; templates of the hub differ."""

    arguments_as_text: bool
    content_is_none: bool  # where the assistant only calls tools

    def of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fields = {key: value for key, value in message.items() if key != "weight"}
        calls = fields.get("tool_calls")
        if calls and self.arguments_as_text:
            fields["tool_calls"] = [
                {**call, "function": _with_text(call["function"])} for call in calls
            ]
        if calls and self.content_is_none and fields["content"] == "":
            fields["content"] = None
        return fields


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


_PLAIN = _CallForm(arguments_as_text=False, content_is_none=False)
_CALL_FORMS = [
    _PLAIN,
    _CallForm(arguments_as_text=False, content_is_none=True),
    _CallForm(arguments_as_text=True, content_is_none=False),
    _CallForm(arguments_as_text=True, content_is_none=True),
]


@dataclass(frozen=True)
class Header:
    """What stands at the beginning of an assistant's turn and is not the assistant's.

    `prompt` is all that generation would be given there; `plain` is the part of it that a turn has
    which thinks otherwise than the generation prompt says.
    """

    prompt: str
    plain: str

    def length(self, turn: str) -> int | None:
        """How many characters of a turn's text are its header; None if it has another."""
        lengths = [len(text) for text in (self.prompt, self.plain) if turn.startswith(text)]
        return lengths[0] if lengths else None


class ChatTemplate:
    """A template with its variables; made by `load_template`, which keeps it.

    What it needs to know of the template it learns from short conversations ("probes"), each
    rendered once.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tools: bool) -> None:
        self.source, self.variables, self.tools = source, variables, tools
        self.takes_tools = "tools" in template_variables(source)
        self._headers: dict[str, Header] = {}
        self._form: _CallForm | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Checked messages as text, with each one's place.

        Raises:
            BadRowError: the template refuses the messages, or leaves tools or tool calls out.
            ValueError: the template does what the sandbox forbids.
        """
        form = self._call_form() if any("tool_calls" in m for m in messages) else _PLAIN
        try:
            rendered = self._render(
                [form.of(message) for message in messages], tools, add_generation_prompt
            )
        except SecurityError as error:
            raise ValueError(
                f"The chat template must render in Jinja's sandbox, but it failed with: {error}; "
                "change the template."
            ) from error
        except _TEMPLATE_ERRORS as error:
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
        _check_calls(messages, rendered)
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
            "add_generation_prompt": add_generation_prompt,
            **self.variables,
        }
        return render(self.source, messages, variables)

    def _find_header(self, after: str) -> Header:
        history: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        if after == "tool":
            calls = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
            history.append(self._call_form().of(calls))
            history.append({"role": "tool", "content": "b", "tool_call_id": _CALL["id"]})
        tools = [_TOOL] if self.tools else None
        failure: Exception | None = None
        for content in (_CONTENT, [{"type": "text", "text": _CONTENT}]):
            if not isinstance(content, str):  # some templates know nothing but parts
                history = [
                    {**message, "content": [{"type": "text", "text": "a"}]} for message in history
                ]
            try:
                return self._probe_header(history, content, tools)
            except _TEMPLATE_ERRORS as error:
                failure = failure or error
        if after != "user":
            return self.header("user")
        raise ValueError(
            "A chat template must render a user's message, an assistant's and a user's, but it "
            f"failed with: {failure}; change the template, or add generation tags to it."
        ) from failure

    def _probe_header(
        self, history: list[dict[str, Any]], content: Any, tools: list[dict[str, Any]] | None
    ) -> Header:
        answered = [
            *history,
            {"role": "assistant", "content": content},
            {**history[0]},
        ]
        whole = self._render(answered, tools, False)
        places = [turn.start for turn in whole.turns if turn.message == len(history)]
        if len(places) != 1:
            raise ValueError("the assistant's message is not rendered once")
        turn = whole.text[places[0] :]
        if _CONTENT not in turn or "'type':" in turn:  # parts as Python writes them
            raise ValueError("the assistant's content is not rendered")
        prompt = self._render(history, tools, True).text
        if prompt.startswith(whole.text[: places[0]]):
            header = prompt[places[0] :]
        else:  # the last user's message is rendered otherwise
            unprompted = self._render(history, tools, False).text
            header = prompt[len(_common_prefix(prompt, unprompted)) :]
        if not header:
            # No generation prompt: is there a header all the same?
            before = turn.partition(_CONTENT)[0]
            return Header(before, before) if before.strip() else Header("", "")
        return Header(header, _whole_tags(_common_prefix(header, turn)))

    def _call_form(self) -> _CallForm:
        if self._form is None:
            self._form = next(filter(self._renders_calls, _CALL_FORMS), _PLAIN)
        return self._form

    def _renders_calls(self, form: _CallForm) -> bool:
        """Whether tool calls of this form come out, and not as Python writes them."""
        message = form.of({"role": "assistant", "content": "", "tool_calls": [_CALL]})
        history = [{"role": "user", "content": "a"}, message]
        try:
            text = self._render(history, [_TOOL] if self.tools else None, False).text
        except _TEMPLATE_ERRORS:
            return False
        is_python = "'probe_key'" in text
        is_there = all(word in text for word in ("probe_name", "probe_key", "probe_value"))
        return is_there and not is_python


def _common_prefix(one: str, other: str) -> str:
    length = next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return one[:length]


def _whole_tags(text: str) -> str:
    """Without the beginning of a tag at its end: <think> and </think> both begin with "<"."""
    begins = text.rfind("<")
    return text[:begins] if begins > text.rfind(">") else text


def _check_calls(messages: Sequence[Mapping[str, Any]], rendered: Rendered) -> None:
    """A template that knows no tool calls leaves them out, and says nothing."""
    for number, message in enumerate(messages):
        for index, call in enumerate(message.get("tool_calls", ())):
            said = [rendered.text[t.start : t.end] for t in rendered.turns if t.message == number]
            text = "".join(said) or rendered.text
            name = call["function"]["name"]
            if name not in text:
                raise BadRowError(
                    "tool calls that the chat template renders, but it leaves this one out",
                    name,
                    column=f"messages[{number}].tool_calls[{index}]",
                    reason="tool calls not rendered",
                )
            content = message["content"]
            # Thoughts may be left out, of earlier turns say.
            if isinstance(content, str) and content.split("</think>")[-1].strip() not in text:
                raise BadRowError(
                    "content that the chat template renders beside tool calls, but it leaves this "
                    "out",
                    content,
                    column=f"messages[{number}].content",
                    reason="content not rendered",
                )
