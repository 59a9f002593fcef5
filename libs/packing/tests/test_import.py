"""The plans cost a numpy import and no more."""

import subprocess
import sys


def test_the_library_imports_numpy_only() -> None:
    code = (
        "import sys, numpy\n"
        "before = set(sys.modules)\n"
        "import burnish_packing\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(added - set(sys.stdlib_module_names)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert set(output.stdout.split()) == {"burnish_packing", "numpy"}
