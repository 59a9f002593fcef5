"""Named weights from one process to others, bit for bit, through Ray's object store.

The store is shared memory within a node (readers map it, nothing is copied) and is fetched over
the network between nodes, so one code path serves a laptop and a cluster, and nothing is left on
disk when a run is killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

NamedWeights = Iterable[tuple[str, torch.Tensor]]
Packed = tuple[str, str, tuple[int, ...], np.ndarray]  # name, dtype, shape, raw bytes


def pack_weights(weights: NamedWeights, bucket_bytes: int = 1 << 28) -> Iterator[list[Packed]]:
    """Cut named weights into buckets of raw bytes.

    Args:
        weights: (name, tensor) pairs, any dtype, any layout (made contiguous here).
        bucket_bytes: a bucket is closed once it holds this many bytes; a larger tensor gets a
            bucket of its own.

    Yields:
        Lists of (name, dtype name, shape, uint8 array): plain data that pickles without a copy.
    """
    bucket: list[Packed] = []
    size_bytes = 0
    for name, tensor in weights:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy()
        if bucket and size_bytes + raw.nbytes > bucket_bytes:
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw))
        size_bytes += raw.nbytes
    if bucket:
        yield bucket


def unpack_weights(buckets: Iterable[Sequence[Packed]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse of `pack_weights`. Tensors share the buckets' memory: read, do not write."""
    for bucket in buckets:
        for name, dtype, shape, raw in bucket:
            yield name, _from_bytes(raw, getattr(torch, dtype), shape)


def _from_bytes(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    # The store maps memory read-only, where torch.from_numpy warns, and copying would double the
    # peak: so the same memory is wrapped once more, declared writable, and kept alive.
    interface = dict(raw.__array_interface__, data=(raw.ctypes.data, False))
    wrapper = type("Memory", (), {"__array_interface__": interface, "owner": raw})()
    return torch.from_numpy(np.asarray(wrapper)).view(dtype).reshape(shape)


def put_weights(weights: NamedWeights, bucket_bytes: int = 1 << 28) -> list[Any]:
    """Put named weights into Ray's object store; returns the references (small, send these)."""
    import ray

    return [ray.put(bucket) for bucket in pack_weights(weights, bucket_bytes)]


def get_weights(references: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the weights behind `put_weights`' references, one bucket in memory at a time."""
    import ray

    return unpack_weights(ray.get(reference) for reference in references)
