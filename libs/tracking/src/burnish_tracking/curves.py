"""Metrics of one or several runs as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from burnish_tracking.metrics import read_metrics, series, trailing_means


def plot_curves(
    metrics_paths: str | Path | Mapping[str, str | Path],
    png_path: str | Path,
    keys: Sequence[str],
    *,
    points: Sequence[str] = (),
    window: int = 5,
) -> None:
    """Draw metrics over steps on one pair of axes.

    Args:
        metrics_paths: a metrics.jsonl, or several by the name the legend gives each run.
        png_path: the picture, overwritten.
        keys: metrics drawn pale as they are, and in full as means of `window` steps.
        points: metrics measured now and then, as validation is: drawn as they are, with markers.

    Raises:
        ValueError: a metric that a run did not log.

    Needs `burnish-tracking[plot]`.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    runs = metrics_paths if isinstance(metrics_paths, Mapping) else {"": metrics_paths}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    colors = iter(f"C{i}" for i in range(len(runs) * (len(keys) + len(points))))
    for run, path in runs.items():
        records = read_metrics(path)
        for key in keys:
            steps, values = series(records, key)
            color = next(colors)
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
            label = f"{run} {key}, mean of {window} steps".strip()
            axes.plot(steps, trailing_means(values, window), color=color, label=label)
        for key in points:
            steps, values = series(records, key)
            axes.plot(steps, values, "o--", color=next(colors), label=f"{run} {key}".strip())
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png_path, format="png", dpi=120)
