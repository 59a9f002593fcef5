"""Packing inside other trainers: every example's packed run has the losses of its other one."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same(losses: list[float], others: list[float]) -> None:
    assert len(losses) == len(others) == 4
    # They must be losses that move, else any two runs would agree.
    assert len({round(loss, 5) for loss in losses}) == 4
    assert losses == pytest.approx(others, rel=1e-5)


def test_a_torch_loop() -> None:
    example = load("torch_loop")
    rows = example.random_rows(64)
    one_by_one = example.train(rows, mode="fixed", micro_batch_size=1)
    assert_same(example.train(rows, mode="packed", max_tokens=256), one_by_one)
    assert_same(example.train(rows, mode="padded", max_tokens=256), one_by_one)


@pytest.mark.parametrize("name", ["hugging_face_trainer", "trl_sft"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_trainer(name: str) -> None:
    example = load(name)
    rows = example.random_rows(64)
    assert_same(example.train(rows, "packed"), example.train(rows, "padded"))


def test_every_example_is_tested() -> None:
    named = {"torch_loop", "hugging_face_trainer", "trl_sft"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == named | {Path(__file__).stem}
