"""Attention over a pack, in which sequences cannot see each other.

The default computes every span by itself: the cost is the sum of squares of the lengths, not the
square of their sum, on CPU and GPU alike.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from burnish_packing.layout import Span
from burnish_packing.torch.attention_mask import (
    block_diagonal_mask,
    causal_mask,
    check_spans,
    check_window,
    flex_block_mask,
)
from burnish_packing.torch.varlen import find_varlen_kernel, varlen_attention

Backend = Literal["per_span", "block_diagonal", "flex", "varlen"]

_MISSING = object()  # not passed at all, not even None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention inside each span, and from each span to its shared prefix.

    Args:
        query: [1, Hq, T, d]; key, value: [1, Hkv, T, d], Hq a multiple of Hkv.
        spans: in order and without gaps over [0, T), as `pack_sequences` makes them.
        scale: of the scores; None: 1 / sqrt(d).
        dropout: probability of dropping an attention weight.
        sliding_window: W: a token sees itself and the W - 1 before it in its own sequence, the
            shared prefix counted in; None: all before it.
        backend: "per_span": SDPA (torch's scaled_dot_product_attention), one call per span,
            windows in blocks; "block_diagonal": one SDPA with a T x T mask; "flex":
            FlexAttention, without dropout, compiled on CUDA, forward only on the CPU; "varlen":
            FlashAttention, CUDA with float16 or bfloat16 only. None: varlen where it can run, else
            per_span.

    Returns:
        [1, Hq, T, d].

    Raises:
        ValueError: spans and tensors do not go together, or the backend is unknown or cannot do it.
    """
    check_window(sliding_window)
    num_tokens = check_spans(spans)
    if query.ndim != 4 or query.shape[::2] != (1, num_tokens) or not num_tokens:
        raise ValueError(
            f"a pack must be one row of {num_tokens} tokens, the end of its spans, got query of "
            f"shape {tuple(query.shape)}; pass the token_ids and spans of the same PackedBatch"
        )
    heads = key.shape[1] if key.ndim == 4 else 0
    right_shape = (1, heads, num_tokens)
    if not heads or query.shape[1] % heads or {key.shape[:3], value.shape[:3]} != {right_shape}:
        raise ValueError(
            f"key and value must be [1, Hkv, {num_tokens}, d] with Hkv dividing the "
            f"{query.shape[1]} heads of query, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if not 0 <= dropout <= 1 or len({query.dtype, key.dtype, value.dtype}) > 1:
        raise ValueError(
            f"dropout must be in [0, 1] and query, key and value of one dtype, got {dropout} and "
            f"{query.dtype}, {key.dtype}, {value.dtype}; convert them"
        )
    if backend is None:
        backend = _fastest_backend(query, dropout)
    if backend == "per_span":
        return _attend_per_span(query, key, value, spans, scale, dropout, sliding_window)
    if backend == "block_diagonal":
        mask = block_diagonal_mask(spans, sliding_window=sliding_window, device=query.device)
        return _sdpa(query, key, value, mask, scale, dropout)
    if backend == "flex":
        return _flex(query, key, value, spans, scale, dropout, sliding_window)
    if backend == "varlen":
        return varlen_attention(
            query,
            key,
            value,
            spans,
            kernel=find_varlen_kernel(query, dropout),
            scale=scale,
            dropout=dropout,
            sliding_window=sliding_window,
        )
    raise ValueError(
        f"backend must be None or one of {', '.join(get_args(Backend))}, got {backend!r}; "
        f"choose one of these"
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    spans: Sequence[Span] | object | None = _MISSING,
    sliding_window: int | object | None = _MISSING,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    backend: Backend | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention interface of `transformers`; `spans` reach it as a keyword of the model call.

    Register it with `hugging_face.register_attention`, build the model with that
    `attn_implementation`, and call `model(**model_kwargs(batch, model))`. `spans=None` means
    right-padded rows: causal attention, windowed where the layer is. A call without `spans` is
    refused: what packed its tokens, if anything did, could not be told.

    Returns:
        (output [B, T, Hq, d], None).

    Raises:
        ValueError: for what it does not compute (a mask, soft-capped scores, attention sinks, a
            cache, attention that is not causal, chunks, windows that the layer does not pass on,
            position biases and other tensors), or a call without spans.
    """
    if spans is _MISSING:
        raise ValueError(
            "the model call must say what is packed, got no spans; call "
            "model(**model_kwargs(batch, model)), and set another attention, such as "
            "model.set_attn_implementation('sdpa'), for generation or where another library packs"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask must be None, got a tensor; spans say who sees whom")
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "attention must be a plain softmax, got softcap or attention sinks (s_aux); choose "
            "another attn_implementation for this model and do not pack"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError("the module must be causal, got is_causal=False; use another attention")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"keys and queries must be the same tokens, got {key.shape[2]} keys for "
            f"{query.shape[2]} queries; pass use_cache=False"
        )
    window = _window_of(module, sliding_window)
    for name, value_of in unused.items():
        if isinstance(value_of, Tensor) and value_of.ndim > 2:  # not ids, lengths or counts
            raise ValueError(
                f"attention must be told by queries, keys and values alone, got the tensor {name}, "
                f"which this attention does not read; choose another attn_implementation for this "
                f"model and do not pack"
            )
    if spans is None:
        output = _attend(query, key, value, scaling, dropout, window)
    else:
        output = packed_attention(
            query,
            key,
            value,
            cast(Sequence[Span], spans),
            scale=scaling,
            dropout=dropout,
            sliding_window=window,
            backend=backend,
        )
    return output.transpose(1, 2).contiguous(), None


def _window_of(module: nn.Module, sliding_window: Any) -> int | None:
    """The layer's window; ValueError where the model would have put one into a mask only."""
    config = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds is not None and layer is not None else None
    is_chunked = kind == "chunked_attention" or (
        kind is None and bool(getattr(config, "attention_chunk_size", None))
    )
    has_window = kind == "sliding_attention" or (
        kind is None and bool(getattr(config, "sliding_window", None))
    )
    if is_chunked or (has_window and sliding_window is _MISSING):
        raise ValueError(
            f"a layer must pass its window on to the attention, got "
            f"{'chunked attention' if is_chunked else 'a sliding window in the config alone'} in "
            f"{type(module).__name__}; choose another attn_implementation for this model"
        )
    window = None if sliding_window is _MISSING else sliding_window
    check_window(window)
    return window


def _fastest_backend(query: Tensor, dropout: float) -> Backend:
    if query.device.type != "cuda":
        return "per_span"
    try:
        find_varlen_kernel(query, dropout)
    except ValueError:
        return "per_span"
    return "varlen"


def _attend_per_span(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """One call per span; spans of equal size are the rows of one call."""
    # Split, not sliced: the backward pass of a slice writes a gradient of the whole pack.
    lengths = [span.end - span.start for span in spans]
    queries, keys, values = (x.split(lengths, dim=2) for x in (query, key, value))
    index_at = {span.start: i for i, span in enumerate(spans)}
    same_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        same_size[lengths[i], span.prefix_end - span.prefix_start].append(i)

    def with_prefix(of_spans: Sequence[Tensor], i: int) -> Tensor:
        span = spans[i]
        prefix = span.prefix_end - span.prefix_start
        seen = prefix if window is None else min(prefix, window - 1)
        if not seen:
            return of_spans[i]
        before = of_spans[index_at[span.prefix_start]].narrow(2, prefix - seen, seen)
        return torch.cat([before, of_spans[i]], dim=2)

    outputs: list[Tensor] = [query] * len(spans)
    for members in same_size.values():
        rows = _attend(
            _stack([queries[i] for i in members]),
            _stack([with_prefix(keys, i) for i in members]),
            _stack([with_prefix(values, i) for i in members]),
            scale,
            dropout,
            window,
        )
        for i, output in zip(members, rows.split(1), strict=True):
            outputs[i] = output.transpose(1, 2)
    return torch.cat(outputs, dim=1).transpose(1, 2)


def _stack(rows: list[Tensor]) -> Tensor:
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Causal rows of one size; the last query [B, Hq, Q, d] sees up to the last of K >= Q keys."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if window is not None and window < num_keys:
        return _attend_in_window(query, key, value, scale, dropout, window)
    mask = None
    if num_keys > num_queries:  # SDPA's is_causal aligns top left
        mask = causal_mask(num_queries, num_keys, device=query.device)
    return _sdpa(query, key, value, mask, scale, dropout)


def _attend_in_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    dropout: float,
    window: int,
) -> Tensor:
    """`_attend` in blocks of `window` queries with twice as many keys: cost Q * 2 * window."""
    num_queries = query.shape[2]
    before = key.shape[2] - num_queries
    first = min(num_queries, window)
    mask = causal_mask(first, before + first, sliding_window=window, device=query.device)
    head = _sdpa(
        query[:, :, :first],
        key[:, :, : before + first],
        value[:, :, : before + first],
        mask if before else None,
        scale,
        dropout,
    )
    if first == num_queries:
        return head
    # Behind the first block no query sees what lies before the first query's own token.
    queries = _blocks(query, window)[:, 1:]
    keys, values = (
        torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=3)
        for blocks in (_blocks(x[:, :, before:], window) for x in (key, value))
    )
    mask = causal_mask(window, 2 * window, sliding_window=window, device=query.device)
    rest = _sdpa(
        queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), mask, scale, dropout
    )
    rest = rest.unflatten(0, queries.shape[:2]).transpose(1, 2).flatten(2, 3)
    return torch.cat([head, rest[:, :, : num_queries - first]], dim=2)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[B, H, Q, d] to [B, blocks, H, size, d], filled with zeros at the end."""
    missing = -x.shape[2] % size
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.unflatten(2, (-1, size)).transpose(1, 2)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Causal without a mask. Key and value may have fewer heads."""
    repeats = query.shape[1] // key.shape[1]
    if mask is not None and query.is_cuda and repeats > 1:
        # With a mask and enable_gqa the fused CUDA kernels are left.
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        repeats = 1
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        dropout_p=dropout,
        enable_gqa=repeats > 1,
    )


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    if dropout:
        raise ValueError(
            f"the flex backend must have no dropout, got {dropout}; choose another backend"
        )
    on_cuda = query.device.type == "cuda"
    if (
        not on_cuda
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in (query, key, value))
    ):
        raise ValueError(
            f"the flex backend must run on CUDA to have gradients, got {query.device.type}; use "
            f"torch.no_grad() or another backend"
        )
    function: Any = _compiled_flex_attention() if on_cuda else flex_attention
    return function(
        query,
        key,
        value,
        block_mask=_kept_block_mask(tuple(spans), window, query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


@functools.lru_cache(maxsize=4)
def _kept_block_mask(
    spans: tuple[Span, ...], window: int | None, device: torch.device
) -> BlockMask:
    """All layers of one kind in a model ask for the same one."""
    with torch.inference_mode(False):  # so that a later call may use it in its backward pass
        return flex_block_mask(spans, sliding_window=window, device=device)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)  # uncompiled it makes all T x T scores
