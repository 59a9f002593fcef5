"""Who may import whom, read from the sources' syntax trees and held to the picture.

The picture is data: `[tool.burnish]` in the root pyproject.toml, and each library's declared
dependencies. The rules take a repository's folder, so that each is also tried on a small tree that
breaks it: a rule that cannot fail is no rule.
"""

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

# Import names that are not their distribution's name.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "megatron": "megatron-core",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`."""

    name: str
    when: str  # "import" of the module, "call" of a function, or for "types" alone
    where: str  # "path:line"


@dataclass(frozen=True)
class Module:
    """One source file, by its dotted name."""

    name: str
    imports: tuple[Import, ...]
    environment_reads: tuple[str, ...]  # "path:line"


@dataclass(frozen=True)
class Project:
    """What a library declares: canonical names and, of siblings, whole requirements."""

    dependencies: frozenset[str]
    extras: frozenset[str]  # without the extra `test`, which is not for sources
    siblings: tuple[Requirement, ...]


def canonical(name: str) -> str:
    """A distribution's name as PyPA's specifications normalise it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution_of(import_name: str) -> str:
    """The distribution that an imported name belongs to; by its own name if not known otherwise."""
    top = import_name.split(".")[0]
    return canonical(DISTRIBUTIONS.get(top, top))


def is_within(name: str, rooms: list[str]) -> bool:
    """Whether a dotted name is one of the rooms or below one."""
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def libraries(root: Path) -> list[str]:
    """Names of the libraries in a repository."""
    return sorted(path.parent.name for path in root.glob("libs/*/pyproject.toml"))


def picture(root: Path) -> dict:
    """The table `[tool.burnish]`: siblings, rooms, environment."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["burnish"]


def project(root: Path, library: str) -> Project:
    """What the library's pyproject.toml declares."""
    text = (root / "libs" / library / "pyproject.toml").read_text()
    table = tomllib.loads(text)["project"]
    extras = table.get("optional-dependencies", {})
    required = [Requirement(line) for line in table.get("dependencies", [])]
    optional = [Requirement(line) for name in extras if name != "test" for line in extras[name]]
    return Project(
        dependencies=frozenset(canonical(one.name) for one in required),
        extras=frozenset(canonical(one.name) for one in optional),
        siblings=tuple(one for one in required + optional if one.name.startswith("burnish-")),
    )


def modules(root: Path, library: str) -> Iterator[Module]:
    """Every module of a library's sources."""
    source = root / "libs" / library / "src"
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(), str(path))
        shown = path.relative_to(root)
        imports = tuple(imports_of(tree, package, str(shown), "import"))
        reads = tuple(f"{shown}:{node.lineno}" for node in ast.walk(tree) if reads_environ(node))
        yield Module(name, imports, reads)


def imports_of(node: ast.AST, package: str, path: str, when: str) -> Iterator[Import]:
    """All imports below a node; relative ones are resolved against the package."""
    for child in ast.iter_child_nodes(node):
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1]
            base = [*(above if child.level else []), *([child.module] if child.module else [])]
            names = [".".join([*base, alias.name]) for alias in child.names]
        for name in names:
            yield Import(name, when, f"{path}:{child.lineno}")
        below = when
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            below = "call"
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            below = "types"
        yield from imports_of(child, package, path, below)


