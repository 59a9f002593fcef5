"""Where metrics go: one protocol, a backend per module, and a fan-out over several."""

from burnish_tracking.loggers.fan_out import FanOut, Logger
from burnish_tracking.loggers.jsonl import JsonlLogger
from burnish_tracking.loggers.tensorboard import TensorboardLogger

__all__ = ["FanOut", "JsonlLogger", "Logger", "TensorboardLogger"]
