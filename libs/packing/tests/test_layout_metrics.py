"""Index arrays of sequences in a row, and the ratios, by hand."""

import numpy as np
import pytest
from burnish_packing import (
    cu_seqlens,
    fill_ratio,
    padding_ratio,
    position_ids,
    rank_imbalance,
    sequence_ids,
)
from burnish_packing.metrics import padding_to_longest


def test_layout_by_hand() -> None:
    ends = cu_seqlens([2, 0, 3])
    assert ends.dtype == np.int32
    assert ends.tolist() == [0, 2, 2, 5]
    assert position_ids([2, 0, 3]).tolist() == [0, 1, 0, 1, 2]
    assert sequence_ids([2, 0, 3]).tolist() == [0, 0, 2, 2, 2]


def test_layout_of_nothing() -> None:
    assert cu_seqlens([]).tolist() == [0]
    assert position_ids([]).tolist() == []
    assert sequence_ids([]).tolist() == []


def test_cu_seqlens_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"less than 2\*\*31 for cu_seqlens, got 2147483648"):
        cu_seqlens([2**31 - 1, 1])


def test_ratios_by_hand() -> None:
    assert fill_ratio([6, 9], 10) == 0.75
    assert fill_ratio([], 10) == 0.0
    assert padding_ratio([6, 9], [10, 10]) == 0.25
    assert padding_ratio([], []) == 0.0


def test_padding_of_plain_batches_by_hand() -> None:
    # 2 x 4 and 2 x 6 and 1 x 5 positions for 4 + 2, 3 + 6 and 5 tokens.
    assert padding_to_longest([4, 2, 3, 6, 5], 2) == 1 - 20 / 25
    assert padding_to_longest([4, 2, 3, 6, 5], 9) == 1 - 20 / 30
    assert padding_to_longest([], 2) == 0.0
    assert padding_to_longest([0, 0], 2) == 0.0
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        padding_to_longest([1], 0)


def test_ranks_wait_for_each_other_in_every_slot() -> None:
    # Both ranks have 4 in all, but the slots take 3 + 3 where balanced ones would take 2 + 2.
    assert rank_imbalance([[3, 1], [1, 3]]) == 1.5
    assert rank_imbalance([[2, 2], [2, 2]]) == 1.0
    assert rank_imbalance([[4, 0], [0, 0]]) == 2.0
    assert rank_imbalance([[0, 0]]) == 1.0
    assert rank_imbalance(np.zeros((4, 0))) == 1.0
