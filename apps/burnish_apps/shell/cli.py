"""The command ``burnish``.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run, 130 ended by Ctrl-C,
143 ended by SIGTERM; 141 what was to read the output has ended.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from burnish_apps.data.arguments import add_data_command

# Imported when one is run: that takes seconds.
APPS = {name: f"burnish_apps.{name}.main" for name in ("grpo", "sft", "rm", "dpo")}
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an app; returns the exit code."""
    try:
        options, unknown = _parser().parse_known_args(arguments)
        if unknown:
            options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # also into a pipe or a file
        return _run(options)
    except KeyboardInterrupt as interruption:
        print(f"burnish: ended by {str(interruption) or 'SIGINT'}", file=sys.stderr)  # noqa: T201
        return getattr(interruption, "exit_code", EXIT_INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="burnish",
        description="Post-training runs from recipes, and a look at their data.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="app", required=True, metavar="app")
    add_data_command(commands)
    for name, module in APPS.items():
        text = _docstring(module)
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        command.add_argument("--recipe", required=True, help="name of a recipe, or a YAML file")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's"
        )
    return parser


def _docstring(module: str) -> str:
    """A module's docstring, without importing what it imports."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return ""
    return ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""


def _run(options: argparse.Namespace) -> int:
    """Import an app and run it; returns the exit code."""
    from burnish_apps.shell.config import ConfigError
    from burnish_apps.shell.run import EXIT_BAD_CONFIG, EXIT_FAILED

    name = f"burnish {options.app}"
    try:
        if options.app == "data":
            name = f"{name} {options.command}"
            code: int = importlib.import_module("burnish_apps.data.inspect").run(options)
        else:
            # PyTorch reads it at its first large tensor: huge pages make training on CPUs faster.
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
            app = importlib.import_module(APPS[options.app])
            code = app.run(options.recipe, options.overrides)
        return code
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun once a machine
            print(f"{name}: this cannot run:\n{error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_CONFIG
    except (RuntimeError, OSError, ValueError) as error:
        print(f"{name}: failed: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
