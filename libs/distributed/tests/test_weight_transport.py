"""Weights as bytes and back: bit for bit, whatever dtype, shape and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from burnish_distributed.weight_transport import pack_weights, unpack_weights
from hypothesis import given
from hypothesis import strategies as st


def zoo() -> dict[str, torch.Tensor]:
    """Tensors that a transport gets wrong; values include NaN, -0.0 and infinity."""
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45])
    return {
        "float32": torch.randn(3, 5),
        "special": special,
        "bfloat16": special.bfloat16(),
        "float16": torch.randn(7).half(),
        "int64": torch.tensor([[2**62, -1], [0, -(2**63)]]),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.25),
        "scalar bfloat16": torch.tensor(3.25, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "every second": torch.arange(10)[::2],
        "expanded": torch.tensor([1.5]).expand(4),
        "part of a storage": torch.arange(9.0)[4:7],
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for t in (got, expected)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 28])
def test_weights_come_back_bit_for_bit(bucket_bytes: int) -> None:
    weights = zoo()
    got = dict(unpack_weights(pack_weights(weights.items(), bucket_bytes)))
    assert list(got) == list(weights)
    for name, tensor in weights.items():
        assert_same_bits(got[name], tensor)
        assert not got[name].requires_grad


def test_buckets_are_closed_when_full_and_a_large_tensor_gets_its_own() -> None:
    sizes_bytes = [40, 40, 40, 400, 8]
    weights = [(str(i), torch.zeros(size // 4)) for i, size in enumerate(sizes_bytes)]
    buckets = [[name for name, *_ in b] for b in pack_weights(weights, bucket_bytes=100)]
    assert buckets == [["0", "1"], ["2"], ["3"], ["4"]]


def test_no_weights_make_no_bucket() -> None:
    assert list(pack_weights([])) == []


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(1, 100),
)
def test_no_bucket_is_above_its_size_but_for_one_tensor(sizes: list[int], bucket: int) -> None:
    weights = [(str(i), torch.zeros(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    buckets = list(pack_weights(weights, bucket))
    assert [name for b in buckets for name, *_ in b] == [str(i) for i in range(len(sizes))]
    for entries in buckets:
        assert entries
        assert len(entries) == 1 or sum(raw.nbytes for *_, raw in entries) <= bucket


def test_weights_are_taken_one_bucket_at_a_time() -> None:
    taken: list[int] = []

    def weights():
        for i in range(4):
            taken.append(i)
            yield str(i), torch.zeros(10, dtype=torch.uint8)

    buckets = pack_weights(weights(), bucket_bytes=10)
    next(buckets)
    assert taken == [0, 1]


def test_read_only_memory_is_wrapped_without_a_warning_or_a_copy() -> None:
    # pytest makes torch's warning about read-only arrays an error
    for bucket in pack_weights({"w": torch.arange(6.0).reshape(2, 3)}.items()):
        frozen = []
        for name, dtype, shape, raw in bucket:
            raw = raw.copy()
            raw.flags.writeable = False
            frozen.append((name, dtype, shape, raw))
        ((name, tensor),) = unpack_weights([frozen])
        assert (name, tensor.tolist()) == ("w", [[0, 1, 2], [3, 4, 5]])
        assert tensor.data_ptr() == frozen[0][3].ctypes.data


def test_tensors_keep_their_memory_alive() -> None:
    def unpacked() -> torch.Tensor:
        raw = np.frombuffer(bytearray(torch.arange(5000.0).numpy().tobytes()), dtype=np.uint8)
        ((_, tensor),) = unpack_weights([[("w", "float32", (5000,), raw)]])
        return tensor

    tensors = [unpacked() for _ in range(20)]
    assert all(torch.equal(tensor, torch.arange(5000.0)) for tensor in tensors)
