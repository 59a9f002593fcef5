"""Check one installed library: `python check_installed.py LIBRARY [ROOM ...]`.

Every module imports; those in or below a room may want an extra that is not there. The licence and
py.typed came with the wheel, and what the library promises of its own weight holds.
"""

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import distributions, files

# What some libraries promise beyond that: all that they bring, and what importing them adds to
# importing what they bring.
ONLY = {"packing": {"burnish-packing", "numpy"}}
IMPORT_ADDS_S = {"losses": ("torch", 0.1), "packing": ("numpy", 0.05)}


def import_below(name: str, rooms: list[str]) -> int:
    """Import a module and all below it but any `__main__`; return how many there were."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if name in rooms:
            print(f"{name}: needs an extra ({error.name})")
            return 0
        raise
    below = pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}.")
    names = [one.name for one in below if not one.name.endswith(".__main__")]
    return 1 + sum(import_below(one, rooms) for one in names)


def import_adds_s(package: str, after: str) -> float:
    """Seconds that importing the package takes in a fresh interpreter that has imported `after`.

    The best of five: what else the machine does can only add to it.
    """
    code = (
        f"import time, {after}; start = time.perf_counter(); import {package};"
        "print(time.perf_counter() - start)"
    )
    return min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))


def problems(library: str, rooms: list[str]) -> list[str]:
    """What is wrong with the installed library, in words; empty if nothing is."""
    package = f"burnish_{library}"
    print(f"{package}: {import_below(package, rooms)} modules import without extras")

    missing = {"LICENSE", "py.typed"} - {path.name for path in files(f"burnish-{library}") or []}
    found = [f"{name} is not in the wheel" for name in sorted(missing)]
    if library in ONLY:
        installed = {dist.metadata["Name"].lower() for dist in distributions()}
        more = installed - ONLY[library] - {"pip", "setuptools", "wheel"}
        found += [f"installing it brings {name}, which it should not need" for name in sorted(more)]
    if library in IMPORT_ADDS_S:
        after, limit_s = IMPORT_ADDS_S[library]
        best_s = import_adds_s(package, after)
        print(f"{package}: adds {best_s:.3f} s to importing {after} (limit {limit_s} s)")
        if best_s >= limit_s:
            found.append(f"importing it adds {best_s:.3f} s to {after}, more than {limit_s} s")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1], sys.argv[2:])) or 0)
