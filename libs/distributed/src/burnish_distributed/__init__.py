"""Where things run: ragged batches, collectives, Ray worker groups, weight transport.

Importing this package does not import Ray; only ``cluster``, ``workers`` and ``weight_transport``'s
object-store functions need it (``pip install burnish-distributed[ray]``).
"""

from burnish_distributed.batch import RaggedBatch
from burnish_distributed.collectives import (
    all_gather_object,
    all_reduce,
    barrier,
    initialize_process_group,
    rank,
    world_size,
)
from burnish_distributed.sharding import shard_batch

__version__ = "0.1.0"

__all__ = [
    "RaggedBatch",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "initialize_process_group",
    "rank",
    "shard_batch",
    "world_size",
]
