import math
import re
from pathlib import Path

import pytest


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), "README.md", "exec"), {})
    metrics, importance = capsys.readouterr().out.splitlines()
    assert "loss/policy" in metrics
    assert float(importance) == pytest.approx(math.exp(-0.01), rel=1e-6)
