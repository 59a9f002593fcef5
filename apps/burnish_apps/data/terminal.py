"""An inspection as text: coloured on a terminal, with brackets elsewhere."""

from __future__ import annotations

from burnish_data.inspect import (
    REPEATS_SHOWN,
    Inspection,
    ShownText,
    length_histogram,
    runs_of,
    skipped_text,
    visible,
)
from rich.console import Console
from rich.style import Style
from rich.text import Text

TRAINED = Style(color="green", bold=True)
WEIGHTED = Style(color="yellow", bold=True)
ALARM = Style(color="red", bold=True)
QUIET = Style(dim=True)
BAR_CHARACTERS = 40
EXAMPLES_SHOWN = 3


def print_inspection(inspection: Inspection, console: Console, *, edges: bool = False) -> None:
    """Conversations first, since a terminal shows the end: then lengths, sums, what was skipped.

    Args:
        inspection: what was found.
        console: where to; its colours are used if it has any (NO_COLOR, pipes and dumb terminals
            have none, then trained text stands in brackets).
        edges: a bar between tokens.
    """
    if inspection.form:
        _say(console, Text(visible(f"form: {inspection.form}"), style=QUIET))
        _say(console, Text())
    for row in inspection.shown:
        for text in row.texts:
            _say(console, Text(f"{visible(row.where)}: {caption(text)}", style=QUIET))
            shown = marked(text, console, edges=edges)
            _say(console, shown)
            if not shown.plain.endswith("\n"):
                _say(console, Text())
    if inspection.shown:
        _say(console, legend(console))
        _say(console, Text())
    for line in [*histogram_lines(inspection, console), *summary_lines(inspection)]:
        _say(console, Text(visible(line)))
    if inspection.warning:
        _say(console, Text())
        _say(console, Text(inspection.warning, style=ALARM))


def caption(text: ShownText) -> str:
    """Which sequence of its row it is, and how long."""
    name = f"{visible(text.name)}, " if text.name else ""
    cut = ", truncated" if text.truncated else ""
    return f"{name}{text.num_tokens:,} tokens, {text.num_trained:,} trained{cut}"


def marked(text: ShownText, console: Console, *, edges: bool = False) -> Text:
    """The text with its trained runs marked."""
    opening, closing, edge, times = signs(console)
    shown = Text()
    for weight, texts in runs_of(text.pieces):
        is_weighted = weight not in (0, 1)
        style = Style() if weight == 0 else WEIGHTED if is_weighted else TRAINED
        tokens = [
            visible(token)
            for token, count in texts
            for token in ([token] * count if count <= REPEATS_SHOWN else [f"{token}{times}{count}"])
        ]
        run = (edge if edges else "").join(tokens)
        if weight and not has_colour(console):
            run = f"{opening}{f'{weight:g}: ' if is_weighted else ''}{run}{closing}"
            style = Style()
        elif edges and shown and has_colour(console):  # a bracket is an edge, too
            shown.append(edge, QUIET)
        shown.append(run, style)
    return shown


def legend(console: Console) -> Text:
    """How trained tokens are marked."""
    if has_colour(console):
        return Text.assemble(("trained", TRAINED), ", ", ("trained with another weight", WEIGHTED))
    opening, closing, _, _ = signs(console)
    return Text(f"{opening}trained{closing}, {opening}0.5: trained with weight 0.5{closing}")


def has_colour(console: Console) -> bool:
    """Whether colours will be seen."""
    return console.color_system is not None and not console.no_color


def signs(console: Console) -> tuple[str, str, str, str]:
    """Brackets, the edge of a token, and "times"."""
    return ("[[", "]]", "|", " x ") if is_ascii(console) else ("⟦", "⟧", "│", " \u00d7 ")


def is_ascii(console: Console) -> bool:
    """Whether the console cannot write other than ASCII."""
    return not console.encoding.lower().startswith("utf")


def histogram_lines(inspection: Inspection, console: Console) -> list[str]:
    """Lengths in tokens, a bar for each bin."""
    bins = length_histogram(inspection.lengths)
    if not bins:
        return []
    block = "#" if is_ascii(console) else "█"
    most = max(each.count for each in bins)
    ranges = [f"{each.low:,} to {each.high:,}" for each in bins]
    width, digits = max(map(len, ranges)), len(f"{most:,}")
    lines = [
        f"  {name:>{width}}  {each.count:>{digits},}  {block * bar(each.count, most)}".rstrip()
        for name, each in zip(ranges, bins, strict=True)
    ]
    return ["lengths in tokens:", *lines, ""]


def bar(count: int, most: int) -> int:
    """Characters of a bar; what is there at all has one."""
    return max(round(BAR_CHARACTERS * count / most), 1) if count else 0


def summary_lines(inspection: Inspection) -> list[str]:
    """Sums, and what was skipped with the first places."""
    lengths, skipped = inspection.lengths, inspection.skipped
    tokens, trained = int(lengths.sum()), int(inspection.trained.sum())
    limit = "" if inspection.max_length is None else f" at {inspection.max_length:,} tokens"
    share = f" ({trained / tokens:.1%})" if tokens else ""
    lines = [
        f"{inspection.name}:",
        f"  rows read       {inspection.num_rows:,}",
        f"  sequences       {len(lengths):,}",
        f"  tokens          {tokens:,}",
        f"  trained tokens  {trained:,}{share}",
        f"  truncated       {inspection.num_truncated:,}{limit}",
        f"  rows skipped    {skipped_text(inspection)}",
    ]
    for reason, count in skipped.counts.most_common():
        lines.append(f"    {count:,} {reason}, for example:")
        examples = skipped.examples.get(reason, [])[:EXAMPLES_SHOWN]
        lines += [f"      {' '.join(example.split())}" for example in examples]
    return lines


def _say(console: Console, text: Text) -> None:
    # Wrapped by the terminal, if at all: a pipe gets the lines as they are.
    console.print(text, soft_wrap=True)
