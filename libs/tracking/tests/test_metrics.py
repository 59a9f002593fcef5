import json
import math
from pathlib import Path
from typing import Any

import pytest
from burnish_tracking import JsonlLogger, read_metrics, series, trailing_means
from hypothesis import given
from hypothesis import strategies as st


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_line_holds_version_step_time_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(3, {"reward/mean": 0.5, "sample": "7 apples"})
    line = json.loads(path.read_text(encoding="utf-8"))  # there before close
    logger.close()
    assert line.pop("time_s") > 1.7e9
    assert line == {"schema_version": 1, "step": 3, "reward/mean": 0.5, "sample": "7 apples"}


def test_a_number_that_is_not_finite_is_null_and_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(1, {"loss": math.nan, "ratio": -math.inf, "fine": 2.0})
    logger.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert line["loss"] is None
    assert line["not_finite"] == {"loss": "nan", "ratio": "-inf"}
    (record,) = read_metrics(path)
    assert math.isnan(float(record["loss"]))
    assert record["ratio"] == -math.inf
    assert record["fine"] == 2.0


@given(metrics=st.dictionaries(st.text().map("metric/".__add__), st.floats() | st.text()))
def test_what_is_logged_is_read(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float | str]
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(7, metrics)
    logger.close()
    (record,) = read_metrics(path)
    assert record.pop("step") == 7
    record.pop("time_s")
    assert {k: repr(v) for k, v in record.items()} == {k: repr(v) for k, v in metrics.items()}


def test_a_torn_line_costs_only_itself_also_after_a_resume(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", {"schema_version": 1, "step": 1, "x": 1.0})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"schema_version": 1, "step": 2, "x"')
    resumed = JsonlLogger(path)
    resumed.log(2, {"x": 2.0})
    resumed.close()
    with pytest.warns(UserWarning, match="line 2: not whole"):
        records = read_metrics(path)
    assert [(record["step"], record["x"]) for record in records] == [(1, 1.0), (2, 2.0)]


def test_lines_of_two_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    loggers = [JsonlLogger(path), JsonlLogger(path)]
    for step in range(20):
        loggers[step % 2].log(step, {"x": "y" * 10_000})
    for logger in loggers:
        logger.close()
    assert [record["step"] for record in read_metrics(path)] == list(range(20))


@pytest.mark.parametrize("version", [0, 2, None])
def test_another_schema_version_is_refused(tmp_path: Path, version: int | None) -> None:
    path = write(tmp_path / "metrics.jsonl", {"schema_version": version, "step": 1})
    with pytest.raises(ValueError, match=f"line 1: schema_version must be 1, got {version}"):
        read_metrics(path)


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"got \['step'\]"):
        logger.log(1, {"step": 2.0})
    logger.close()


def test_series_is_ordered_and_the_last_value_of_a_step_counts() -> None:
    records = [
        {"step": 1, "x": 1.0},
        {"step": 2, "x": 2.0},
        {"step": 3, "x": 3.0},
        {"step": 2, "x": 2.5},  # resumed from step 1
        {"step": 2, "y": 9.0},
    ]
    assert series(records, "x") == ([1, 2, 3], [1.0, 2.5, 3.0])


def test_series_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"\['reward/mean'\], got 'reward'"):
        series([{"step": 1, "time_s": 0.0, "reward/mean": 1.0}], "reward")


def test_trailing_means_by_hand() -> None:
    assert trailing_means([1, 2, 3, 4, 5, 11]) == [1, 1.5, 2, 2.5, 3, 5]
    assert trailing_means([1, 2, 6], window=1) == [1, 2, 6]
    assert trailing_means([]) == []


def test_trailing_means_leave_nan_out() -> None:
    means = trailing_means([math.nan, 2.0, math.nan, 4.0], window=2)
    assert math.isnan(means[0])
    assert means[1:] == [2.0, 2.0, 4.0]


def test_a_window_holds_something() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        trailing_means([1.0], window=0)


class Scalar:
    """What NumPy's integers are: no int, but with the ways to become one."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value

    def __float__(self) -> float:
        return float(self.value)


class Tensor:
    """As torch's of several elements."""

    def __float__(self) -> float:
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

    def __str__(self) -> str:
        return "tensor([1., 2.])"


def test_an_odd_value_costs_no_line(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {
        "none": None,
        "scalar": Scalar(3),
        "list": [1, 2],
        "tensor": Tensor(),
        "huge": 10**400,
        "fine": 0.5,
    }
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(Scalar(4), metrics)  # type: ignore[arg-type]
    logger.close()
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(float(record.pop("none")))
    assert record.pop("huge") == str(10**400)
    assert record.pop("time_s")
    assert record == {
        "step": 4,
        "scalar": 3.0,
        "list": "[1, 2]",
        "tensor": "tensor([1., 2.])",
        "fine": 0.5,
    }


@pytest.mark.parametrize("line", ["[1, 2]", "7", "null", '"text"'])
def test_a_line_that_is_no_object_is_skipped(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "metrics.jsonl", {"schema_version": 1, "step": 1, "x": 1.0})
    path.write_text(f"{line}\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.warns(UserWarning, match="line 1: not whole, skipped"):
        (record,) = read_metrics(path)
    assert record["x"] == 1.0
