"""Metrics as lines of JSON, and small helpers on the plain lists read back from them.

A line is `{"schema_version": 1, "step": 3, "time_s": 1790000000.0, "reward/mean": 0.5, ...}`;
`time_s` is Unix time. JSON has no NaN: a number that is not finite is written as null, and told
under `not_finite`, from where reading restores it. None counts as NaN, and what is no number is
written as its text, since one odd value must not cost the others.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

SCHEMA_VERSION = 1
RESERVED_NAMES = frozenset({"schema_version", "step", "time_s", "not_finite"})

Record = dict[str, float | str]


def as_value(value: object) -> float | str:
    """A metric's value as a number, as NaN for None, or as the text of what `float` refuses."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        return str(value)
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is a tensor's
        return str(value)


def format_line(step: int, metrics: Mapping[str, float | str], *, time_s: float) -> str:
    """One line of JSON, without the newline; values go through `as_value`.

    Args:
        step: a whole number, NumPy's too.

    Raises:
        ValueError: a metric with a reserved name.
    """
    taken = sorted(RESERVED_NAMES & metrics.keys())
    if taken:
        raise ValueError(f"Metrics must not be named {sorted(RESERVED_NAMES)}, got {taken}.")
    values = {k: as_value(v) for k, v in metrics.items()}
    broken = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    line: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "step": int(step),
        "time_s": time_s,
    }
    line |= {k: None if k in broken else v for k, v in values.items()}
    if broken:
        line["not_finite"] = broken
    return json.dumps(line, allow_nan=False)


def read_metrics(path: str | Path) -> list[Record]:
    """All lines of a metrics.jsonl, in order, with `step` and `time_s` among the values.

    A line cut short, as a killed process leaves it, or one that is no JSON object, is skipped with
    a warning.

    Raises:
        ValueError: a line of another schema version.
    """
    records: list[Record] = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                line = None
            if not isinstance(line, dict):
                warnings.warn(f"{path}, line {number}: not whole, skipped.", stacklevel=2)
                continue
            version = line.pop("schema_version", None)
            if version != SCHEMA_VERSION:
                raise ValueError(
                    f"{path}, line {number}: schema_version must be {SCHEMA_VERSION}, got "
                    f"{version}; read it with the version of burnish-tracking that wrote it."
                )
            broken = line.pop("not_finite", {})
            records.append(line | {name: float(value) for name, value in broken.items()})
    return records


def series(
    records: Sequence[Mapping[str, float | str]], name: str
) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, ordered by step.

    A step logged twice, as by a run that was killed and resumed, counts with its last value.

    Raises:
        ValueError: no record has the metric.
    """
    values = {int(record["step"]): float(record[name]) for record in records if name in record}
    if not values:
        known = sorted({key for record in records for key in record} - RESERVED_NAMES)
        raise ValueError(f"The metric must be one of those logged, {known}, got {name!r}.")
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def trailing_means(values: Sequence[float], window: int = 5) -> list[float]:
    """At each place the mean of the last `window` values up to it, fewer at the start.

    Values that are NaN are left out; where nothing is left, the mean is NaN.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}.")
    means = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        means.append(math.fsum(known) / len(known) if known else math.nan)
    return means
