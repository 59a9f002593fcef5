"""An inspection as one page that needs no network and runs no script."""

from __future__ import annotations

import html
from collections.abc import Iterable

from burnish_data.inspect import (
    REPEATS_SHOWN,
    Bin,
    Inspection,
    ShownRow,
    ShownText,
    length_histogram,
    runs_of,
    skipped_text,
    visible,
)

# Nothing may be loaded or run, whatever the rows hold; the page's own style alone is let in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --trained: #b7e4c7; --partly: #fff3b0; --edge: #8888; }
@media (prefers-color-scheme: dark) { :root { --trained: #1b5e3a; --partly: #5c4d00; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--edge);
  border-radius: 6px; padding: .8rem; font-size: 14px; }
mark { background: var(--trained); color: inherit; }
mark.weighted { background: var(--partly); }
table { border-collapse: collapse; }
td, th { padding: .1rem .8rem .1rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: #4c78a8; height: .9rem; min-width: 1px; }
.warning { border: 2px solid #d00; border-radius: 6px; padding: .5rem .8rem; font-weight: bold; }
.where, .note { opacity: .75; }
body:has(#edges:checked) pre i { box-shadow: inset 1px 0 var(--edge); }
i { font-style: normal; }
""".strip()
_BAR_REM = 24.0  # the longest bar


def inspection_html(inspection: Inspection) -> str:
    """The inspection as a whole HTML document.

    Trained tokens are marked, those of another weight than 1 in another colour with the weight as
    their title; a box shows the edges of tokens. Everything that comes from the rows, names of
    files too, is escaped, and the page's policy forbids scripts and loading from anywhere.
    """
    name = _escape(inspection.name)
    body = [
        f"<h1>{name}</h1>",
        *([f'<p class="note">form: {_escape(inspection.form)}</p>'] if inspection.form else []),
        *([f'<p class="warning">{inspection.warning}</p>'] if inspection.warning else []),
        _summary(inspection),
        *(_lengths(inspection) if len(inspection.lengths) else []),
        *_skipped(inspection),
        *(_conversations(inspection) if inspection.shown else []),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{name}</title>",
            f"<style>\n{_STYLE}\n</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>",
            "",
        ]
    )


def _escape(text: str) -> str:
    return html.escape(visible(text), quote=True)


def _summary(inspection: Inspection) -> str:
    tokens, trained = int(inspection.lengths.sum()), int(inspection.trained.sum())
    share = f" ({trained / tokens:.1%})" if tokens else ""
    limit = "" if inspection.max_length is None else f" at {inspection.max_length:,} tokens"
    return _table(
        [
            ("rows read", f"{inspection.num_rows:,}"),
            ("rows skipped", skipped_text(inspection)),
            ("sequences", f"{len(inspection.lengths):,}"),
            (f"truncated{limit}", f"{inspection.num_truncated:,}"),
            ("tokens", f"{tokens:,}"),
            ("trained tokens", f"{trained:,}{share}"),
        ]
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = [f'<tr><th>{name}</th><td class="number">{value}</td></tr>' for name, value in rows]
    return "\n".join(["<table>", *lines, "</table>"])


def _lengths(inspection: Inspection) -> list[str]:
    bins = length_histogram(inspection.lengths)
    largest = max(each.count for each in bins)
    return [
        "<h2>Lengths in tokens</h2>",
        "<table>",
        *(_bar(each, largest) for each in bins),
        "</table>",
    ]


def _bar(each: Bin, largest: int) -> str:
    width = _BAR_REM * each.count / largest
    bar = f'<div class="bar" style="width: {width:.2f}rem"></div>' if each.count else ""
    return (
        f'<tr><td class="number">{each.low:,} to {each.high:,}</td>'
        f'<td class="number">{each.count:,}</td><td>{bar}</td></tr>'
    )


def _skipped(inspection: Inspection) -> list[str]:
    lines: list[str] = []
    for reason, count in inspection.skipped.counts.most_common():
        examples = inspection.skipped.examples.get(reason, [])
        lines += [
            f"<h3>{_escape(reason)}: {count:,}</h3>",
            "<ul>",
            *(f"<li>{_escape(example)}</li>" for example in examples),
            "</ul>",
        ]
    return ["<h2>Skipped rows</h2>", *lines] if lines else []


def _conversations(inspection: Inspection) -> list[str]:
    return [
        "<h2>Conversations</h2>",
        '<p class="note"><mark>Trained</mark> tokens are marked, '
        '<mark class="weighted">those of another weight than 1</mark> apart. '
        '<label><input type="checkbox" id="edges"> show the edges of tokens</label></p>',
        *(line for row in inspection.shown for line in _row(row)),
    ]


def _row(row: ShownRow) -> list[str]:
    lines = [f'<h3 class="where">{_escape(row.where)}</h3>']
    for text in row.texts:
        lines += [f'<p class="note">{_escape(_caption(text))}</p>', f"<pre>{_marked(text)}</pre>"]
    return lines


def _caption(text: ShownText) -> str:
    name = f"{text.name}: " if text.name else ""
    cut = ", truncated" if text.truncated else ""
    return f"{name}{text.num_tokens:,} tokens, {text.num_trained:,} trained{cut}"


def _marked(text: ShownText) -> str:
    """The text with runs of equal weight marked; the first line end is doubled for `pre`."""
    parts: list[str] = []
    for weight, texts in runs_of(text.pieces):
        inner = "".join(_repeated(*each) for each in texts)
        if weight == 0:
            parts.append(inner)
        elif weight == 1:
            parts.append(f"<mark>{inner}</mark>")
        else:
            parts.append(f'<mark class="weighted" title="weight {weight:g}">{inner}</mark>')
    return "\n" + "".join(parts)


def _repeated(text: str, times: int) -> str:
    """A token's text as often as it comes, or once and the number."""
    shown = f"<i>{_escape(text)}</i>"
    if times <= REPEATS_SHOWN:
        return shown * times
    return f'{shown}<span class="note"> &times; {times:,}</span>'
