"""``burnish data inspect``: open, encode, show."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import burnish_data.sources
from burnish_data._arguments import format_name
from burnish_data.chat_template import load_template
from burnish_data.encode import encode_chats
from burnish_data.files import open_rows
from burnish_data.formats import (
    alpaca,
    guess_format,
    labelled,
    openai_chat,
    preference,
    preference_columns,
    prompt_response,
    ranked,
    sharegpt,
)
from burnish_data.inspect import Inspection, inspect_rows, visible
from burnish_data.inspect_html import inspection_html
from burnish_data.multimodal import encode_images, has_images
from burnish_data.rows import BadRowError, Rows
from burnish_data.tasks import encode_labels, encode_preferences, encode_rankings
from rich.console import Console
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from burnish_apps.data.terminal import print_inspection
from burnish_apps.shell.config import ConfigError, blame
from burnish_apps.shell.run import EXIT_FAILED, EXIT_OK

EXIT_BROKEN_PIPE = 141  # what a shell reports of a program that the signal SIGPIPE ended: 128 + 13
LOOKED_AT = 100  # rows that are searched for the columns

Format = Callable[[dict[str, Any]], Any]
FORMATS: dict[str, Format] = {
    "openai": openai_chat,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "prompt_response": prompt_response(),
    "preference": preference,
    "ranked": ranked,
    "labelled": labelled,
}


class PlainConsole(Console):
    """A console that leaves a reader's end to its caller."""

    def on_broken_pipe(self) -> None:
        """Rich's own would end the process as failed."""
        raise BrokenPipeError


def run(options: argparse.Namespace) -> int:
    """Inspect as the command line says; returns the exit code.

    Raises:
        ConfigError: a file, a tokenizer, a template or an option that cannot be used.
        BadRowError: a bad row, with ``--on-bad-row error``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    try:
        inspection = inspect(options)
        if options.html:
            options.html.write_text(inspection_html(inspection), encoding="utf-8")
        console = PlainConsole(highlight=False, emoji=False, markup=False)
        print_inspection(inspection, console, edges=options.token_edges)
        if options.html:
            console.print(f"page: {visible(str(options.html))}", soft_wrap=True)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        # Python flushes the output once more at its end, which must not fail aloud.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return EXIT_OK if len(inspection.lengths) else EXIT_FAILED


def inspect(options: argparse.Namespace) -> Inspection:
    """What is found in the rows that the options name."""
    check_html(options.html, options.source)
    check_source(options.source)
    check_tokenizer_place(options.tokenizer)
    with blame("--tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    check_template(options, tokenizer)
    records = opened(options)
    records = records[: options.rows] if options.rows else records
    form = format_of(options, records)
    rows = records.map(form)
    return inspect_rows(
        rows,
        Encoder(tokenizer, options),
        tokenizer,
        name=options.source,
        form=form_text(form, records),
        num_shown=options.show,
        on_bad_row=options.on_bad_row,
        max_length=options.max_length,
        show_progress=sys.stderr.isatty(),
    )


def opened(options: argparse.Namespace) -> Rows[dict[str, Any]]:
    """The records of the source; where it has another split alone, the error says so."""
    with blame("source"):
        try:
            return open_rows(options.source, split=options.split, config=options.config)
        except ValueError as error:
            only = re.search(r"pass split='([^']+)'|Should be one of \['([^']+)'\]", str(error))
            if only is None:
                raise
            name = only[1] or only[2]
            raise ConfigError(
                [
                    f"--split: must be one that {options.source} has, got {options.split!r}; pass "
                    f"--split {name}"
                ]
            ) from error


def check_source(source: str) -> None:
    """Files, folders and hub ids, and no names of Python's."""
    if Path(source).exists():
        return
    if source in burnish_data.sources.__all__ or re.fullmatch(r"[\w.]+:\w+", source):
        raise ConfigError(
            [
                f"source: must be a file, a folder or a data set's id on the hub, got {source!r}, "
                "which is Python's; write its rows as JSON lines and name that file"
            ]
        )


def check_tokenizer_place(name: str) -> None:
    """A folder that is there, or a hub id."""
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(
            [f"--tokenizer: must be a folder, got the file {name!r}; name the folder it is in"]
        )
    if not path.exists() and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise ConfigError([f"--tokenizer: must be a folder that is there, got {name!r}"])


