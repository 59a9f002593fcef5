import re
import subprocess
import sys
from pathlib import Path

import burnish_envs


def test_import_is_light():
    """Environments run in workers that should start fast: only the standard library is loaded."""
    program = (
        "import sys; before = set(sys.modules); import burnish_envs; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert set(output.split()) - set(sys.stdlib_module_names) == {"burnish_envs"}


def test_the_readme_example_runs():
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    scope: dict = {}
    exec(example, scope)
    rewards = [r.reward for group in scope["groups"] for r in group.rollouts]
    assert set(rewards) == {0.0, 1.0}


def test_every_public_name_exists():
    assert all(hasattr(burnish_envs, name) for name in burnish_envs.__all__)
    assert burnish_envs.__version__ == "0.1.0"
