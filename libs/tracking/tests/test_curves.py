from pathlib import Path

import pytest
from burnish_tracking import JsonlLogger, plot_curves

pytest.importorskip("matplotlib")


def log_run(path: Path, *, scale: float) -> Path:
    logger = JsonlLogger(path)
    for step in range(1, 21):
        logger.log(step, {"reward/mean": scale * step})
        if step % 10 == 0:
            logger.log(step, {"validation/accuracy": scale * step})
    logger.close()
    return path


def drawn_lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float], list[float]]]:
    """(label, steps, values) of every line that `plot_curves` draws from now on."""
    from matplotlib.axes import Axes

    lines: list[tuple[str, list[float], list[float]]] = []
    plot = Axes.plot

    def record(axes: Axes, x: list[float], y: list[float], *args: str, **kwargs: object) -> object:
        lines.append((str(kwargs.get("label", "")), list(x), list(y)))
        return plot(axes, x, y, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", record)
    return lines


def test_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log_run(tmp_path / "metrics.jsonl", scale=1.0)
    lines = drawn_lines(monkeypatch)
    png = tmp_path / "curves.png"
    plot_curves(path, png, ["reward/mean"], points=["validation/accuracy"])
    assert png.read_bytes().startswith(b"\x89PNG")
    raw, mean, validation = lines
    assert raw == ("", list(range(1, 21)), [float(step) for step in range(1, 21)])
    assert mean[0] == "reward/mean, mean of 5 steps"
    assert mean[2][-1] == 18.0  # of 16 to 20
    assert validation == ("validation/accuracy", [10, 20], [10.0, 20.0])


def test_several_runs_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {f"seed {i}": log_run(tmp_path / f"{i}.jsonl", scale=i) for i in (1, 2)}
    lines = drawn_lines(monkeypatch)
    plot_curves(paths, tmp_path / "curves.png", ["reward/mean"])
    labels = [label for label, _, _ in lines if label]
    assert labels == [f"seed {i} reward/mean, mean of 5 steps" for i in (1, 2)]


def test_a_metric_that_was_not_logged_is_named(tmp_path: Path) -> None:
    path = log_run(tmp_path / "metrics.jsonl", scale=1.0)
    with pytest.raises(ValueError, match="got 'reward'"):
        plot_curves(path, tmp_path / "curves.png", ["reward"])
