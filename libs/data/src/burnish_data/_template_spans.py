"""Rendering a chat template while noting which text belongs to which message.

Jinja renders piece by piece. A template is compiled with calls put at the beginning and the end of
every loop's body; when one of them is made, all text before it has come out, so that its place is
known. A message's turn is the text that comes out while the loop variable *is* that message.
`{% generation %}` tags are noted in the same way.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from burnish_data.rows import BadRowError

# Names that a template does not use. What is called are filters: Jinja calls these as they are,
# and a function only after the sandbox has looked at it, which takes longer than the call.
_RESERVED = "_burnish_"
_RECORDER = f"{_RESERVED}recorder"
_ENTER, _LEAVE = f"{_RESERVED}enter", f"{_RESERVED}leave"
_BEGIN, _END = f"{_RESERVED}generation_begins", f"{_RESERVED}generation_ends"
# What these hold is collected before it comes out: where it will stand is not known inside.
_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


class Turn(NamedTuple):
    """A stretch of text: `text[start:end]` is of message number `message` (-1: not known)."""

    message: int
    start: int
    end: int


@dataclass
class Rendered:
    """A conversation's text and where its messages stand in it.

    `turns` are in the order in which they begin; a turn within another comes after it. Turns of
    white space alone are left out: a template may go through the messages for other ends.
    """

    text: str
    turns: list[Turn]
    generations: list[Turn]  # of `{% generation %}` tags
    has_buffered_turns: bool  # a macro, say, went through the messages: places are not known


@dataclass
class _Recorder:
    """What the calls in a template note: places as how many pieces of text have come out."""

    numbers: dict[int, int]  # id(message) -> its number
    pieces: list[str] = field(default_factory=list)
    has_buffered_turns: bool = False
    turns: list[Turn] = field(default_factory=list)
    generations: list[Turn] = field(default_factory=list)
    # Per loop that is being gone through: its number, the message (or None), where it began and its
    # place among the turns.
    open: list[tuple[int, int | None, int, int]] = field(default_factory=list)
    generation_open: tuple[int, int] | None = None

    def enter(self, value: object, loop: int, is_buffered: bool) -> None:
        # Identity, not equality: two messages may say the same.
        number = self.numbers.get(id(value))
        if is_buffered:
            self.has_buffered_turns |= number is not None
            return
        place = len(self.pieces)
        self.open.append((loop, number, place, len(self.turns)))
        if number is not None:
            self.turns.append(Turn(number, place, place))

    def leave(self, loop: int, is_buffered: bool) -> None:
        if not is_buffered:
            opened, number, start, place = self.open.pop()
            assert opened == loop
            if number is not None:
                self.turns[place] = Turn(number, start, len(self.pieces))

    def generation_begins(self, is_buffered: bool) -> None:
        if is_buffered or self.generation_open is not None:
            raise jinja2.TemplateError(
                "generation tags inside a macro, a call, a filter, a set block or each other "
                "cannot be placed in the text; move them out"
            )
        numbers = [number for _, number, _, _ in self.open if number is not None]
        self.generation_open = (numbers[-1] if numbers else -1, len(self.pieces))

    def generation_ends(self) -> None:
        assert self.generation_open is not None
        self.generations.append(Turn(*self.generation_open, len(self.pieces)))
        self.generation_open = None

    def rendered(self) -> Rendered:
        """All of it, with places as how many characters have come out."""
        text = "".join(self.pieces)
        ends = [0, *itertools.accumulate(map(len, self.pieces))]
        turns = [Turn(number, ends[start], ends[end]) for number, start, end in self.turns]
        generations = [Turn(n, ends[start], ends[end]) for n, start, end in self.generations]
        return Rendered(
            text,
            [turn for turn in turns if text[turn.start : turn.end].strip()],
            [turn for turn in generations if turn.end > turn.start],
            self.has_buffered_turns,
        )


@jinja2.pass_context
def _enter(context: Context, value: object, loop: int, is_buffered: bool) -> None:
    context.parent[_RECORDER].enter(value, loop, is_buffered)


@jinja2.pass_context
def _leave(context: Context, loop: int, is_buffered: bool) -> None:
    context.parent[_RECORDER].leave(loop, is_buffered)


@jinja2.pass_context
def _generation_begins(context: Context, is_buffered: bool) -> None:
    context.parent[_RECORDER].generation_begins(is_buffered)


@jinja2.pass_context
def _generation_ends(context: Context, _: object) -> None:
    context.parent[_RECORDER].generation_ends()


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: what the assistant said."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own type)

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, as the tag has in transformers: what is set inside is not known outside.
        return [
            _call(_BEGIN, nodes.Const(False)).set_lineno(line),
            nodes.Scope(body).set_lineno(line),
            _call(_END, nodes.Const(None)).set_lineno(line),
        ]


class _NoteLoops(NodeTransformer):
    """Put the recorder's calls into every loop over single values."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.loop: int | None = None  # the innermost one, if it is noted
        self.is_buffered = False

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(node, _BUFFERED):
            return super().visit(node, *args, **kwargs)
        outside = (self.loop, self.is_buffered)
        self.loop, self.is_buffered = None, True
        visited = super().visit(node, *args, **kwargs)
        self.loop, self.is_buffered = outside
        return visited

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        outside = (self.loop, self.is_buffered)
        # `else` is outside: a `continue` there belongs to the loop around this one.
        node.else_ = self._visit_all(node.else_)
        self.is_buffered |= node.recursive
        self.loop = next(self.numbers) if isinstance(node.target, nodes.Name) else None
        node.body = self._visit_all(node.body)
        if self.loop is not None:
            value = nodes.Name(node.target.name, "load")  # type: ignore[attr-defined]
            enter = _call(
                _ENTER, value, nodes.Const(self.loop), nodes.Const(self.is_buffered)
            ).set_lineno(node.lineno)
            node.body = [enter, *node.body, self._leave(node)]
        self.loop, self.is_buffered = outside
        return node

    def visit_Continue(self, node: nodes.Continue) -> Any:  # noqa: N802
        return node if self.loop is None else [self._leave(node), node]

    def visit_Break(self, node: nodes.Break) -> Any:  # noqa: N802
        return node if self.loop is None else [self._leave(node), node]

    def visit_ExprStmt(self, node: nodes.ExprStmt) -> nodes.Node:  # noqa: N802
        # Ours alone: `do` is no statement of chat templates.
        if self.is_buffered and isinstance(node.node, nodes.Filter) and node.node.name == _BEGIN:
            return _call(_BEGIN, nodes.Const(True)).set_lineno(node.lineno)
        return node

    def _leave(self, node: nodes.Node) -> nodes.Node:
        call = _call(_LEAVE, nodes.Const(self.loop), nodes.Const(self.is_buffered))
        return call.set_lineno(node.lineno)

    def _visit_all(self, body: list[nodes.Node]) -> list[nodes.Node]:
        visited: list[nodes.Node] = []
        for child in body:
            new = self.visit(child)
            visited.extend(new if isinstance(new, list) else [new])
        return visited


