"""FlashAttention's varlen arguments: by hand, and through a kernel written out with them."""

import functools
import inspect
import types

import pytest
import torch
from burnish_packing.torch import Span, packed_attention, varlen
from burnish_packing.torch.varlen import (
    VarlenArguments,
    find_varlen_kernel,
    varlen_arguments,
    varlen_attention,
)
from torch import Tensor

SPANS = (Span(0, 2), Span(2, 3), Span(3, 5, 0, 2), Span(5, 8), Span(8, 9, 0, 2))


def random_heads(num_tokens: int = 9, key_heads: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, num_tokens, size, generator=generator, dtype=torch.float64)
        for heads in (4, key_heads, key_heads)
    ]


def reference_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: VarlenArguments,
    *,
    scale: float | None,
    dropout: float,
    window_size: tuple[int, int],
    bottom_right: bool = True,
) -> Tensor:
    """What flash-attn >= 2.1 computes with causal=True; before, `bottom_right` was False."""
    left, right = window_size
    assert right == 0
    assert not dropout
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    outputs = []
    bounds = zip(
        arguments.cu_seqlens_q.tolist()[:-1],
        arguments.cu_seqlens_q.tolist()[1:],
        arguments.cu_seqlens_k.tolist()[:-1],
        arguments.cu_seqlens_k.tolist()[1:],
        strict=True,
    )
    for first_query, end_query, first_key, end_key in bounds:
        num_queries, num_keys = end_query - first_query, end_key - first_key
        assert num_queries <= arguments.max_seqlen_q
        assert num_keys <= arguments.max_seqlen_k
        queries = query[first_query:end_query].transpose(0, 1)
        keys, values = (x[first_key:end_key].transpose(0, 1) for x in (key, value))
        distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
        if bottom_right:
            distance = distance + num_keys - num_queries
        hidden = distance < 0
        if left >= 0:
            hidden = hidden | (distance > left)
        scores = queries @ keys.mT * (query.shape[2] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs)


def test_arguments_of_a_plain_pack() -> None:
    arguments = varlen_arguments((Span(0, 3), Span(3, 4), Span(4, 9)))
    assert arguments.cu_seqlens_q.dtype == arguments.cu_seqlens_k.dtype == torch.int32
    assert arguments.cu_seqlens_q.tolist() == arguments.cu_seqlens_k.tolist() == [0, 3, 4, 9]
    assert (arguments.max_seqlen_q, arguments.max_seqlen_k) == (5, 5)
    assert arguments.key_positions is None


def test_arguments_with_a_shared_prefix() -> None:
    arguments = varlen_arguments(SPANS)
    assert arguments.cu_seqlens_q.tolist() == [0, 2, 3, 5, 8, 9]
    assert arguments.cu_seqlens_k.tolist() == [0, 2, 3, 7, 10, 13]
    assert arguments.cu_seqlens_k.dtype == torch.int32
    assert (arguments.max_seqlen_q, arguments.max_seqlen_k) == (3, 4)
    assert arguments.key_positions is not None
    assert arguments.key_positions.dtype == torch.int64
    assert arguments.key_positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 0, 1, 8]


def test_spans_with_a_gap_are_refused() -> None:
    with pytest.raises(ValueError, match="after position 2"):
        varlen_arguments((Span(0, 2), Span(3, 4)))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 50])
@pytest.mark.parametrize("spans", [SPANS, (Span(0, 4), Span(4, 5), Span(5, 9))])
def test_a_varlen_kernel_computes_the_pack(spans, key_heads, scale, window) -> None:
    """Also the gradients: those of a prefix's keys come from all who see it."""
    heads = [x.requires_grad_() for x in random_heads(key_heads=key_heads)]
    keywords = {"scale": scale, "sliding_window": window}
    actual = varlen_attention(*heads, spans, kernel=reference_kernel, **keywords)
    expected = packed_attention(*heads, spans, backend="block_diagonal", **keywords)
    torch.testing.assert_close(actual, expected)
    weights = torch.linspace(-1, 1, actual.numel(), dtype=torch.float64).view(actual.shape)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), heads),
        torch.autograd.grad((expected * weights).sum(), heads),
    )


def test_negative_control_a_kernel_that_aligns_top_left() -> None:
    heads = random_heads()
    kernel = functools.partial(reference_kernel, bottom_right=False)
    actual = varlen_attention(*heads, SPANS, kernel=kernel)
    expected = packed_attention(*heads, SPANS, backend="block_diagonal")
    wrong = (actual - expected).abs().amax(dim=(0, 1, 3)) > 0.1
    behind_the_prefix = [False, False, False, True, True, False, False, False, True]
    assert wrong.tolist() == behind_the_prefix


def test_a_changed_token_moves_only_its_own_sequence_exactly() -> None:
    query, key, value = random_heads()
    before = varlen_attention(query, key, value, SPANS, kernel=reference_kernel)
    value = value.clone()
    value[:, :, 4] += 1
    after = varlen_attention(query, key, value, SPANS, kernel=reference_kernel)
    moved = (before != after).any(dim=3).any(dim=1)[0]
    assert moved.tolist() == [False] * 4 + [True] + [False] * 4


