"""The arguments of ``burnish data``; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FORMATS = (
    "auto",
    "openai",
    "sharegpt",
    "alpaca",
    "prompt_response",
    "preference",
    "ranked",
    "labelled",
)
DESCRIPTION = """Show rows as a model will be trained on them.

Every row is read, rendered by the chat template and tokenised, as training does it. Shown are the
first conversations with their trained tokens marked (in colour on a terminal, in brackets
elsewhere), the lengths in tokens, and which rows were skipped and why."""


def add_data_command(commands: Any) -> None:
    """Add ``data`` with its commands to the command line."""
    data = commands.add_parser(
        "data",
        help="look at data before training on it",
        description="Look at data before training on it.",
        allow_abbrev=False,
    )
    inspect = data.add_subparsers(dest="command", required=True, metavar="command").add_parser(
        "inspect",
        help=DESCRIPTION.partition("\n")[0],
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    inspect.set_defaults(parser=inspect)
    inspect.add_argument("source", help="a file, a folder, or a data set's id on the hub")
    inspect.add_argument(
        "--tokenizer", required=True, help="a folder with a tokenizer (or processor), or a hub id"
    )
    _add_reading(inspect)
    _add_encoding(inspect)
    _add_showing(inspect)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="auto", help="default: by the columns")
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME",
        default=None,
        help="names of the columns: prompt and response, or prompt, chosen and rejected",
    )
    parser.add_argument("--split", default="train", help="default: train")
    parser.add_argument("--config", default=None, help="configuration of a data set of the hub")
    parser.add_argument("--rows", type=_at_least(1), metavar="N", help="read the first N only")
    parser.add_argument("--on-bad-row", choices=("skip", "error"), default="skip")
    parser.add_argument(
        "--image-folder", type=Path, default=None, help="where relative paths of images begin"
    )


def _add_encoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train-on", choices=("assistant", "last", "all"), default="assistant")
    parser.add_argument("--max-length", type=_at_least(1), metavar="N", help="in tokens")
    parser.add_argument(
        "--too-long",
        choices=("truncate", "skip", "error"),
        default="truncate",
        help="what becomes of sequences of more than --max-length (default: truncate)",
    )
    parser.add_argument(
        "--chat-template", default=None, help="a .jinja file, a name, or Jinja; default: its own"
    )
    parser.add_argument(
        "--chat-template-kwargs",
        default=None,
        metavar="JSON",
        help="""further variables, such as '{"enable_thinking": false}'""",
    )


def _add_showing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--show", type=_at_least(0), metavar="N", default=3, help="conversations (default: 3)"
    )
    parser.add_argument("--token-edges", action="store_true", help="a bar between tokens")
    parser.add_argument("--html", type=Path, metavar="OUT.html", help="also write a page")


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of {least} or more, got {text!r}"
            )
        return value

    return number
