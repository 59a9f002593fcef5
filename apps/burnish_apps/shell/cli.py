"""The command ``burnish``.

Exit codes: 0 done, 1 the run failed, 2 the configuration cannot run, 130 ended by Ctrl-C,
143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from burnish_apps.grpo import main as grpo
from burnish_apps.shell.config import ConfigError
from burnish_apps.shell.run import EXIT_BAD_CONFIG, EXIT_FAILED, Interrupted

APPS = {"grpo": grpo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run an app; returns the exit code."""
    parser = argparse.ArgumentParser(prog="burnish", description="Post-training runs from recipes.")
    commands = parser.add_subparsers(dest="app", required=True, metavar="app")
    for name, app in APPS.items():
        command = commands.add_parser(
            name,
            help=(app.__doc__ or "").splitlines()[0],
            description=app.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--recipe", required=True, help="name of a recipe, or a YAML file")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's"
        )
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also into a pipe or a file
    try:
        return APPS[options.app].run(options.recipe, options.overrides)
    except ConfigError as error:
        print(f"burnish {options.app}: this cannot run:\n{error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_CONFIG
    except Interrupted as interruption:
        print(f"burnish {options.app}: ended by {interruption}", file=sys.stderr)  # noqa: T201
        return interruption.exit_code
    except (RuntimeError, OSError, ValueError) as error:
        print(f"burnish {options.app}: failed: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
