"""The masks against literals worked out by hand."""

import pytest
import torch
from burnish_packing.torch import Span, pack_sequences
from burnish_packing.torch.attention_mask import (
    block_diagonal_mask,
    causal_mask,
    check_spans,
    flex_block_mask,
)
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

# A prefix of two tokens, a sequence of one in between, two tokens behind the prefix, one of fill.
SPANS = (Span(0, 2), Span(2, 3), Span(3, 5, 0, 2), Span(5, 6))
SEEN = {
    None: ["1.....", "11....", "..1...", "11.1..", "11.11.", ".....1"],
    4: ["1.....", "11....", "..1...", "11.1..", "11.11.", ".....1"],
    3: ["1.....", "11....", "..1...", "11.1..", ".1.11.", ".....1"],
    2: ["1.....", "11....", "..1...", ".1.1..", "...11.", ".....1"],
    1: ["1.....", ".1....", "..1...", "...1..", "....1.", ".....1"],
}


def drawn(mask: Tensor) -> list[str]:
    return ["".join(".1"[seen] for seen in row) for row in mask.int().tolist()]


def drawn_mask_mod(mask: BlockMask, num_tokens: int) -> list[str]:
    return drawn(create_mask(mask.mask_mod, None, None, num_tokens, num_tokens, "cpu")[0, 0])


@pytest.mark.parametrize(("window", "seen"), SEEN.items())
def test_block_diagonal_mask(window, seen) -> None:
    mask = block_diagonal_mask(SPANS, sliding_window=window)
    assert mask.dtype == torch.bool
    assert drawn(mask) == seen


@pytest.mark.parametrize(("window", "seen"), SEEN.items())
def test_flex_mask_of_tokens(window, seen) -> None:
    mask = flex_block_mask(SPANS, sliding_window=window)
    assert mask.seq_lengths == (6, 6)
    assert drawn_mask_mod(mask, 6) == seen


@pytest.mark.parametrize(
    ("window", "blocks"),
    [
        (None, ["1....", "11...", "..1..", "11.1.", "....1"]),
        (129, ["1....", "11...", "..1..", ".1.1.", "....1"]),
        (1, ["1....", ".1...", "..1..", "...1.", "....1"]),
    ],
)
def test_flex_mask_skips_blocks_that_nobody_sees(window, blocks) -> None:
    """A prefix of two blocks of 128, a sequence, one block behind the prefix, and some fill."""
    spans = (Span(0, 256), Span(256, 384), Span(384, 512, 0, 256), Span(512, 600))
    mask = flex_block_mask(spans, sliding_window=window)
    assert mask.BLOCK_SIZE == (128, 128)
    assert drawn(mask.to_dense()[0, 0]) == blocks


def test_masks_of_a_laid_out_pack() -> None:
    batch = pack_sequences(
        torch.tensor([1, 2, 3, 1, 2, 4, 9]),
        [3, 3, 1],
        token_mask=torch.tensor([False, False, True, False, False, True, False]),
        prefix_ids=[0, 0, -1],
        prefix_lengths=[2, 2, 0],
        pad_multiple=4,
    )
    expected = ["1.......", "11......", "111.....", "11.1....", "....1..."]
    expected += [".....1..", ".....11.", ".....111"]
    assert drawn(block_diagonal_mask(batch.spans)) == expected
    assert drawn_mask_mod(flex_block_mask(batch.spans), 8) == expected


@pytest.mark.parametrize(
    ("window", "seen"),
    [
        (None, ["111..", "1111.", "11111"]),
        (5, ["111..", "1111.", "11111"]),
        (3, ["111..", ".111.", "..111"]),
        (1, ["..1..", "...1.", "....1"]),
    ],
)
def test_causal_mask_is_aligned_bottom_right(window, seen) -> None:
    assert drawn(causal_mask(3, 5, sliding_window=window)) == seen


def test_masks_refuse_a_window_and_spans_that_are_none() -> None:
    for make in (block_diagonal_mask, flex_block_mask):
        with pytest.raises(ValueError, match="sliding_window must be an integer >= 1, got 0"):
            make(SPANS, sliding_window=0)
        with pytest.raises(ValueError, match="after position 2"):
            make((Span(0, 2), Span(3, 4)))


def test_check_spans_counts_tokens() -> None:
    assert check_spans(SPANS) == 6
    assert check_spans([Span(0, 1)]) == 1
