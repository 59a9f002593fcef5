import re
from pathlib import Path

import burnish_data


def test_the_readme_example_runs():
    readme = Path(__file__).parents[1] / "README.md"
    (example,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    scope: dict = {}
    exec(example, scope)
    assert len(scope["batch"]) == 8
    assert scope["state"]["position"] == 8


def test_every_public_name_exists():
    assert all(hasattr(burnish_data, name) for name in burnish_data.__all__)
    assert burnish_data.__version__ == "0.1.0"
