"""Files and functions stay short enough to read; it is the longest that counts, not the median.

A docstring does not count as part of its function: it should say all there is to say.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_APP_MAIN_LINES = 150  # the loop of an app: `main` in apps/burnish_apps/<app>/main.py


def sources(root: Path) -> list[Path]:
    """All sources of the libraries and the apps, and the noxfile; no tests."""
    globs = ("libs/*/src/**/*.py", "apps/burnish_apps/**/*.py", "noxfile.py")
    return sorted(path for pattern in globs for path in root.glob(pattern))


def too_long(root: Path, path: Path) -> list[str]:
    """What in the file is longer than it may be: the file, or functions with decorators."""
    text, shown = path.read_text(), path.relative_to(root)
    num_lines = len(text.splitlines())
    found = [f"{shown}: {num_lines} lines"] if num_lines >= MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            num_lines = (node.end_lineno or first) - first + 1 - docstring_lines(node)
            is_app = path.name == "main.py" and node.name == "main"
            if num_lines >= (MAX_APP_MAIN_LINES if is_app else MAX_FUNCTION_LINES):
                found.append(f"{shown}:{first}: {node.name} has {num_lines} lines")
    return found


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's docstring."""
    if ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def test_sources_are_short() -> None:
    paths = sources(ROOT)
    assert ROOT / "noxfile.py" in paths
    problems = [problem for path in paths for problem in too_long(ROOT, path)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", "x = 1\n" * 449, []),
        ("a.py", "x = 1\n" * 450, ["a.py: 450 lines"]),
        ("a.py", "def f():\n" + "    x = 1\n" * 68, []),
        ("a.py", "def f():\n" + "    x = 1\n" * 69, ["a.py:1: f has 70 lines"]),
        ("a.py", 'def f():\n    """A\n    b."""\n' + "    x = 1\n" * 68, []),
        ("a.py", 'def f():\n    """A."""\n' + "    x = 1\n" * 69, ["a.py:1: f has 70 lines"]),
        ("a.py", "class A:\n  @b\n  def f():\n" + "    x = 1\n" * 68, ["a.py:2: f has 70 lines"]),
        ("main.py", "def main():\n" + "    x = 1\n" * 148, []),
        ("main.py", "def main():\n" + "    x = 1\n" * 149, ["main.py:1: main has 150 lines"]),
    ],
)
def test_limits_are_these(name: str, text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert too_long(tmp_path, tmp_path / name) == expected
