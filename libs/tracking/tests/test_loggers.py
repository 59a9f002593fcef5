import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from burnish_tracking import FanOut, JsonlLogger, TensorboardLogger, read_metrics


class Recorder:
    def __init__(self, *, fails_at: int | None = None, fails_to_close: bool = False) -> None:
        self.fails_at, self.fails_to_close = fails_at, fails_to_close
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        if step == self.fails_at:
            raise ConnectionError("dashboard gone")
        self.steps.append(step)

    def close(self) -> None:
        if self.fails_to_close:
            raise OSError("disk full")
        self.closed = True


def test_a_failing_backend_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    before, failing, after = Recorder(), Recorder(fails_at=2), Recorder()
    with FanOut([before, failing, after]) as logger:
        for step in range(1, 6):
            logger.log(step, {"x": 1.0})
    assert before.steps == after.steps == [1, 2, 3, 4, 5]
    assert failing.steps == [1]
    assert before.closed
    assert after.closed
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "Recorder failed at step 2; it is dropped."
    assert "dashboard gone" in caplog.text


def test_one_that_fails_to_close_leaves_the_others_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck, fine = Recorder(fails_to_close=True), Recorder()
    logger = FanOut([stuck, fine])
    logger.close()
    logger.close()  # again is harmless
    assert fine.closed
    assert len(caplog.records) == 1


def test_an_interrupt_is_no_failure_of_a_backend() -> None:
    class Interrupted(Recorder):
        def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FanOut([Interrupted()]).log(1, {})


def test_a_file_that_is_gone_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, fine = JsonlLogger(tmp_path / "a.jsonl"), JsonlLogger(tmp_path / "b.jsonl")
    broken.close()
    with FanOut([broken, fine]) as logger:
        logger.log(1, {"x": 1.0})
        logger.log(2, {"x": 2.0})
    assert [record["x"] for record in read_metrics(tmp_path / "b.jsonl")] == [1.0, 2.0]
    assert len(caplog.records) == 1


def test_tensorboard_files_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorboardLogger(tmp_path)
    logger.log(1, {"reward/mean": 0.25, "sample": "max(3, 8) = 8"})
    logger.log(2, {"reward/mean": 0.75})

    events = EventAccumulator(str(tmp_path)).Reload()  # flushed, so there before close
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.75)]
    (text,) = events.Tensors("sample")
    assert (text.step, list(text.tensor_proto.string_val)) == (1, [b"max(3, 8) = 8"])
    logger.close()


def test_an_odd_value_drops_no_backend(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    path = tmp_path / "metrics.jsonl"
    odd: dict[str, Any] = {"x": None, "y": [1, 2]}
    with FanOut([JsonlLogger(path), TensorboardLogger(tmp_path)]) as logger:
        logger.log(1, odd)
        logger.log(2, {"x": 2.0})
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert caplog.records == []
