"""Attention over a pack against one softmax written out with a mask of who sees whom."""

import pytest
import torch
from burnish_packing.torch import Span, attention_forward, packed_attention
from torch import Tensor, nn

SPANS = (Span(0, 3), Span(3, 7, 0, 3), Span(7, 9), Span(9, 10, 0, 3))


def random_heads(query_heads: int = 4, key_heads: int = 2, rows: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(
            rows, heads, 10, 8, generator=generator, dtype=torch.float64, requires_grad=True
        )
        for heads in (query_heads, key_heads, key_heads)
    ]


def written_out(query: Tensor, key: Tensor, value: Tensor, spans, scale: float) -> Tensor:
    visible = torch.zeros(10, 10, dtype=torch.bool)
    for span in spans:
        for t in range(span.start, span.end):
            visible[t, span.prefix_start : span.prefix_end] = True
            visible[t, span.start : t + 1] = True
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_equal_to_one_masked_softmax(key_heads, scale) -> None:
    heads = random_heads(key_heads=key_heads)
    actual = packed_attention(*heads, SPANS, scale=scale)
    expected = written_out(*heads, SPANS, 8**-0.5 if scale is None else scale)
    torch.testing.assert_close(actual, expected)
    weights = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view_as(actual)
    actual_gradients = torch.autograd.grad((actual * weights).sum(), heads)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), heads)
    torch.testing.assert_close(actual_gradients, expected_gradients)


def test_rows_without_spans_are_causal() -> None:
    heads = random_heads(rows=2)
    output, weights = attention_forward(nn.Module(), *heads, None, scaling=0.3)
    assert weights is None
    assert output.shape == (2, 10, 4, 8)
    torch.testing.assert_close(output.transpose(1, 2), written_out(*heads, (Span(0, 10),), 0.3))


def test_dropout_reaches_every_span() -> None:
    heads = random_heads()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = packed_attention(*heads, SPANS, dropout=1.0)
    assert torch.count_nonzero(dropped) == 0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((Span(0, 3), Span(4, 10)), r"got Span\(start=4, .* after position 3"),
        ((Span(0, 3), Span(2, 10)), "after position 3"),
        ((Span(0, 3), Span(3, 10, 2, 4)), "prefixes lie before them"),
        ((Span(0, 9),), r"one row of 9 tokens, .* got query of shape \(1, 4, 10, 8\)"),
        ((), "one row of 0 tokens"),
    ],
)
def test_spans_must_tile_the_pack(spans, message) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(*random_heads(), spans)


def test_spans_belong_to_one_row() -> None:
    with pytest.raises(ValueError, match="one row of 10 tokens"):
        packed_attention(*random_heads(rows=2), SPANS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 10, 10)}, "attention_mask must be None"),
        ({"softcap": 30.0}, "plain softmax"),
        ({"s_aux": torch.zeros(4)}, "plain softmax"),
        ({"sliding_window": 6}, "sliding window of 6 tokens, got one of 7"),
        ({"sliding_window": 9, "spans": None}, "sliding window of 9 tokens, got one of 10"),
    ],
)
def test_what_it_does_not_compute_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        attention_forward(
            nn.Module(), *random_heads(), **{"attention_mask": None, "spans": SPANS, **arguments}
        )


def test_a_window_as_long_as_the_longest_sequence_is_no_window() -> None:
    heads = random_heads()
    plain, _ = attention_forward(nn.Module(), *heads, None, spans=SPANS)
    windowed, _ = attention_forward(nn.Module(), *heads, None, spans=SPANS, sliding_window=7)
    assert torch.equal(plain, windowed)


def test_a_cache_and_two_way_attention_are_refused() -> None:
    query, key, value = random_heads()
    with pytest.raises(ValueError, match="got 10 keys for 9 queries; pass use_cache=False"):
        attention_forward(nn.Module(), query[:, :, :9], key, value, None, spans=SPANS)
    encoder = nn.Module()
    encoder.is_causal = False
    with pytest.raises(ValueError, match="got is_causal=False"):
        attention_forward(encoder, query, key, value, None, spans=SPANS)
