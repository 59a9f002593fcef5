"""SFT in a process of its own: a signal leaves no process and no broken checkpoint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from burnish_trainer.checkpoint import INCOMPLETE, latest_checkpoint
from processes import BURNISH, Run
from transformers import AutoModelForCausalLM

START_S = 200  # Python's imports, and Ray's, on a busy machine
END_S = 30


@pytest.fixture
def recipe(tiny_model: Path, write_recipe: Callable[..., Path]) -> Path:
    """One that goes on for hours."""
    content: dict[str, Any] = {
        "name": "tiny",
        "checkpoint_every": 1,
        "keep_checkpoints": 3,
        "model": {"source": str(tiny_model)},
        "data": {
            "source": {"source": "tiny_chats:rows"},
            "train": {"num_rows": 11, "seed": 0},
            "validation": {"num_rows": 5, "seed": 3},
        },
        "training": {
            "num_steps": 100_000,
            "batch_size": 4,
            "learning_rate": 1e-3,
            "max_length": 128,
            "max_tokens": 256,
        },
    }
    return write_recipe(content)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*command: object) -> Run:
        runs.append(Run(command, tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("local", signal.SIGINT), ("local", signal.SIGTERM), ("ray", signal.SIGINT)],
)
def test_a_signal_ends_the_run(
    recipe: Path, tmp_path: Path, start: Callable[..., Run], launcher: str, number: signal.Signals
) -> None:
    run = start(BURNISH, "sft", "--recipe", recipe, "run_dir=run", f"launcher={launcher}")
    checkpoints = tmp_path / "run" / "checkpoints"
    run.wait_until(lambda: (checkpoints / "step_000002").is_dir(), START_S)
    if number == signal.SIGINT:
        run.interrupt()
    else:
        run.process.send_signal(number)
    assert run.wait(END_S) == 128 + number
    assert run.left_behind(END_S) == []
    assert f"ended by {number.name}" in run.stderr
    assert "Traceback" not in run.stderr
    latest = latest_checkpoint(checkpoints)
    assert latest is not None
    AutoModelForCausalLM.from_pretrained(latest / "model")
    whole = [path for path in checkpoints.iterdir() if INCOMPLETE not in path.name]
    assert 1 <= len(whole) <= 4  # three, and a new one before an old one is deleted


def test_under_torchrun_what_cannot_run_is_said_once(
    recipe: Path, start: Callable[..., Run]
) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    app = ("--standalone", "-m", "burnish_apps.shell.cli", "sft", "--recipe", recipe)
    wrong = ("launcher=torchrun", "training.num_ranks=2", "training.max_tokens=1")
    run = start(*torchrun, *app, *wrong)
    assert run.wait(START_S) == 1  # torchrun's own
    assert run.stderr.count("training.max_tokens must hold the longest row") == 1
