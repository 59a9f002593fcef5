"""SFT of a tiny model in this process: it learns, goes on where it left off, says what is bad."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from burnish_apps.sft import main as sft
from burnish_apps.sft.config import SftConfig
from burnish_apps.shell import cli
from burnish_apps.shell.config import ConfigError, load_config
from burnish_apps.supervised import loop
from burnish_tracking import read_metrics
from burnish_trainer.checkpoint import latest_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

Start = Callable[..., int]
Records = dict[int, dict[str, Any]]


@pytest.fixture
def sft_content(tiny_model: Path) -> dict[str, Any]:
    """A whole, tiny recipe as plain data: 11 rows, 3 steps an epoch, the last one short."""
    return {
        "name": "tiny",
        "launcher": "local",
        "validate_every": 2,
        "model": {"source": str(tiny_model)},
        "data": {
            "source": {"source": "tiny_chats:rows"},
            "train": {"num_rows": 11, "seed": 0},
            "validation": {"num_rows": 5, "seed": 3},
        },
        "training": {
            "num_epochs": 2,
            "batch_size": 4,
            "learning_rate": 5e-3,
            "max_length": 128,
            "max_tokens": 256,
        },
    }


@pytest.fixture
def start(sft_content: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path) -> Start:
    """Runs ``burnish sft`` with overrides in this process; its exit code."""
    recipe = write_recipe(sft_content)

    def begin(*overrides: str, run_dir: str = "run") -> int:
        where = f"run_dir={tmp_path / run_dir}"
        return cli.main(["sft", "--recipe", str(recipe), where, *overrides])

    return begin


@pytest.fixture
def refused(sft_content: dict[str, Any], write_recipe: Callable[..., Path]) -> Callable[..., Any]:
    """The problems of a config, before model and data are read."""
    recipe = write_recipe(sft_content)

    def problems(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(SftConfig, sft.RECIPES, str(recipe), overrides).check()
        return caught.value.problems

    return problems


def steps(run_dir: Path) -> Records:
    return {int(record["step"]): dict(record) for record in read_metrics(run_dir / "metrics.jsonl")}


def weights(run_dir: Path, step: int) -> dict[str, Any]:
    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def test_it_learns_and_its_files_are_there(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("training.num_epochs=6") == 0
    run_dir = tmp_path / "run"
    records = steps(run_dir)
    assert list(records) == list(range(19))
    assert [s for s, r in records.items() if "validation/loss" in r] == [*range(0, 19, 2)]
    assert records[18]["validation/loss"] < 0.6 * records[0]["validation/loss"]
    assert [records[s]["train/num_sequences"] for s in (1, 2, 3, 4)] == [4, 4, 3, 4]
    assert records[3]["train/epoch"] == 1
    assert (records[0]["data/train_rows"], records[0]["data/validation_rows"]) == (11, 5)
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    folder = run_dir / "checkpoints" / "step_000018" / "model"
    assert AutoTokenizer.from_pretrained(folder).chat_template
    AutoModelForCausalLM.from_pretrained(folder)
    said = capsys.readouterr().out
    assert "training rows: 11 with " in said
    assert "[18/18] loss " in said
    assert "held out, validation/loss: " in said


@pytest.mark.parametrize("at", [2, 3, 4], ids=["within", "at the end of", "into the next"])
def test_a_resumed_run_is_the_uninterrupted_one(start: Start, tmp_path: Path, at: int) -> None:
    """Within an epoch, at its end, and in the next; bit for bit."""
    cosine = "training.schedule=burnish_trainer.schedules.cosine"
    settings = (cosine, "checkpoint_every=1", "keep_checkpoints=9")
    assert start(*settings) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / f"step_{at:06d}"
    assert start(*settings, f"resume_from={checkpoint}", run_dir="again") == 0
    whole, again = steps(tmp_path / "run"), steps(tmp_path / "again")
    assert list(again) == list(range(at, 7))
    for step in range(at + 1, 7):
        for name in ("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch"):
            assert again[step][name] == whole[step][name]
    first, second = weights(tmp_path / "run", 6), weights(tmp_path / "again", 6)
    assert all((first[name] == second[name]).all() for name in first)


def test_packed_padded_and_fixed_micro_batches_are_one(start: Start, tmp_path: Path) -> None:
    fixed = ("training.packing=fixed", "training.micro_batch_size=1")
    sgd = ("training.optimizer=torch.optim.SGD", "training.optimizer_args={}")
    for name, overrides in {
        "packed": (),
        "padded": ("training.packing=padded",),
        "fixed": fixed,
    }.items():
        assert start(*sgd, *overrides, run_dir=name) == 0
    packed = steps(tmp_path / "packed")
    for other in ("padded", "fixed"):
        for step, record in steps(tmp_path / other).items():
            for name in ("train/loss", "train/grad_norm", "validation/loss"):
                if name in record:
                    assert record[name] == pytest.approx(packed[step][name], rel=1e-5), name


def test_what_is_left_out_is_counted_and_shown(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("data.train.empty=2", "data.on_bad_row=skip", "training.num_epochs=1")
    assert start(*given, "training.max_length=32", "training.too_long=skip") == 0
    said = capsys.readouterr().out
    first = steps(tmp_path / "run")[0]
    assert "2 nothing to train" in said
    assert " too long)" in said
    assert first["data/train_rows"] + first["data/train_skipped"] == 11
    assert first["data/train_skipped"] > 2


def test_a_row_without_anything_to_learn_is_named(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("data.train.empty=2") == 2
    said = capsys.readouterr().err
    assert "data.source: no rows for data.train: " in said
    assert "rows, row 1" in said
    assert not (tmp_path / "run").exists()


def test_all_contradictions_come_at_once(refused: Callable[..., list[str]]) -> None:
    problems = refused(
        "training.num_steps=3",
        "training.packing=fixed",
        "training.max_tokens=127",
        "training.batch_size=1",
        "training.num_ranks=2",
        "ray_address=auto",
        "model.dtype=bfloat16",
        "data.train.num_row=3",
        "training.optimizer=torch.optim.Adamm",
    )
    for beginning in [
        "training: must give one of num_steps and num_epochs, got both",
        "training.micro_batch_size must be given for packing=fixed",
        "training.max_tokens must hold the longest row, 1 x training.max_length = 128, got 127",
        "every rank must have a row in each step, got training.batch_size = 1 for 2 ranks",
        "ray_address: must go with launcher=ray, got local",
        "training.num_ranks: must be 1 for launcher=local, got 2",
        "model.dtype: must be float32 for launcher=local, got bfloat16",
        "data.source.arguments: unknown 'num_row'; did you mean 'num_rows'?",
        "training.optimizer: ",
    ]:
        assert sum(problem.startswith(beginning) for problem in problems) == 1, (
            beginning,
            problems,
        )
    assert len(problems) == 9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.max_length=300", "training.max_tokens=300"], None),  # the rows are short
        (["data.source.source='tiny_task:rows'"], "data.source.arguments: unknown 'num_rows'"),
        (["data.validation.num_rows=0"], "data.source: no rows for data.validation: "),
        (["training.max_length=20"], "data.source: no rows for data.train: BadRowError: rows, r"),
        (["resume_from=/nowhere/step_000001"], "resume_from: "),
        (["launcher=torchrun"], "training.num_ranks: must be the number of processes that torch"),
        (["launcher=ray", "training.gpus_per_rank=9"], "must fit this machine's"),
    ],
)
def test_the_command_says_what_cannot_run(
    start: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    message: str | None,
) -> None:
    assert start(*overrides) == (0 if message is None else 2)
    said = capsys.readouterr().err
    assert message is None or message in said
    assert "Traceback" not in said
    assert (tmp_path / "run").exists() == (message is None)


def test_steps_that_are_done_already(start: Start, tmp_path: Path, capsys: Any) -> None:
    """The steps of epochs show with the data."""
    assert start("training.num_epochs=1") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000003"
    assert start("training.num_epochs=1", f"resume_from={checkpoint}", run_dir="again") == 2
    assert "training.num_steps must exceed the 3 steps of" in capsys.readouterr().err


def test_ctrl_c_leaves_a_whole_checkpoint(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plan, calls = loop.plan, []

    def interrupting(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return plan(*arguments)

    monkeypatch.setattr(loop, "plan", interrupting)
    assert start("checkpoint_every=1") == 130
    assert "ended by SIGINT" in capsys.readouterr().err
    latest = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert latest is not None
    assert latest.name == "step_000003"
    assert (tmp_path / "run" / "curve.png").exists()


def test_adapters(start: Start, tmp_path: Path) -> None:
    lora = "training.lora={r: 4, lora_alpha: 8}"
    assert start(lora, "training.learning_rate=0.02") == 0
    records = steps(tmp_path / "run")
    assert records[6]["validation/loss"] < records[0]["validation/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_000006" / "model")
