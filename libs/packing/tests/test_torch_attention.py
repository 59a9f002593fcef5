"""Attention over a pack against one softmax written out with the keys each token sees."""

import functools

import pytest
import torch
from burnish_packing.torch import Span, attention_forward, packed_attention
from burnish_packing.torch.attention import _kept_block_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

# A prefix with two sequences behind it, one of them far away and of one token; an own sequence
# between them; a fill of two tokens.
SPANS = (Span(0, 3), Span(3, 7, 0, 3), Span(7, 9), Span(9, 10, 0, 3), Span(10, 12))
ON_CPU = ["per_span", "block_diagonal", "flex"]
WITH_GRADIENTS = ["per_span", "block_diagonal"]
pytestmark = pytest.mark.filterwarnings(  # on the CPU it is only for tests
    "ignore:flex_attention called without torch.compile:UserWarning"
)


def random_heads(
    query_heads: int = 4,
    key_heads: int = 2,
    rows: int = 1,
    num_tokens: int = 12,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = True,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(rows, heads, num_tokens, 8, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for heads in (query_heads, key_heads, key_heads)
    ]


def keys_seen(spans, window: int | None) -> list[list[int]]:
    """For each token the keys it sees: of its whole sequence up to itself, the last `window`."""
    seen = []
    for span in spans:
        for t in range(span.start, span.end):
            sequence = [*range(span.prefix_start, span.prefix_end), *range(span.start, t + 1)]
            seen.append(sequence if window is None else sequence[-window:])
    return seen


def written_out(
    query: Tensor, key: Tensor, value: Tensor, spans, scale=None, window=None
) -> Tensor:
    num_tokens = query.shape[2]
    visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for t, keys in enumerate(keys_seen(spans, window)):
        visible[t, keys] = True
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value


def assert_same_gradients(actual: Tensor, expected: Tensor, heads: list[Tensor]) -> None:
    weights = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).view(actual.shape)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), heads),
        torch.autograd.grad((expected * weights).sum(), heads),
    )


@pytest.mark.parametrize("backend", [None, *ON_CPU])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 6, 7, 100])
def test_equal_to_one_masked_softmax(backend, key_heads, scale, window) -> None:
    heads = random_heads(key_heads=key_heads, requires_grad=backend != "flex")
    actual = packed_attention(*heads, SPANS, scale=scale, sliding_window=window, backend=backend)
    expected = written_out(*heads, SPANS, scale, window)
    torch.testing.assert_close(actual, expected)
    if backend != "flex":
        assert_same_gradients(actual, expected, heads)


@st.composite
def random_spans(draw) -> tuple[Span, ...]:
    spans: list[Span] = []
    for own in draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)):
        start = spans[-1].end if spans else 0
        prefixes = [span for span in spans if span.prefix_end == 0]
        prefix = draw(st.sampled_from([None, *prefixes]))
        between = (prefix.start, prefix.end) if prefix else (0, 0)
        spans.append(Span(start, start + own, *between))
    return tuple(spans)


@settings(max_examples=60)
@given(random_spans(), st.none() | st.integers(1, 12), st.sampled_from(WITH_GRADIENTS))
def test_any_spans_equal_one_masked_softmax(spans, window, backend) -> None:
    heads = random_heads(num_tokens=spans[-1].end)
    actual = packed_attention(*heads, spans, sliding_window=window, backend=backend)
    expected = written_out(*heads, spans, window=window)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(actual, expected, heads)


def test_worked_out_by_hand() -> None:
    """Equal scores: a token's output is the mean of the values it sees."""
    query = key = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    value = (
        torch.tensor([1.0, 2, 4, 8, 16, 32], dtype=torch.float64).view(1, 1, 6, 1).expand_as(key)
    )
    spans = (Span(0, 2), Span(2, 3), Span(3, 5, 0, 2), Span(5, 6))
    expected = {
        None: [1, 3 / 2, 4, 11 / 3, 27 / 4, 32],
        3: [1, 3 / 2, 4, 11 / 3, 26 / 3, 32],
        2: [1, 3 / 2, 4, 10 / 2, 24 / 2, 32],
        1: [1, 2, 4, 8, 16, 32],
    }
    for window, means in expected.items():
        for backend in ON_CPU:
            output = packed_attention(
                query, key, value, spans, sliding_window=window, backend=backend
            )
            torch.testing.assert_close(output[0, 0, :, 0], torch.tensor(means, dtype=torch.float64))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", ON_CPU)
