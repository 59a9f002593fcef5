"""Ways to spread a model over ranks."""

from burnish_trainer.parallelize.fsdp import full_tensor, shard_parameters

__all__ = ["full_tensor", "shard_parameters"]
