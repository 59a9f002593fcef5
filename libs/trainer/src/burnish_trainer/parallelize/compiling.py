"""torch.compile where shapes allow."""

from __future__ import annotations

from torch import nn

from burnish_trainer.parallelize.layers import layer_stacks


def compile_layers(model: nn.Module) -> None:
    """Compile every part of every layer but its attention, in place, for shapes that change.

    Attention runs span by span: its Python depends on the pack, and a compiled one would be
    compiled again for every new pack. What is left, norms and the feed-forward, is compiled once
    for all layers. Names of parameters stay.
    """
    for stack in layer_stacks(model):
        for layer in stack:
            for name, child in layer.named_children():
                if name.endswith("norm") or not ("attn" in name or "attention" in name):
                    child.compile(dynamic=True)
