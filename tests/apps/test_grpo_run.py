"""Whole runs of a tiny model: real Ray, real vLLM, FSDP2. Each takes most of a minute."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from burnish_tracking import read_metrics
from burnish_trainer.checkpoint import latest_checkpoint, read_state
from processes import BURNISH, HERE, Run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

START_S = 300  # Ray, the policy and vLLM, on a busy machine
END_S = 30  # from a signal to the last process

Records = list[dict[str, Any]]
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``burnish grpo``, or a patched one, in ``tmp_path``; kills what a test leaves."""
    runs: list[Run] = []

    def begin(recipe: Path, *overrides: str, patch: str = "", run_dir: str = "run") -> Run:
        command = [sys.executable, HERE / "patched.py", patch] if patch else [BURNISH]
        arguments = ["grpo", "--recipe", recipe, f"run_dir={run_dir}", *overrides]
        runs.append(Run([*command, *arguments], tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The metrics by step, of a run that may still write."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {r["step"]: r for r in (json.loads(line) for line in lines if line.endswith("\n"))}


def check_checkpoint(path: Path, scratch: Path) -> int:
    """Load every part of a checkpoint; its step."""
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    assert tokenizer.chat_template
    token_ids = tokenizer("Say something", return_tensors="pt")["input_ids"]
    assert model(input_ids=token_ids).logits.isfinite().all()
    dcp_to_torch_save(path / "optimizer", scratch / "optimizer.pt")
    content = torch.load(scratch / "optimizer.pt", weights_only=True)
    moments = [
        entry["exp_avg_sq"] for entry in content["optimizer"]["state"].values() if "step" in entry
    ]
    assert len(moments) == len(list(model.parameters()))
    assert all(moment.isfinite().all() for moment in moments)
    step = read_state(path)["step"]
    assert path.name == f"step_{step:06d}"
    return int(step)


def test_a_run_and_its_resumption(tiny_recipe: Path, tmp_path: Path, start: Start) -> None:
    """Two ranks, two updates a step, a reference; the third step again from the second's end."""
    settings = [
        "training.num_ranks=2",
        "training.updates_per_step=2",
        "training.kl_coefficient=0.1",
        "checkpoint_every=1",
        "keep_checkpoints=2",
        "rollout.stop=['~~~']",
    ]
    run = start(tiny_recipe, *settings)
    assert run.wait(2 * START_S) == 0, run.stderr
    assert run.left_behind(END_S) == []

    run_dir = tmp_path / "run"
    whole = steps(run_dir)
    assert list(whole) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        check_trained_step(whole[step], version=step - 1)
    assert [step for step in whole if "validation/accuracy" in whole[step]] == [0, 2, 3]
    assert "reward/mean" not in whole[0]
    check_files(run_dir)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003"]
    for name in names:
        check_checkpoint(run_dir / "checkpoints" / name, tmp_path)
    assert read_state(run_dir / "checkpoints" / "step_000002")["loader"]["position"] == 8

    resume = f"resume_from={run_dir / 'checkpoints' / 'step_000002'}"
    again = start(run_dir / "config.yaml", resume, run_dir="again")
    assert again.wait(2 * START_S) == 0, again.stderr
    assert again.left_behind(END_S) == []

    resumed = steps(tmp_path / "again")
    assert list(resumed) == [2, 3]
    check_trained_step(resumed[3], version=2)
    assert rows_of(tmp_path / "again", 3) == rows_of(run_dir, 3)
    for name in ("reward/mean", "train/loss", "train/grad_norm", "policy/kl_reference"):
        assert resumed[3][name] == pytest.approx(whole[3][name], rel=1e-3, abs=1e-6), name
    state = read_state(tmp_path / "again" / "checkpoints" / "step_000003")
    assert (state["weight_version"], state["loader"]["position"]) == (3, 12)


def test_adapters_reach_the_engine_merged_and_the_rate_follows_its_schedule(
    tiny_recipe: Path, tmp_path: Path, start: Start
) -> None:
    settings = [
        "training.lora={r: 4, lora_alpha: 8}",
        "training.kl_coefficient=0.1",  # the reference is the model without adapters
        "training.schedule=burnish_trainer.schedules.cosine",
        "checkpoint_every=1",
        "training.warmup_steps=1",
    ]
    run = start(tiny_recipe, *settings)
    assert run.wait(2 * START_S) == 0, run.stderr
    metrics = steps(tmp_path / "run")
    for step in (1, 2, 3):  # engine and trainer agree on the merged weights
        check_trained_step(metrics[step], version=step - 1)
    rates = [metrics[step]["train/learning_rate"] for step in (1, 2, 3)]
    assert rates == pytest.approx([rates[1] / 2, rates[1], rates[1] / 2])
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert (checkpoint / "adapter" / "adapter_model.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(checkpoint / "model")


def check_trained_step(metrics: dict[str, Any], version: int) -> None:
    assert 0 < metrics["reward/mean"] < 1
    assert metrics["mismatch/mean_abs"] < 5e-5
    assert metrics["rollout/weight_version"] == version
    assert metrics["train/num_sequences"] == 16
    assert metrics["train/num_tokens"] == metrics["rollout/num_tokens"]
    assert metrics["train/grad_norm"] > 0
    assert 0 <= metrics["policy/clip_fraction"] <= 1
    assert (metrics["policy/kl_reference"] > 1e-9) or version == 0
    for name in ("generation", "training", "weight_sync", "checkpoint"):
        assert metrics[f"time/{name}_s"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def check_files(run_dir: Path) -> None:
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    samples = read_samples(run_dir)
    assert len(samples) == 4 + 3 * 16
    assert all(sample["status"] == "ok" for sample in samples)


def read_samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def rows_of(run_dir: Path, step: int) -> list[str]:
    """The problems of a step."""
    samples = read_samples(run_dir)
    return [s["row"] for s in samples if s["step"] == step and s["index"] == 0]


def test_ctrl_c_during_a_step(tiny_recipe: Path, tmp_path: Path, start: Start) -> None:
    run = start(tiny_recipe, "training.num_steps=100000", "checkpoint_every=1")
    run.wait_until(lambda: len(steps(tmp_path / "run")) >= 4, START_S)
    run.interrupt()
    assert_ended(run, 128 + signal.SIGINT)
    assert "ended by SIGINT" in run.stderr
    assert "Traceback" not in run.stderr
    latest = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert latest is not None
    last = max(steps(tmp_path / "run"))
    assert check_checkpoint(latest, tmp_path) in (last, last + 1)
    assert (tmp_path / "run" / "curve.png").exists()


def test_sigterm_after_an_environment_failed(
    write_recipe: Callable[..., Path], recipe_content: dict[str, Any], tmp_path: Path, start: Start
) -> None:
    """The second judgement, of the first step, raises: counted, never a reward; then SIGTERM."""
    recipe_content["environment"]["arguments"] = {"fail_on_call": 2}
    recipe = write_recipe(recipe_content)
    run = start(recipe, "training.num_steps=100000", "checkpoint_every=1")
    run.wait_until(lambda: len(steps(tmp_path / "run")) >= 4, START_S)
    run.look()
    run.process.send_signal(signal.SIGTERM)
    assert_ended(run, 128 + signal.SIGTERM)
    assert "ended by SIGTERM" in run.stderr
    latest = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert latest is not None
    check_checkpoint(latest, tmp_path)

    assert "the world is out of order" in run.stderr
    first, second, *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert math.isnan(float(first["reward/mean"]))
    assert first["rollout/failed"] == 16
    assert "train/loss" not in first  # nothing to learn from, and nothing learnt
    assert first["rollout/groups_without_spread"] == 4
    assert second["rollout/failed"] == 0
    assert second["rollout/weight_version"] == 0
    assert float(second["reward/mean"]) > 0
    failed = [sample for sample in read_samples(tmp_path / "run") if sample["step"] == 1]
    assert [(s["status"], s["reward"]) for s in failed] == [("error", None)] * 16


@pytest.mark.parametrize("moment", ["raylet/raylet", "ray::_Host.build"], ids=["ray", "workers"])
def test_ctrl_c_during_the_start(
    tiny_recipe: Path, tmp_path: Path, start: Start, moment: str
) -> None:
    """As Ray itself starts, and as the policy and vLLM are built."""
    run = start(tiny_recipe)
    run.wait_until(lambda: any(moment in line for line in run.command_lines()), START_S)
    time.sleep(1)
    run.interrupt()
    assert_ended(run, 128 + signal.SIGINT)
    assert "Traceback" not in run.stderr
    assert steps(tmp_path / "run") == {}


def names(run: Run) -> list[str]:
    return list(run.descendants.values())


def assert_ended(run: Run, code: int) -> None:
    """The run ends with ``code`` and leaves no process, all within `END_S`."""
    asked_s = time.monotonic()
    assert run.wait(END_S) == code, run.stderr
    assert run.left_behind(END_S - (time.monotonic() - asked_s)) == []
    seen = " ".join(names(run))
    assert "raylet" in seen, "the test must have seen the processes that it says are gone"
    assert "gcs_server" in seen


def test_a_lost_weight_update_ends_the_run(tiny_recipe: Path, tmp_path: Path, start: Start) -> None:
    run = start(tiny_recipe, "training.learning_rate=0.01", patch="lose_weights")
    assert run.wait(START_S) == 1
    assert "engine and trainer must give sampled tokens the same log-probs" in run.stderr
    assert "the last weight update did not reach the engine" in run.stderr
    assert "Traceback" not in run.stderr
    done = steps(tmp_path / "run")
    assert list(done) == [0, 1]  # the first step sampled with the right weights
    assert done[1]["mismatch/mean_abs"] < 5e-5
    assert run.left_behind(END_S) == []


def test_a_killed_engine_ends_the_run(tiny_recipe: Path, tmp_path: Path, start: Start) -> None:
    run = start(tiny_recipe, "training.num_steps=100000", patch="show_engine")
    run.wait_until(lambda: len(steps(tmp_path / "run")) >= 3, START_S)
    engine = psutil.Process(int((tmp_path / "engine.pid").read_text()))
    assert engine in run.descendants
    os.kill(engine.pid, signal.SIGKILL)
    assert run.wait(END_S) == 1
    assert "worker 0 of engine died" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.left_behind(END_S) == []
