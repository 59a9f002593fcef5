"""Zig-zag shards of a pack against values by hand and a loop over chunks."""

import numpy as np
import pytest
from burnish_packing.context_parallel import (
    context_parallel_multiple,
    merge_positions,
    shard_lengths,
    zigzag_positions,
)
from burnish_packing.layout import pack_layout
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.integers(1, 8)


def chunk_by_chunk(lengths: list[int], size: int, rank: int) -> list[int]:
    """The definition: cut every sequence into 2 * size chunks, take two of them."""
    held: list[int] = []
    start = 0
    for length in lengths:
        chunks = np.array_split(np.arange(start, start + length), 2 * size)
        held += [*chunks[rank], *chunks[2 * size - 1 - rank]]
        start += length
    return held


def test_two_ranks_by_hand() -> None:
    assert zigzag_positions([8], 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions([8], 2, 1).tolist() == [2, 3, 4, 5]
    # Sequence by sequence, not over the whole pack.
    assert zigzag_positions([4, 8], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag_positions([4, 8], 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    # Of 0 3 4 5 10 11 | 1 2 6 7 8 9: position 1 is the 6th entry, position 2 the 7th, ...
    assert merge_positions([4, 8], 2).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]


def test_three_ranks_by_hand() -> None:
    held = [zigzag_positions([12], 3, rank).tolist() for rank in range(3)]
    assert held == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("context", "tensor", "multiple"),
    [(1, 1, 1), (1, 4, 4), (2, 1, 4), (2, 2, 8), (3, 1, 6), (8, 8, 128)],
)
def test_the_multiple_of_every_sequence(context, tensor, multiple) -> None:
    assert context_parallel_multiple(context, tensor) == multiple


@given(size=SIZES, chunks=st.lists(st.integers(0, 5), max_size=6), factor=st.integers(1, 4))
def test_merge_undoes_the_sharding(size, chunks, factor) -> None:
    """At every size and every multiple of its chunks."""
    lengths = [2 * size * factor * chunk for chunk in chunks]
    values = np.random.default_rng(0).integers(0, 10**6, sum(lengths))
    shards = [zigzag_positions(lengths, size, rank) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert shard.dtype == np.int64
        assert len(shard) == sum(lengths) // size
        if size > 1:
            assert shard.tolist() == chunk_by_chunk(lengths, size, rank)
    merged = merge_positions(lengths, size)
    assert merged.dtype == np.int64
    gathered = np.concatenate([values[shard] for shard in shards])
    assert np.array_equal(gathered[merged], values)
    # And the other way: sharding undoes the merge.
    assert np.array_equal(merged[np.concatenate(shards)], np.arange(len(values)))


@given(size=SIZES, chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_causal_pairs_are_even_over_the_ranks(size, chunks) -> None:
    """What zig-zag is for: every rank scores the same number of query-key pairs."""
    lengths = [2 * size * chunk for chunk in chunks]
    seen = np.concatenate([np.arange(1, length + 1) for length in lengths])
    pairs = [int(seen[zigzag_positions(lengths, size, rank)].sum()) for rank in range(size)]
    assert len(set(pairs)) == 1


@given(lengths=st.lists(st.integers(0, 9), max_size=5))
def test_one_rank_holds_everything_in_order(lengths) -> None:
    assert zigzag_positions(lengths, 1, 0).tolist() == list(range(sum(lengths)))
    assert merge_positions(lengths, 1).tolist() == list(range(sum(lengths)))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    size=SIZES,
    tensor=st.integers(1, 4),
    fill=st.integers(0, 3),
)
def test_the_layout_of_a_pack_is_shardable(lengths, size, tensor, fill) -> None:
    multiple = context_parallel_multiple(size, tensor)
    used = sum(-(-length // multiple) * multiple for length in lengths)
    layout = pack_layout(lengths, sequence_multiple=multiple, fill_to=used + fill * multiple)
    sharded = shard_lengths(layout, size)
    assert sharded[: len(lengths)].tolist() == layout.padded_lengths.tolist()
    assert sharded[len(lengths) :].tolist() == ([fill * multiple] if fill else [])
    assert sharded.sum() == layout.num_positions
    for rank in range(size):
        assert len(zigzag_positions(sharded, size, rank)) % tensor == 0


def test_the_fill_is_a_sequence_of_its_own() -> None:
    layout = pack_layout([3, 8], sequence_multiple=4, fill_to=16)
    sharded = shard_lengths(layout, 2)
    assert sharded.tolist() == [4, 8, 4]
    # Not [4, 12]: the last sequence's chunks are those of 8 tokens.
    assert zigzag_positions(sharded, 2, 0).tolist() == [0, 3, 4, 5, 10, 11, 12, 15]


def test_what_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 2 \* context_parallel_size = 4, got 6.*1;"):
        zigzag_positions([8, 6], 2, 0)
    with pytest.raises(ValueError, match="context_parallel_multiple"):
        merge_positions([5], 2)
    with pytest.raises(ValueError, match="sequence 0; lay the pack out"):
        shard_lengths(pack_layout([3, 4]), 2)
    with pytest.raises(ValueError, match=r"the fill .* = 4 positions, got 2"):
        shard_lengths(pack_layout([4], fill_to=6), 2)
    assert shard_lengths(pack_layout([4], fill_to=6), 1).tolist() == [4, 2]


def test_shared_prefixes_are_refused() -> None:
    layout = pack_layout([4, 4], prefix_ids=[0, 0], prefix_lengths=[2, 2], fill_to=8)
    for size in (1, 2):
        with pytest.raises(ValueError, match="no shared prefixes"):
            shard_lengths(layout, size)


@pytest.mark.parametrize("rank", [-1, 2, True])
def test_a_rank_outside_the_group_is_refused(rank) -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to 1"):
        zigzag_positions([8], 2, rank)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_size_that_is_none_is_refused(size) -> None:
    for call in (context_parallel_multiple, lambda size: zigzag_positions([8], size, 0)):
        with pytest.raises(ValueError, match="context_parallel_size must be an integer >= 1"):
            call(size)
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer >= 1"):
        context_parallel_multiple(1, size)
