"""Reward models and DPO of a tiny model: they learn, go on where they left off, say what is bad."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burnish_apps.dpo import main as dpo
from burnish_apps.dpo.config import DpoConfig
from burnish_apps.rm import main as rm
from burnish_apps.rm.config import RmConfig
from burnish_apps.shell import cli
from burnish_apps.shell.config import ConfigError, load_config
from burnish_apps.supervised.pairs import pair_batch, shared_prefix
from burnish_data import encode_preferences
from burnish_losses.preference import dpo_loss
from burnish_tracking import read_metrics
from burnish_trainer import TorchPolicy
from safetensors.torch import load_file
from tiny_pairs import rows as tiny_rows
from transformers import AutoModelForSequenceClassification, AutoTokenizer

Start = Callable[..., int]
CONFIGS = {"rm": (RmConfig, rm.RECIPES), "dpo": (DpoConfig, dpo.RECIPES)}
CACHED = "training.reference=cached"
PREFERENCE = "burnish_losses.preference"


@pytest.fixture
def content(tiny_model: Path) -> dict[str, Any]:
    """A whole, tiny recipe as plain data: 11 pairs, 3 steps an epoch, the last one short."""
    return {
        "name": "tiny",
        "launcher": "local",
        "validate_every": 2,
        "model": {"source": str(tiny_model)},
        "data": {
            "source": {"source": "tiny_pairs:rows"},
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
def start(content: dict[str, Any], write_recipe: Callable[..., Path], tmp_path: Path) -> Start:
    """Runs ``burnish rm`` or ``burnish dpo`` with overrides in this process; its exit code."""
    recipe = write_recipe(content)

    def begin(app: str, *overrides: str, run_dir: str = "run") -> int:
        where = f"run_dir={tmp_path / run_dir}"
        return cli.main([app, "--recipe", str(recipe), where, *overrides])

    return begin


@pytest.fixture
def refused(content: dict[str, Any], write_recipe: Callable[..., Path]) -> Callable[..., Any]:
    """The problems of a config, before model and data are read."""
    recipe = write_recipe(content)

    def problems(app: str, *overrides: str) -> list[str]:
        config_class, recipes = CONFIGS[app]
        with pytest.raises(ConfigError) as caught:
            load_config(config_class, recipes, str(recipe), overrides).check()
        return caught.value.problems

    return problems


def steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {int(record["step"]): dict(record) for record in read_metrics(run_dir / "metrics.jsonl")}


def weights(run_dir: Path, step: int) -> dict[str, Any]:
    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def encoded(tiny_model: Path, **arguments: Any) -> list[Any]:
    made = encode_preferences(
        tiny_rows(3, seed=0, **arguments), AutoTokenizer.from_pretrained(tiny_model)
    )
    return [{**row, "row": i} for i, row in enumerate(made)]


def test_a_batch_of_pairs_has_the_prompt_of_each_once(tiny_model: Path) -> None:
    rows = encoded(tiny_model)
    batch = pair_batch(rows)
    assert batch.sequence_columns["pair_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.sequence_columns["chosen"].tolist() == [True, False] * 3
    assert batch.sequence_columns["row"].tolist() == [0, 0, 1, 1, 2, 2]
    assert "margins" not in batch.sequence_columns
    for i, row in enumerate(rows):
        num_prompt = int(row["chosen"]["token_mask"].argmax())
        assert batch.sequence_columns["prefix_lengths"][2 * i] == num_prompt > 1
    nll = np.split(batch.token_columns["nll_mask"], batch.offsets[1:-1])
    assert not any(mask.any() for mask in nll[1::2])
    for mask, row in zip(nll[::2], rows, strict=True):
        assert (mask == row["chosen"]["token_mask"]).all()


def test_a_prefix_ends_where_the_sides_differ_or_one_is_trained() -> None:
    def side(ids: list[int], first: int) -> dict[str, Any]:
        return {"token_ids": np.array(ids), "token_mask": np.arange(len(ids)) >= first}

    assert shared_prefix({"chosen": side([1, 2, 3], 2), "rejected": side([1, 2, 3, 4], 3)}) == 2
    assert shared_prefix({"chosen": side([1, 2, 3], 2), "rejected": side([1, 5, 3, 4], 3)}) == 1
    assert shared_prefix({"chosen": side([9, 2, 3], 2), "rejected": side([1, 5, 3, 4], 3)}) == 0


def test_margins_are_those_of_the_pairs(tiny_model: Path) -> None:
    rows = encoded(tiny_model, margin=2.5)
    del rows[1]["margin"]
    assert pair_batch(rows).sequence_columns["margins"].tolist() == [2.5, 2.5, 0, 0, 2.5, 2.5]


@pytest.mark.parametrize("app", ["rm", "dpo"])
def test_it_learns_and_its_files_are_there(
    app: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(app, "training.num_epochs=6") == 0
    run_dir = tmp_path / "run"
    records = steps(run_dir)
    assert list(records) == list(range(19))
    assert records[18]["validation/rewards/accuracy"] == 1
    assert records[18]["validation/loss"] < 0.5 * records[0]["validation/loss"]
    assert [records[s]["train/num_pairs"] for s in (1, 2, 3, 4)] == [4, 4, 3, 4]
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "training rows: 11 with " in said
    assert "accuracy 1.000" in said
    assert ("calibration error" in said) == (app == "rm")


@pytest.mark.parametrize(
    "given",
    [("rm",), ("dpo",), ("dpo", CACHED), ("dpo", CACHED, "training.lora={r: 4}")],
    ids=["rm", "on the fly", "cached", "cached, adapters"],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    start: Start, tmp_path: Path, given: tuple[str, ...]
) -> None:
    settings = (*given, "checkpoint_every=1", "keep_checkpoints=9")
    assert start(*settings) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000004"  # in the second epoch
    assert start(*settings, f"resume_from={checkpoint}", run_dir="again") == 0
    whole, again = steps(tmp_path / "run"), steps(tmp_path / "again")
    assert list(again) == [4, 5, 6]
    for step in (5, 6):
        for name in ("train/loss", "train/grad_norm", "train/rewards/margin"):
            assert again[step][name] == whole[step][name]
    first, second = weights(tmp_path / "run", 6), weights(tmp_path / "again", 6)
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("app", ["rm", "dpo"])
def test_packed_padded_and_fixed_micro_batches_are_one(
    app: str, start: Start, tmp_path: Path
) -> None:
    sgd = ("training.optimizer=torch.optim.SGD", "training.optimizer_args={}")
    for name, overrides in {
        "packed": (),
        "padded": ("training.packing=padded",),
        "fixed": ("training.packing=fixed", "training.micro_batch_size=2"),
    }.items():
        assert start(app, *sgd, *overrides, run_dir=name) == 0
    packed = steps(tmp_path / "packed")
    for other in ("padded", "fixed"):
        for step, record in steps(tmp_path / other).items():
            for name in ("train/loss", "train/grad_norm", "validation/loss"):
                if name in record:
                    expected = pytest.approx(packed[step][name], rel=2e-5)
                    assert record[name] == expected, (other, step, name)
    ends = [weights(tmp_path / name, 6) for name in ("packed", "padded", "fixed")]
    for name, tensor in ends[0].items():
        for other_weights in ends[1:]:
            torch.testing.assert_close(other_weights[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("more", [(), ("training.lora={r: 4}",)], ids=["full", "adapters"])
def test_the_margin_is_exactly_0_before_the_first_step(
    start: Start, tmp_path: Path, more: tuple[str, ...]
) -> None:
    assert start("dpo", *more) == 0
    records = steps(tmp_path / "run")
    assert records[0]["validation/rewards/margin"] == 0
    assert records[1]["train/rewards/margin"] == 0
    assert records[1]["train/loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert records[2]["train/rewards/margin"] != 0
    assert start("dpo", CACHED, *more, run_dir="cached") == 0
    cached = steps(tmp_path / "cached")
    assert abs(cached[0]["validation/rewards/margin"]) < 1e-6  # other micro-batches
    for step in (1, 2, 3):
        assert cached[step]["train/loss"] == pytest.approx(records[step]["train/loss"], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        ("training.pair_loss=burnish_losses.pair_losses.ipo_pair_loss",),
        (
            "training.pair_loss=burnish_losses.pair_losses.sigmoid_pair_loss",
            "training.pair_loss_args={label_smoothing: 0.1}",
        ),
        ("training.loss_args={beta: 0.2, nll_coefficient: 0.5}",),
        (f"training.loss={PREFERENCE}.cpo_loss", "training.reference=null"),
        (f"training.loss={PREFERENCE}.simpo_loss", "training.reference=null"),
        (f"training.loss={PREFERENCE}.orpo_loss", "training.reference=null"),
    ],
)
def test_every_objective_learns(start: Start, tmp_path: Path, settings: tuple[str, ...]) -> None:
    assert start("dpo", *settings, "training.num_epochs=5") == 0
    records = steps(tmp_path / "run")
    assert records[15]["validation/rewards/accuracy"] == 1
    assert records[15]["validation/loss"] < records[0]["validation/loss"]
    with_nll = any("nll" in s or "cpo" in s or "orpo" in s for s in settings)
    assert ("train/loss/nll" in records[1]) == with_nll


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("training.loss=x",), "training.loss: loss must be a dotted path, got 'x'"),
        (("training.loss_args={betta: 1}",), "training.loss_args: unknown 'betta'; did you mean"),
        (("training.loss_args={beta: -1}",), "training.loss_args: burnish_losses.preference.dpo"),
        (("training.reference=null",), "fails without a reference, "),
        (
            (f"training.loss={PREFERENCE}.simpo_loss",),
            "training.reference: must be null for burnish_losses.preference.simpo_loss",
        ),
        (("training.pair_loss_args={e: 1}",), "must come with training.pair_loss"),
        (
            (
                "training.pair_loss=burnish_losses.pair_losses.ipo_pair_loss",
                "training.pair_loss_args={label_smoothing: 0.1}",
            ),
            "training.pair_loss_args: unknown 'label_smoothing'",
        ),
        (("training.max_tokens=200",), "must hold the longest row, 2 x training.max_length = 256"),
    ],
)
def test_what_a_dpo_recipe_cannot_say(
    refused: Callable[..., list[str]], settings: tuple[str, ...], message: str
) -> None:
    (problem,) = refused("dpo", *settings)
    assert message in problem


def test_a_reward_model_is_read_by_transformers_and_gives_the_same_scores(
    start: Start, tmp_path: Path, tiny_model: Path
) -> None:
    assert start("rm") == 0
    folder = tmp_path / "run" / "checkpoints" / "step_000006" / "model"
    own = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = pair_batch(encoded(tiny_model))
    policy = TorchPolicy(str(folder), learning_rate=None, head="reward")
    scores = policy.scores(batch, [tuple(range(batch.num_sequences))])
    for i, token_ids in enumerate(batch.sequences("token_ids")):
        with torch.no_grad():
            logits = own(input_ids=torch.tensor(token_ids)[None]).logits
        assert float(logits) == pytest.approx(float(scores[i]), rel=1e-4, abs=1e-5)


def test_the_margins_of_the_rows_are_asked_for(start: Start, tmp_path: Path) -> None:
    assert start("rm", "data.train.margin=3.0") == 0
    assert start("rm", run_dir="without") == 0
    first, without = (steps(tmp_path / name)[1]["train/loss"] for name in ("run", "without"))
    assert first > without + 1


def test_pairs_of_one_answer_are_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("dpo", "data.train.same=1") == 2
    assert "two completions that differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([0.0], 0.0),  # a tie is right by half, and says so
        ([100.0, 100.0], 0.0),
        ([100.0, -100.0], 0.5),
        ([np.log(3), np.log(3), np.log(3), -np.log(3)], 0.0),  # 3/4 said, 3/4 right
        ([np.log(3)] * 2, 0.25),
    ],
)
def test_the_calibration_error_by_hand(gaps: list[float], expected: float) -> None:
    assert rm.calibration_error(np.array(gaps)) == pytest.approx(expected, abs=1e-9)


def test_a_loss_can_be_sent_to_workers() -> None:
    training: Any = DpoConfig.model_fields["training"].annotation
    made = training(
        batch_size=1, learning_rate=1.0, max_length=8, max_tokens=16, loss_args={"beta": 0.3}
    ).loss_function()
    back = pickle.loads(pickle.dumps(made))
    assert isinstance(back, partial)
    assert (back.func, back.keywords) == (dpo_loss, {"beta": 0.3})
