"""vLLM worker extension that loads new weights into the running model.

vLLM imports this module in each of its workers before the model is built
(``worker_extension_cls``), which is when the CPU build must be told to keep its linear layers'
weights: it packs them into a private layout otherwise and empties ``layer.weight``, so that
nothing is left to load into.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import utils as vllm_layer_utils
from vllm.platforms import current_platform

Source = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def _keep_plain_weight(layer: Any, remove_weight: bool = False) -> None:  # noqa: ARG001
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    vllm_layer_utils.dispatch_cpu_unquantized_gemm = _keep_plain_weight


class WeightReceiver:
    """Mixed into vLLM's worker by vLLM itself; ``self`` is the worker."""

    vllm_config: Any
    model_runner: Any

    def receive_weights(self, source: Source | str) -> int:
        """Load ``source()``'s (Hugging Face name, tensor) pairs; returns how many were loaded.

        Raises:
            ValueError: if the source is empty, or holds names that the model did not take.
        """
        given: list[str] = []

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in resolve_source(source)():
                given.append(name)
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            loaded = self.model_runner.model.load_weights(counted())
        if not given or not loaded:
            raise ValueError(
                f"a weight update must change the model, got {len(given)} tensors of which "
                f"{len(loaded or ())} were taken; give Hugging Face names"
            )
        return len(given)


def resolve_source(source: Source | str) -> Source:
    """The callable that ``source`` is or names (``"package.module:function"``)."""
    if callable(source):
        return source
    module, _, function = source.partition(":")
    resolved: Source = getattr(importlib.import_module(module), function)
    return resolved