def test_a_changed_token_moves_only_those_who_see_it_exactly(backend, window) -> None:
    query, key, value = random_heads(dtype=torch.float32, requires_grad=False)
    attend = functools.partial(
        packed_attention, spans=SPANS, sliding_window=window, backend=backend
    )
    before = attend(query, key, value)
    for changed in range(12):
        other_key, other_value = key.clone(), value.clone()
        other_key[:, :, changed] += 3
        other_value[:, :, changed] += 3
        moved = (attend(query, other_key, other_value) != before).any(dim=3).any(dim=1)[0]
        assert moved.tolist() == [changed in keys for keys in keys_seen(SPANS, window)]


@pytest.mark.parametrize("window", [None, 1, 4, 11, 12, 30])
def test_rows_without_spans_are_causal(window) -> None:
    heads = random_heads(rows=2)
    output, weights = attention_forward(
        nn.Module(), *heads, None, scaling=0.3, spans=None, sliding_window=window
    )
    assert weights is None
    assert output.shape == (2, 12, 4, 8)
    assert output.is_contiguous()
    expected = written_out(*heads, (Span(0, 12),), 0.3, window)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    assert_same_gradients(output.transpose(1, 2), expected, heads)


@pytest.mark.parametrize("backend", ON_CPU)
def test_the_interface_passes_all_on(backend) -> None:
    heads = random_heads(requires_grad=False)
    output, _ = attention_forward(
        nn.Module(), *heads, None, scaling=0.3, spans=SPANS, sliding_window=4, backend=backend
    )
    torch.testing.assert_close(output.transpose(1, 2), written_out(*heads, SPANS, 0.3, 4))


def test_spans_of_equal_size_are_one_call(monkeypatch) -> None:
    rows = []

    def counting(query: Tensor, *arguments, **keywords) -> Tensor:
        rows.append(query.shape[0])
        return torch.nn.functional.scaled_dot_product_attention(query, *arguments, **keywords)

    monkeypatch.setattr("burnish_packing.torch.attention.scaled_dot_product_attention", counting)
    spans = (Span(0, 4), Span(4, 6, 0, 4), Span(6, 8), Span(8, 10, 0, 4), Span(10, 12))
    heads = random_heads()
    torch.testing.assert_close(packed_attention(*heads, spans), written_out(*heads, spans))
    assert rows == [1, 2, 2]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("backend", WITH_GRADIENTS)
def test_dropout_reaches_every_span(backend, window) -> None:
    query, key, value = random_heads(requires_grad=False)
    keywords = {"spans": SPANS, "sliding_window": window, "backend": backend}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert packed_attention(query, key, value, dropout=1.0, **keywords).count_nonzero() == 0
        once, again, other = (
            [torch.manual_seed(seed), packed_attention(query, key, value, dropout=0.3, **keywords)]
            for seed in (1, 1, 2)
        )
        ones = torch.ones_like(value)
        mean = torch.stack(
            [packed_attention(query, key, ones, dropout=0.3, **keywords) for _ in range(2000)]
        ).mean(dim=0)
    assert torch.equal(once[1], again[1])
    assert not torch.equal(once[1], other[1])
    # What stays is scaled by 1 / 0.7: the expected sum of weights is 1, of variance <= 0.3 / 0.7.
    torch.testing.assert_close(mean, torch.ones_like(mean), rtol=0, atol=6 * (0.43 / 2000) ** 0.5)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((Span(0, 3), Span(4, 12)), r"got Span\(start=4, .* after position 3"),
        ((Span(0, 3), Span(2, 12)), "after position 3"),
        ((Span(0, 3), Span(3, 12, 2, 4)), "prefixes lie before them"),
        ((Span(0, 3), Span(3, 12, 0, 2)), "each a whole span"),
        ((Span(0, 3), Span(3, 5, 0, 3), Span(5, 12, 3, 5)), "without a prefix of its own"),
        ((Span(0, 3), Span(3, 12, 2, 0)), "prefixes lie before them"),
        ((Span(0, 11),), r"one row of 11 tokens, .* got query of shape \(1, 4, 12, 8\)"),
        ((), "one row of 0 tokens"),
    ],
)
def test_spans_must_tile_the_pack(spans, message) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(*random_heads(), spans)


