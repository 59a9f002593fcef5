"""A pack as the arguments of FlashAttention's varlen kernels, and the call of one."""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish_packing.layout import Span
from burnish_packing.torch.attention_mask import check_spans, check_window

LARGEST_HEAD = 256  # features per head that FlashAttention 2 takes


@dataclass(frozen=True)
class VarlenArguments:
    """Which queries meet which keys, causally and aligned bottom right (flash-attn >= 2.1).

    Queries [cu_seqlens_q[i], cu_seqlens_q[i + 1]) meet keys [cu_seqlens_k[i], cu_seqlens_k[i + 1]),
    which are longer by the shared prefix: the last query sees up to the last key.
    """

    cu_seqlens_q: Tensor  # int32 [number of spans + 1]
    cu_seqlens_k: Tensor  # int32 [number of spans + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    key_positions: Tensor | None  # int64 [K], key j lies at this position of the pack; None: at j


class VarlenKernel(Protocol):
    """Attention of queries [T, Hq, d] to keys and values [K, Hkv, d]: [T, Hq, d].

    `window_size` (left, right): keys seen before and after the own one, -1 for all.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: VarlenArguments,
        *,
        scale: float | None,
        dropout: float,
        window_size: tuple[int, int],
    ) -> Tensor: ...


def varlen_arguments(
    spans: Sequence[Span], *, device: torch.device | str | None = None
) -> VarlenArguments:
    """The pack's spans as cumulative lengths; keys of a shared prefix come once per span behind it.

    Args:
        spans: in order and without gaps over [0, T), as `pack_sequences` makes them.
        device: of the tensors.

    Raises:
        ValueError: the spans do not tile a row.
    """
    check_spans(spans)
    own = torch.tensor([span.end - span.start for span in spans])
    shared = torch.tensor([span.prefix_end - span.prefix_start for span in spans])
    positions = None
    if shared.any():
        ranges = [
            torch.arange(start, end)
            for span in spans
            for start, end in ((span.prefix_start, span.prefix_end), (span.start, span.end))
        ]
        positions = torch.cat(ranges).to(device)
    return VarlenArguments(
        _cumulative(own).to(device),
        _cumulative(own + shared).to(device),
        int(own.max()),
        int((own + shared).max()),
        positions,
    )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[Span],
    *,
    kernel: VarlenKernel,
    scale: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> Tensor:
    """`packed_attention` by a varlen kernel: query [1, Hq, T, d], key, value [1, Hkv, T, d]."""
    check_window(sliding_window)
    arguments = _kept_arguments(tuple(spans), query.device)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if arguments.key_positions is not None:
        key, value = (x.index_select(0, arguments.key_positions) for x in (key, value))
    left = -1 if sliding_window is None else sliding_window - 1
    output = kernel(
        query, key, value, arguments, scale=scale, dropout=dropout, window_size=(left, 0)
    )
    return output.transpose(0, 1).unsqueeze(0)


def find_varlen_kernel(query: Tensor, dropout: float = 0.0) -> VarlenKernel:
    """flash-attn's kernel where it is installed, else torch's own.

    Raises:
        ValueError: this machine or these tensors have none; the message says what is missing.
    """
    heads = f"a {query.dtype} query with {query.shape[-1]} features per head on {query.device.type}"
    if query.device.type != "cuda":
        raise ValueError(
            f"varlen attention must run on CUDA, got {heads}; choose another backend or device"
        )
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] > LARGEST_HEAD:
        raise ValueError(
            f"varlen attention must have float16 or bfloat16 heads of at most {LARGEST_HEAD} "
            f"features, got {heads}; choose another backend or dtype"
        )
    if _flash_attn_function() is not None:
        return _flash_attn_kernel
    if _torch_function() is None:
        raise ValueError(
            "varlen attention must have a kernel with windows and bottom-right causality, got "
            "neither flash-attn >= 2.3 nor a torch with torch.nn.attention.varlen; install one "
            "or choose another backend"
        )
    if dropout:
        raise ValueError(
            f"torch's varlen attention must have no dropout, got {dropout}; install flash-attn or "
            f"choose another backend"
        )
    return _torch_kernel


@functools.lru_cache(maxsize=4)
def _kept_arguments(spans: tuple[Span, ...], device: torch.device) -> VarlenArguments:
    """All layers of a model ask for the same ones."""
    with torch.inference_mode(False):  # so that a later call may use them in its backward pass
        return varlen_arguments(spans, device=device)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _flash_attn_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: VarlenArguments,
    *,
    scale: float | None,
    dropout: float,
    window_size: tuple[int, int],
) -> Tensor:
    function = _flash_attn_function()
    assert function is not None
    return function(
        query,
        key,
        value,
        arguments.cu_seqlens_q,
        arguments.cu_seqlens_k,
        arguments.max_seqlen_q,
        arguments.max_seqlen_k,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=True,
        window_size=window_size,
    )


def _torch_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: VarlenArguments,
    *,
    scale: float | None,
    dropout: float,
    window_size: tuple[int, int],
) -> Tensor:
    function = _torch_function()
    assert function is not None
    assert not dropout
    return function(
        query,
        key,
        value,
        arguments.cu_seqlens_q,
        arguments.cu_seqlens_k,
        arguments.max_seqlen_q,
        arguments.max_seqlen_k,
        scale=scale,
        window_size=window_size,
        enable_gqa=query.shape[1] != key.shape[1],
    )


# Both kernels took windows later than bottom-right causality (flash-attn 2.3 and 2.1), so that a
# signature with `window_size` tells that the masks are those meant here.
@functools.cache
def _flash_attn_function() -> Any | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func if _takes(flash_attn_varlen_func, "window_size") else None


@functools.cache
def _torch_function() -> Any | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if _takes(varlen_attn, "window_size", "scale", "enable_gqa") else None


def _takes(function: Any, *names: str) -> bool:
    return set(names) <= inspect.signature(function).parameters.keys()
