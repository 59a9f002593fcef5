"""Bad input to the command: an error in seconds, and nothing was started."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import BURNISH, Run

LIMIT_S = 30


def refuse(folder: Path, recipe: Path | str, *overrides: str) -> str:
    """Run the command until it refuses; what it said on stderr."""
    run = Run([BURNISH, "grpo", "--recipe", recipe, "run_dir=run", *overrides], folder)
    try:
        code = run.wait(LIMIT_S)
        left = run.left_behind(0)
    finally:
        run.kill()
    assert code == 2, run.stderr
    assert left == []
    started = " ".join(run.descendants.values())
    assert not any(word in started for word in ("ray", "gcs_server", "vllm", "math_worker")), (
        started
    )
    assert "starting" not in run.stdout
    assert "Traceback" not in run.stderr
    assert not (folder / "run").exists()
    assert not (folder / "runs").exists()
    return run.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_stps=3", "training.num_stps: unknown 'num_stps'; did you mean 'num_steps'?"),
        ("model.source=/nowhere/model", "model.source: a model must be an existing checkpoint"),
        ("training.updates_per_step=3", "must be a multiple of training.updates_per_step"),
        ("engine.kv_cache_bytes=1000000000000000", "must fit this machine's free memory"),
    ],
)
def test_bad_settings(tiny_recipe: Path, tmp_path: Path, override: str, message: str) -> None:
    said = refuse(tmp_path, tiny_recipe, override)
    assert said.startswith("burnish grpo: this cannot run:\n- ")
    assert message in said


def test_an_unknown_recipe(tmp_path: Path) -> None:
    assert "did you mean 'smollm2-arithmetic-cpu'?" in refuse(tmp_path, "smollm2-arithmetik-cpu")


def test_a_prompt_longer_than_the_context(
    write_recipe: Callable[..., Path], recipe_content: dict[str, Any], tmp_path: Path
) -> None:
    recipe_content["data"]["source"]["arguments"] = {"text": "0" * 200}
    said = refuse(tmp_path, write_recipe(recipe_content))
    assert "every prompt must have at most 120 tokens" in said
    assert "14 of 14 have more" in said
    assert "in row tiny-1-" in said or "in row tiny-2-" in said


def test_no_arguments_show_how_to_call(tmp_path: Path) -> None:
    run = Run([BURNISH], tmp_path)
    assert run.wait(LIMIT_S) == 2
    assert "usage: burnish" in run.stderr