def test_spans_belong_to_one_row() -> None:
    with pytest.raises(ValueError, match="one row of 12 tokens"):
        packed_attention(*random_heads(rows=2), SPANS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "flash"}, "one of per_span, block_diagonal, flex, varlen, got 'flash'"),
        ({"backend": "varlen"}, "must run on CUDA, got a torch.float64 query .* on cpu"),
        ({"backend": "flex"}, "must run on CUDA to have gradients, got cpu"),
        ({"backend": "flex", "dropout": 0.1}, "must have no dropout, got 0.1"),
        ({"sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
        ({"sliding_window": -1}, "sliding_window must be an integer >= 1, got -1"),
    ],
)
def test_an_impossible_backend_or_window_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(*random_heads(), SPANS, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 12, 12)}, "attention_mask must be None"),
        ({"softcap": 30.0}, "plain softmax"),
        ({"s_aux": torch.zeros(4)}, "plain softmax"),
        ({"sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
        ({"sliding_window": 0, "spans": None}, "sliding_window must be an integer >= 1, got 0"),
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
    shorter, _ = attention_forward(nn.Module(), *heads, None, spans=SPANS, sliding_window=6)
    assert torch.equal(plain, windowed)
    assert not torch.allclose(plain, shorter)


def test_a_cache_and_two_way_attention_are_refused() -> None:
    query, key, value = random_heads()
    with pytest.raises(ValueError, match="got 12 keys for 11 queries; pass use_cache=False"):
        attention_forward(nn.Module(), query[:, :, :11], key, value, None, spans=SPANS)
    encoder = nn.Module()
    encoder.is_causal = False
    with pytest.raises(ValueError, match="got is_causal=False"):
        attention_forward(encoder, query, key, value, None, spans=SPANS)


def test_a_window_costs_two_windows_of_keys_per_query(monkeypatch) -> None:
    scores = []

    def counting(query: Tensor, key: Tensor, *arguments, **keywords) -> Tensor:
        scores.append(query.shape[0] * query.shape[2] * key.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(query, key, *arguments, **keywords)

    monkeypatch.setattr("burnish_packing.torch.attention.scaled_dot_product_attention", counting)
    spans = (Span(0, 50), Span(50, 100, 0, 50))
    heads = random_heads(num_tokens=100)
    actual = packed_attention(*heads, spans, sliding_window=8)
    torch.testing.assert_close(actual, written_out(*heads, spans, window=8))
    # 50 tokens are a first block of 8 and 6 blocks, the last one filled; of the prefix 7 are seen.
    assert scores == [8 * 8, 6 * 8 * 16, 8 * (7 + 8), 6 * 8 * 16]


def test_a_mask_made_in_inference_mode_serves_a_later_call() -> None:
    heads = random_heads(requires_grad=False)
    spans = (Span(0, 7), Span(7, 12))  # of no other test: what is kept is made here
    with torch.inference_mode():
        inside = packed_attention(*heads, spans, backend="flex")
    torch.testing.assert_close(packed_attention(*heads, spans, backend="flex"), inside.clone())
    kept = _kept_block_mask(spans, None, torch.device("cpu"))
    assert not kept.kv_indices.is_inference()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("backend", [None, "per_span", "block_diagonal", "flex"])
@pytest.mark.parametrize("copies", [1, 40])
def test_on_cuda_equal_to_one_masked_softmax(backend, window, copies) -> None:
    spans = repeated(SPANS, copies)
    heads = [
        x.detach().repeat(1, 1, 1, 4).requires_grad_()  # compiled FlexAttention wants d >= 16
        for x in random_heads(num_tokens=12 * copies)
    ]
    expected = written_out(*heads, spans, window=window)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), heads)
    on_cuda = [x.detach().float().cuda().requires_grad_() for x in heads]
    actual = packed_attention(*on_cuda, spans, sliding_window=window, backend=backend)
    gradients = torch.autograd.grad((actual * weights.float().cuda()).sum(), on_cuda)
    for one, other in zip((actual, *gradients), (expected, *expected_gradients), strict=True):
        # Triton's float32 products may round as TF32 does, 10 bits.
        assert (one.double().cpu() - other).abs().max() <= 5e-3 * other.abs().max()


def repeated(spans, copies: int) -> tuple[Span, ...]:
    """The spans one after another, `copies` times."""
    size = spans[-1].end
    return tuple(
        Span(s.start + by, s.end + by, s.prefix_start + by, s.prefix_end + by)
        for by in range(0, size * copies, size)
        for s in spans
    )
