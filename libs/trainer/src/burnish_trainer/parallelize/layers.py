"""Where a transformers model keeps its layers."""

from __future__ import annotations

from torch import nn


def layer_stacks(model: nn.Module) -> list[list[nn.Module]]:
    """The layers of the decoder and, in a vision-language model, of the vision tower.

    They are the longest lists of modules that lie in no other such list (experts do).

    Raises:
        ValueError: if there are none.
    """
    lists = {name: list(m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {
        name: layers
        for name, layers in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists if other != name)
    }
    stacks = [layers for layers in outer.values() if len({type(m) for m in layers}) == 1]
    if not stacks:
        raise ValueError(
            f"a model must hold its decoder layers in an nn.ModuleList, got none in "
            f"{type(model).__name__}; use a transformers decoder"
        )
    return stacks
