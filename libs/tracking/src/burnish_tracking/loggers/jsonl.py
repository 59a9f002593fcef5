"""Metrics as a file of JSON lines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from burnish_tracking.metrics import format_line


class JsonlLogger:
    """Appends one line per call to `path`; see `burnish_tracking.metrics` for what a line holds.

    Each line is one unbuffered write at the end of the file: it is there when `log` returns, and
    lines of several writers do not mix. A line that a killed run left unfinished is closed first.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        if torn:
            self._file.write(b"\n")

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Numbers, or anything `float` takes, and strings.

        None is written as NaN, and what is none of these as its text; see `format_line` for errors.
        """
        line = format_line(step, metrics, time_s=time.time())
        self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        self._file.close()
