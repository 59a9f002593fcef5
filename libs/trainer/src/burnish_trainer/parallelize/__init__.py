"""Ways to spread a model over ranks, and to compile it."""

from burnish_trainer.parallelize.compiling import compile_layers
from burnish_trainer.parallelize.fsdp import full_tensor, shard_parameters
from burnish_trainer.parallelize.layers import layer_stacks

__all__ = ["compile_layers", "full_tensor", "layer_stacks", "shard_parameters"]
