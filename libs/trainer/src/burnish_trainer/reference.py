"""The weights a policy started from, kept beside it for a reference's log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from burnish_trainer.lora import adapter_layers, adapters_off


class Reference:
    """What a model is now, to be swapped in later.

    With adapters it is the model without them, and nothing is kept. Else the weights that are
    trained are copied to the CPU's memory, each rank its own shard; what is frozen stays the same.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}
        if not adapter_layers(model):
            self._kept = {name: _host_copy(local) for name, local in _trained(model)}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model is its reference within the block, and bit for bit what it was after it."""
        if not self._kept:
            with adapters_off(self._model):
                yield
            return
        trained = dict(_trained(self._model))
        current = {name: _host_copy(local) for name, local in trained.items()}
        try:
            _copy(self._kept, trained)
            yield
        finally:
            _copy(current, trained)


def _trained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of every parameter that is trained."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            yield name, local.detach()


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