def test_arguments_made_in_inference_mode_serve_a_later_backward() -> None:
    spans = (Span(0, 4), Span(4, 9, 0, 4))  # of no other test: what is kept is made here
    heads = random_heads()
    with torch.inference_mode():
        varlen_attention(*heads, spans, kernel=reference_kernel)
    heads = [x.requires_grad_() for x in heads]
    varlen_attention(*heads, spans, kernel=reference_kernel).sum().backward()
    assert heads[1].grad is not None


class FakeCuda(types.SimpleNamespace):
    """What `find_varlen_kernel` reads of a query on CUDA."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> None:
        super().__init__(device=torch.device("cuda"), dtype=dtype, shape=(1, 4, 9, size))


@pytest.fixture
def functions(monkeypatch):
    """Says which kernels are installed: flash-attn's and torch's."""

    def installed(flash_attn, of_torch) -> None:
        monkeypatch.setattr(varlen, "_flash_attn_function", lambda: flash_attn)
        monkeypatch.setattr(varlen, "_torch_function", lambda: of_torch)

    return installed


def test_flash_attn_comes_before_torch(functions) -> None:
    functions(print, print)
    assert find_varlen_kernel(FakeCuda()) is varlen._flash_attn_kernel
    assert find_varlen_kernel(FakeCuda(), dropout=0.1) is varlen._flash_attn_kernel
    functions(None, print)
    assert find_varlen_kernel(FakeCuda(torch.float16)) is varlen._torch_kernel


@pytest.mark.parametrize(
    ("query", "dropout", "installed", "message"),
    [
        (torch.zeros(1, 4, 9, 64), 0.0, True, "must run on CUDA, got a torch.float32 query"),
        (FakeCuda(torch.float32), 0.0, True, "float16 or bfloat16 heads of at most 256"),
        (FakeCuda(size=264), 0.0, True, "got a torch.bfloat16 query with 264 features"),
        (FakeCuda(), 0.1, True, "must have no dropout, got 0.1"),
        (FakeCuda(), 0.0, False, "must have a kernel"),
    ],
)
def test_what_no_kernel_computes_is_refused(functions, query, dropout, installed, message) -> None:
    functions(None, print if installed else None)
    with pytest.raises(ValueError, match=message):
        find_varlen_kernel(query, dropout)


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attn_is_called_with_its_own_names(functions, window) -> None:
    def flash_attn_varlen_func(  # the beginning of flash-attn 2.3's signature
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ) -> Tensor:
        assert causal
        arguments = VarlenArguments(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None)
        return reference_kernel(
            q,
            k,
            v,
            arguments,
            scale=softmax_scale,
            dropout=dropout_p,
            window_size=window_size,
        )

    functions(flash_attn_varlen_func, None)
    check_adapter(varlen._flash_attn_kernel, window)


@pytest.mark.parametrize("window", [None, 3])
def test_torch_is_called_with_its_own_names(functions, window) -> None:
    module = pytest.importorskip("torch.nn.attention.varlen")
    signature = inspect.signature(module.varlen_attn)

    def varlen_attn(*positional, **keywords) -> Tensor:
        bound = signature.bind(*positional, **keywords)
        bound.apply_defaults()
        of = bound.arguments
        assert of["enable_gqa"]
        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
        return reference_kernel(
            of["query"],
            of["key"],
            of["value"],
            VarlenArguments(*(of[name] for name in names), None),
            scale=of["scale"],
            dropout=0.0,
            window_size=of["window_size"],
        )

    functions(None, varlen_attn)
    check_adapter(varlen._torch_kernel, window)


def check_adapter(kernel, window: int | None) -> None:
    heads = random_heads()
    actual = varlen_attention(*heads, SPANS, kernel=kernel, scale=0.3, sliding_window=window)
    expected = packed_attention(
        *heads, SPANS, scale=0.3, sliding_window=window, backend="block_diagonal"
    )
    torch.testing.assert_close(actual, expected)


def test_this_torch_has_a_kernel_with_windows() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    if torch.__version__ >= "2.13":
        assert varlen._torch_function() is not None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_kernel_on_cuda(window, key_heads) -> None:
    heads = [x.requires_grad_() for x in random_heads(key_heads=key_heads, size=64)]
    expected = packed_attention(*heads, SPANS, sliding_window=window, backend="block_diagonal")
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), heads)
    on_cuda = [x.detach().bfloat16().cuda().requires_grad_() for x in heads]
    actual = packed_attention(*on_cuda, SPANS, sliding_window=window, backend="varlen")
    gradients = torch.autograd.grad((actual * weights.bfloat16().cuda()).sum(), on_cuda)
    for one, other in zip((actual, *gradients), (expected, *expected_gradients), strict=True):
        assert (one.double().cpu() - other).abs().max() <= 0.03 * other.abs().max()
