"""Metrics as TensorBoard event files, written by the tensorboard package alone, without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from burnish_tracking.metrics import as_value


class TensorboardLogger:
    """Numbers as scalars, strings as text, in `directory`; needs `burnish-tracking[tensorboard]`.

    Flushed at every call, so that a killed run loses nothing.
    """

    def __init__(self, directory: str | Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            _text(name, value)
            if isinstance(value, str)
            else Summary.Value(tag=name, simple_value=value)
            for name, value in ((name, as_value(value)) for name, value in metrics.items())
        ]
        self._writer.add_event(
            Event(wall_time=time.time(), step=int(step), summary=Summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _text(name: str, value: str) -> object:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    return Summary.Value(
        tag=name,
        metadata=create_summary_metadata(display_name=name, description=""),
        tensor=TensorProto(dtype=DT_STRING, string_val=[value.encode()]),
    )
