"""A vLLM engine in a process of its own, for `test_vllm_engine.py`.

vLLM changes the process it runs in (threads, logging, warnings), which other tests share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from burnish_generation.vllm_engine import VllmEngine
from safetensors.torch import load_file

_engine: Any = None
_next_weights: dict[str, torch.Tensor] = {}


def build(model: str, arguments: dict[str, Any]) -> None:
    """Start the engine of this process."""
    global _engine
    _engine = VllmEngine(model, **arguments)


def call(method: str, *args: Any) -> Any:
    """Call a method of the engine."""
    return getattr(_engine, method)(*args)


def update(file: str, weight_version: int, *, how: str, extra: dict[str, torch.Tensor]) -> int:
    """Update from a safetensors file, or from nothing where it is empty, and extra tensors."""
    weights = (load_file(file) if file else {}) | extra
    if how == "callable":
        return _engine.update_weights(lambda: iter(weights.items()), weight_version)
    _next_weights.clear()
    _next_weights.update(weights)
    return _engine.update_weights(f"{__name__}:next_weights", weight_version)


def next_weights() -> Iterator[tuple[str, torch.Tensor]]:
    """A weight source by dotted path."""
    yield from _next_weights.items()


def resolved(source: str) -> str:
    """The name of what a dotted path means."""
    from burnish_generation.weight_receiver import resolve_source

    return resolve_source(source).__qualname__
