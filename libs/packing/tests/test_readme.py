"""The README's Python runs as it stands, block after block."""

import re
from pathlib import Path


def test_the_readme_runs(capsys) -> None:
    readme = Path(__file__).parents[1] / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
    assert len(blocks) == 4
    # What the last block computes: log-probs of all tokens but each sequence's first.
    assert (namespace["scored"] < 0).tolist() == [n > 1 for row in namespace["rows"] for n in row]
    assert "'num_split': 1" in capsys.readouterr().out
