"""``burnish data inspect``: open, encode, show."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish_data.encode import encode_chats
from burnish_data.files import open_rows
from burnish_data.formats import (
    alpaca,
    guess_format,
    labelled,
    openai_chat,
    preference,
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
    with blame("--tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    with blame("source"):
        records = open_rows(options.source, split=options.split, config=options.config)
    records = records[: options.rows] if options.rows else records
    rows = records.map(format_of(options, records))
    return inspect_rows(
        rows,
        Encoder(tokenizer, options),
        tokenizer,
        name=options.source,
        num_shown=options.show,
        on_bad_row=options.on_bad_row,
        max_length=options.max_length,
        show_progress=sys.stderr.isatty(),
    )


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
        if options.format not in ("auto", "prompt_response"):
            raise ConfigError(
                [f"--columns: belongs to --format prompt_response, got --format {options.format}"]
            )
        return prompt_response(*options.columns)
    if options.format != "auto":
        return FORMATS[options.format]
    with blame("--format"):
        return guess_format(columns_of(records))


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
