"""What a person sees of a training run: metrics, logs, timers, progress, curves."""

from burnish_tracking.curves import plot_curves
from burnish_tracking.loggers import FanOut, JsonlLogger, Logger, TensorboardLogger
from burnish_tracking.metrics import SCHEMA_VERSION, read_metrics, series, trailing_means
from burnish_tracking.progress import StepProgress
from burnish_tracking.timers import Timers

__version__ = "0.1.0"

__all__ = [
    "SCHEMA_VERSION",
    "FanOut",
    "JsonlLogger",
    "Logger",
    "StepProgress",
    "TensorboardLogger",
    "Timers",
    "plot_curves",
    "read_metrics",
    "series",
    "trailing_means",
]