def check_template(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    """What can be said of the options of encoding before a row is read."""
    if options.max_length == 1:
        raise ConfigError(
            ["--max-length: max_length must be at least 2 tokens, as the first is not trained"]
        )
    template = options.chat_template
    # A name may be one of a processor's.
    if template and ("{" in template or template.endswith(".jinja")):
        with blame("--chat-template"):
            load_template(tokenizer, template, variables(options.chat_template_kwargs), tools=False)


def check_html(page: Path | None, source: str) -> None:
    """Whether the page can be written, and is not the data itself."""
    if page is None:
        return
    if page.suffix.lower() not in (".html", ".htm"):
        raise ConfigError([f"--html: must end in .html, got {str(page)!r}; rename it"])
    if page.is_dir() or not page.parent.is_dir() or not os.access(page.parent, os.W_OK):
        raise ConfigError(
            [f"--html: must be a file in a folder that can be written to, got {str(page)!r}"]
        )
    if page.exists() and Path(source).exists() and page.samefile(source):
        raise ConfigError(["--html: must be another file than the data, got the same"])


def format_of(options: argparse.Namespace, records: Rows[dict[str, Any]]) -> Format:
    """The function that makes this library's rows of the records."""
    if options.columns:
        wanted = {2: "prompt_response", 3: "preference"}.get(len(options.columns))
        if wanted is None:
            raise ConfigError(
                [
                    "--columns: must be two names (prompt, response) or three (prompt, chosen, "
                    f"rejected), got {len(options.columns)}"
                ]
            )
        if options.format not in ("auto", wanted):
            raise ConfigError(
                [f"--columns: belongs to --format {wanted}, got --format {options.format}"]
            )
        if wanted == "preference":
            prompt, chosen, rejected = options.columns
            return preference_columns(prompt=prompt, chosen=chosen, rejected=rejected)
        return prompt_response(*options.columns)
    if options.format != "auto":
        return FORMATS[options.format]
    with blame("--format"):
        return guess_format(columns_of(records))


def form_text(form: Format, records: Rows[dict[str, Any]]) -> str:
    """The form, and the columns that the rows have."""
    try:
        columns = columns_of(records)
    except ValueError:
        return format_name(form)
    return f"{format_name(form)}, of the columns {', '.join(columns)}"


def columns_of(records: Rows[dict[str, Any]]) -> list[str]:
    """The columns of the first record that can be read."""
    error: BadRowError | None = None
    for index in range(min(len(records), LOOKED_AT)):
        try:
            return sorted(records[index])
        except BadRowError as bad:
            error = error or bad.at(records.where(index))
    if error is None:
        raise ValueError("there must be a row to tell the form from, got none")
    raise ValueError(f"one of the first rows must be readable to tell the form, got: {error}")


class Encoder:
    """Rows of any task as token ids, each as its kind is trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._processor: Any = None
        self._common: dict[str, Any] = {
            "max_length": options.max_length,
            "too_long": options.too_long,
            "chat_template": options.chat_template,
            "chat_template_kwargs": variables(options.chat_template_kwargs),
        }

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | BadRowError]:
        """What becomes of each row; rows of one kind go to the tokenizer together."""
        kinds = [kind_of(row) for row in rows]
        results: dict[int, Any] = {}
        for kind in sorted(set(kinds)):
            indices = [index for index, each in enumerate(kinds) if each == kind]
            # Rows that cannot be used come back as errors; what is raised is of the options.
            with blame("--tokenizer, --chat-template or --max-length"):
                encoded = self._encode(kind, [rows[index] for index in indices])
            results.update(zip(indices, encoded, strict=True))
        return [results[index] for index in range(len(rows))]

    def _encode(self, kind: str, rows: list[Any]) -> Sequence[Any]:
        if kind == "images":
            return list(self._with_images(rows))
        if kind == "messages":
            return encode_chats(
                rows, self._tokenizer, train_on=self._options.train_on, **self._common
            )
        encode: Any = {
            "chosen": encode_preferences,
            "completions": encode_rankings,
            "completion": encode_labels,
        }[kind]
        encoded: Sequence[Any] = encode(rows, self._tokenizer, **self._common)
        return encoded

    def _with_images(self, rows: list[Any]) -> Iterator[Mapping[str, Any] | BadRowError]:
        if self._processor is None:
            with blame("--tokenizer: rows with images must have a processor"):
                self._processor = AutoProcessor.from_pretrained(self._options.tokenizer)
        for row in rows:
            try:
                yield encode_images(
                    row,
                    self._processor,
                    train_on=self._options.train_on,
                    image_folder=self._options.image_folder,
                    **self._common,
                )
            except BadRowError as error:
                yield error


def kind_of(row: Mapping[str, Any]) -> str:
    """By which of its columns a row is told apart."""
    if has_images(row):
        return "images"
    return next(name for name in ("messages", "chosen", "completions", "completion") if name in row)


def variables(text: str | None) -> dict[str, Any] | None:
    """The JSON object of ``--chat-template-kwargs``."""
    if text is None:
        return None
    with blame("--chat-template-kwargs"):
        made = json.loads(text)
        if not isinstance(made, dict):
            raise ValueError(f"must be a JSON object, got {text!r}")
    return made