def reads_environ(node: ast.AST) -> bool:
    """Whether the node names os.environ or one of its functions."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    if isinstance(node, ast.Attribute):
        return node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return False


def sibling_problems(root: Path, library: str) -> list[str]:
    """Imports of libraries or apps that the picture does not have, or that are not declared so."""
    allowed = picture(root)["siblings"].get(library, [])
    found = []
    imported = set()
    for module in modules(root, library):
        for one in module.imports:
            top = one.name.split(".")[0]
            if not top.startswith("burnish_") or top == f"burnish_{library}":
                continue
            imported.add(canonical(top))
            if not is_within(one.name, allowed):
                found.append(f"{one.where}: {library} may not import {one.name}")
    declared = project(root, library).siblings
    names = {canonical(one.name) for one in declared}
    found += [f"{library} imports {name} without declaring it" for name in imported - names]
    found += [f"{library} declares {name} and never imports it" for name in names - imported]
    found += [
        f"{library} must take {one.name} by a compatible range (>=A,<B or ~=A), not {one.specifier}"
        for one in declared
        if {part.operator for part in one.specifier} not in ({"~="}, {">=", "<"})
    ]
    return found


def third_party_problems(root: Path, library: str) -> list[str]:
    """Imports that are not declared, or of an extra where it may not be imported."""
    declared = project(root, library)
    rooms = picture(root)["rooms"].get(library, {})
    found = []
    for module in modules(root, library):
        for one in module.imports:
            top = one.name.split(".")[0]
            if top in sys.stdlib_module_names or top.startswith("burnish_"):
                continue
            needed = distribution_of(top)
            inside = is_within(module.name, rooms.get(needed, []))
            as_extra = needed in declared.extras and (inside or one.when != "import")
            if needed in rooms and not inside and one.when != "types":
                why = f"only {', '.join(rooms[needed])} may import {needed}"
            elif needed in declared.dependencies or as_extra:
                continue
            elif needed in declared.extras:
                why = f"{needed} is an extra; import it in the function that uses it"
            else:
                why = f"{library} imports {needed} without declaring it"
            found.append(f"{one.where}: {why}")
    return list(dict.fromkeys(found))  # `from a import b, c` once


def environment_problems(root: Path, library: str) -> list[str]:
    """Uses of os.environ outside the modules that launch processes."""
    launchers = picture(root)["environment"]["launchers"]
    return [
        f"{where}: only a module that launches processes may use os.environ"
        for module in modules(root, library)
        if module.name not in launchers
        for where in module.environment_reads
    ]


LIBRARIES = libraries(ROOT)
RULES = [sibling_problems, third_party_problems, environment_problems]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rule", RULES)
def test_library_keeps_to_the_picture(rule: Callable[[Path, str], list[str]], library: str) -> None:
    problems = rule(ROOT, library)
    assert not problems, "\n".join(problems)


def test_every_name_in_the_picture_exists() -> None:
    table = picture(ROOT)
    rooms = [names for extras in table["rooms"].values() for names in extras.values()]
    lists = [*rooms, *table["siblings"].values(), table["environment"]["launchers"]]
    known = {module.name for library in LIBRARIES for module in modules(ROOT, library)}
    assert [name for names in lists for name in names if name not in known] == []


# Small repositories: two libraries, `upper` (which may import `lower.shared`) and `lower`.


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository that keeps every rule."""
    write(
        tmp_path / "pyproject.toml",
        """
        [tool.burnish.siblings]
        upper = ["burnish_lower.shared"]
        [tool.burnish.rooms]
        lower = { torch = ["burnish_lower.torch"] }
        [tool.burnish.environment]
        launchers = ["burnish_lower.launch"]
        """,
    )
    declare(tmp_path, "upper", dependencies=["burnish-lower>=0.1,<0.2", "PyYAML>=6"])
    declare(tmp_path, "lower", dependencies=["numpy>=1.26"], torch=["torch>=2.6"], fast=["numba"])
    source = tmp_path / "libs/lower/src/burnish_lower"
    write(source / "shared.py", "import os.path\nimport numpy.linalg\n")
    write(source / "late.py", "def fast():\n    import numba\n")
    write(source / "typed.py", "if typing.TYPE_CHECKING:\n    from torch import Tensor\n")
    write(source / "launch.py", "import os\nos.environ['A'] = 'b'\n")
    write(source / "torch/__init__.py", "import torch\nfrom ..shared import one\n")
    upper = tmp_path / "libs/upper/src/burnish_upper"
    write(upper / "__init__.py", "from burnish_lower.shared import one\nimport yaml\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    """Write a file, its folders too, without the text's common indent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def declare(root: Path, library: str, *, dependencies: list[str], **extras: list[str]) -> None:
    """Write a library's pyproject.toml."""
    lines = "\n".join(f"{extra} = {required}" for extra, required in extras.items())
    table = f"[project]\ndependencies = {dependencies}\n[project.optional-dependencies]\n{lines}\n"
    write(root / "libs" / library / "pyproject.toml", table)


@pytest.mark.parametrize("library", ["upper", "lower"])
@pytest.mark.parametrize("rule", RULES)
def test_small_repository_keeps_every_rule(rule, library: str, repository: Path) -> None:
    assert rule(repository, library) == []


@pytest.mark.parametrize(
    ("library", "source", "rule", "message"),
    [
        ("lower", "import burnish_upper", sibling_problems, "may not import burnish_upper"),
        (
            "lower",
            "def f():\n    import burnish_upper",
            sibling_problems,
            "may not import burnish_upper",
        ),
        (
            "lower",
            "import burnish_apps.shell",
            sibling_problems,
            "may not import burnish_apps.shell",
        ),
        (
            "upper",
            "from burnish_lower import late",
            sibling_problems,
            "may not import burnish_lower.late",
        ),
        ("upper", "import burnish_lower", sibling_problems, "may not import burnish_lower"),
        ("lower", "import scipy", third_party_problems, "imports scipy without declaring it"),
        (
            "lower",
            "def f():\n    import scipy",
            third_party_problems,
            "imports scipy without declaring",
        ),
        ("lower", "import numba", third_party_problems, "numba is an extra"),
        (
            "lower",
            "if TYPE_CHECKING:\n    import jax",
            third_party_problems,
            "without declaring it",
        ),
        ("lower", "class A:\n    import numba", third_party_problems, "numba is an extra"),
        (
            "lower",
            "def f():\n    import torch",
            third_party_problems,
            "only burnish_lower.torch may",
        ),
        ("lower", "import os\nos.environ.get('A')", environment_problems, "bad.py:2"),
        ("lower", "from os import getenv", environment_problems, "bad.py:1"),
    ],
)
def test_forbidden_import_is_found(
    library: str, source: str, rule, message: str, repository: Path
) -> None:
    write(repository / "libs" / library / "src" / f"burnish_{library}" / "bad.py", source)
    (problem, *_) = rule(repository, library)
    assert message in problem
    assert "bad.py" in problem


@pytest.mark.parametrize(
    ("dependencies", "message"),
    [
        (["PyYAML>=6"], "imports burnish-lower without declaring it"),
        (["burnish-lower==0.1.0"], "by a compatible range"),
        (["burnish-lower>=0.1"], "by a compatible range"),
        (["burnish-lower"], "by a compatible range"),
        (
            ["burnish-lower~=0.1", "burnish-other~=0.1"],
            "declares burnish-other and never imports it",
        ),
    ],
)
def test_wrongly_declared_sibling_is_found(
    dependencies: list[str], message: str, repository: Path
) -> None:
    declare(repository, "upper", dependencies=dependencies)
    (problem,) = sibling_problems(repository, "upper")
    assert message in problem