def _call(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.ExprStmt:
    return nodes.ExprStmt(nodes.Filter(first, name, list(others), [], None, None))


_DICT_ATTRIBUTES = frozenset(dir(dict))
_PLAIN_TYPES = (str, Namespace, LoopContext)


class _Environment(ImmutableSandboxedEnvironment):
    """Chat templates as transformers renders them, with the recorder's calls.

    The sandbox keeps Python's insides out of a template's reach. It bounds no cost: a template may
    run as long, and take as much memory, as it likes.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters |= {
            _ENTER: _enter,
            _LEAVE: _leave,
            _BEGIN: _generation_begins,
            _END: _generation_ends,
        }
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The sandbox first looks for an attribute of Python's and catches that there is none: most
        # of the time that a template takes.
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in _PLAIN_TYPES:  # what the sandbox finds of these, sooner
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # By `map`, which takes a filter's name from anywhere.
        if name.startswith(_RESERVED):
            raise SecurityError(f"access to filter {name!r} is unsafe.")
        return super().call_filter(name, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if _RESERVED in source:
            line = source[: source.index(_RESERVED)].count("\n") + 1
            raise jinja2.TemplateSyntaxError(
                f"names that begin with {_RESERVED!r} are not for templates", line
            )
        template: nodes.Template = _NoteLoops().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """A template, compiled once for each source. Raises jinja2.TemplateSyntaxError."""
    return _Environment().from_string(source)


@lru_cache(maxsize=64)
def template_variables(source: str) -> frozenset[str]:
    """The names that a template takes from outside."""
    return frozenset(meta.find_undeclared_variables(_Environment().parse(source)))


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> Rendered:
    """Render a conversation with the template's source.

    Args:
        template: Jinja, rendered in its sandbox.
        messages: as the template is to see them; each a different object.
        variables: all others (`tools`, `add_generation_prompt`, `bos_token`, ...).

    Raises:
        jinja2.TemplateError: or whatever else the template stumbles over.
    """
    recorder = _Recorder({id(message): number for number, message in enumerate(messages)})
    compiled = compile_template(template)
    context = compiled.new_context(
        {**variables, "messages": list(messages), _RECORDER: recorder},
    )
    append = recorder.pieces.append
    for piece in compiled.root_render_func(context):
        append(piece)
    return recorder.rendered()


def places_of(rendered: Rendered, num_messages: int) -> dict[int, list[Turn]]:
    """Every message's turns, of which there should be one."""
    places: dict[int, list[Turn]] = {number: [] for number in range(num_messages)}
    for turn in rendered.turns:
        places[turn.message].append(turn)
    return places


def place_of(number: int, places: Mapping[int, list[Turn]], rendered: Rendered) -> Turn:
    """A message's one turn.

    Raises:
        BadRowError: it has none, or several.
        ValueError: the template puts text together where places are not known.
    """
    turns = places[number]
    if len(turns) == 1:
        return turns[0]
    if not turns and rendered.has_buffered_turns:
        raise ValueError(
            "The place of every message in the text must be known, but the chat template goes "
            "through the messages in a macro, a call, a filter, a set block or a recursive loop; "
            "put {% generation %} and {% endgeneration %} around what the assistant says."
        )
    raise _not_once(
        "a message that the chat template renders once (if it puts messages together itself, add "
        "{% generation %} and {% endgeneration %} to it)",
        f"{len(turns)} turns of it",
        f"messages[{number}]",
    )


def generations_of(
    rendered: Rendered, assistants: Sequence[int], wanted: Sequence[int]
) -> list[Turn]:
    """What `{% generation %}` tags say of the wanted ones of the assistant's messages.

    Raises:
        BadRowError: a wanted message has no tags, or it is not known whose some are.
    """
    turns = rendered.generations
    if any(turn.message < 0 for turn in turns):  # the loop is not over the messages: by their order
        if len(turns) != len(assistants):
            raise _not_once(
                "as many {% generation %} blocks as the assistant has messages",
                f"{len(turns)} for {len(assistants)}",
                "messages",
            )
        turns = [Turn(n, t.start, t.end) for n, t in zip(assistants, turns, strict=True)]
    missing = set(wanted) - {turn.message for turn in turns}
    if missing:
        raise _not_once(
            "a {% generation %} block for every message of the assistant",
            "none",
            f"messages[{min(missing)}]",
        )
    return [turn for turn in turns if turn.message in wanted]


def _not_once(expected: str, got: str, column: str) -> BadRowError:
    return BadRowError(expected, got, column=column, reason="not rendered once")
