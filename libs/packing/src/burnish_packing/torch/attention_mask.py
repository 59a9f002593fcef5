"""Attention over a pack: every span is one call, so that sequences cannot see each other.

The cost is the sum of squares of the lengths, not the square of their sum, on CPU and GPU alike.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from burnish_packing.layout import Span


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention inside each span, and from each span to its shared prefix.

    Args:
        query: [1, Hq, T, d]; key, value: [1, Hkv, T, d], Hq a multiple of Hkv.
        spans: in order and without gaps over [0, T), as `pack_sequences` makes them.
        scale: of the scores; None: 1 / sqrt(d).
        dropout: probability of dropping an attention weight.

    Returns:
        [1, Hq, T, d].
    """
    _check_tiling(query, spans)
    outputs = []
    for span in spans:
        own = slice(span.start, span.end)
        if span.prefix_end == span.prefix_start:
            output = scaled_dot_product_attention(
                query[:, :, own],
                key[:, :, own],
                value[:, :, own],
                is_causal=True,
                scale=scale,
                dropout_p=dropout,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            prefix = slice(span.prefix_start, span.prefix_end)
            output = _attend_after_prefix(query, key, value, prefix, own, scale, dropout)
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    spans: Sequence[Span] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The attention interface of `transformers`; `spans` reach it as a keyword of the model call.

    Register it with `AttentionInterface.register(name, attention_forward)`, build the model with
    `attn_implementation=name`, and call `model(ids, position_ids=..., spans=..., use_cache=False)`.
    `spans=None` means right-padded rows: plain causal attention.

    Returns:
        (output [B, T, Hq, d], None).

    Raises:
        ValueError: for what it does not compute (a mask, a sliding window shorter than a sequence,
            soft-capped scores, attention sinks, a cache, attention that is not causal).
    """
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
    longest = query.shape[2] if spans is None else max(_visible_tokens(span) for span in spans)
    if sliding_window is not None and sliding_window < longest:
        raise ValueError(
            f"sequences must fit the sliding window of {sliding_window} tokens, got one of "
            f"{longest}; shorten it or use another attention"
        )
    if spans is None:
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        output = packed_attention(query, key, value, spans, scale=scaling, dropout=dropout)
    return output.transpose(1, 2).contiguous(), None


def _attend_after_prefix(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: slice,
    own: slice,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Queries of `own` see all of `prefix`, then `own` causally: [1, Hq, own, d]."""
    # SDPA's is_causal aligns the mask top left, and with a mask its enable_gqa leaves the fused
    # CUDA kernels; so the mask is written out (bottom right) and the heads are repeated.
    repeats = query.shape[1] // key.shape[1]
    keys, values = (
        torch.cat([x[:, :, prefix], x[:, :, own]], dim=2).repeat_interleave(repeats, dim=1)
        for x in (key, value)
    )
    num_queries, num_keys = own.stop - own.start, keys.shape[2]
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    visible = visible.tril(diagonal=num_keys - num_queries)
    return scaled_dot_product_attention(
        query[:, :, own], keys, values, attn_mask=visible, scale=scale, dropout_p=dropout
    )


def _visible_tokens(span: Span) -> int:
    return span.end - span.start + span.prefix_end - span.prefix_start


def _check_tiling(query: Tensor, spans: Sequence[Span]) -> None:
    """ValueError unless there is one row and every position of it lies in exactly one span."""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start or span.prefix_end > span.start:
            raise ValueError(
                f"spans must follow one another from 0 and prefixes lie before them, got {span} "
                f"after position {end}; take them from pack_sequences"
            )
        end = span.end
    if query.shape[0] != 1 or query.shape[2] != end:
        raise ValueError(
            f"a pack must be one row of {end} tokens, the end of its spans, got query of shape "
            f"{tuple(query.shape)}; pass the token_ids and spans of the same PackedBatch"
        )
