"""What a sequence costs: its tokens, or the floating-point operations (FLOPs) of a model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burnish_packing._checks import IntArray, check_positive

Cost = Callable[[IntArray], NDArray]

# Model types of Hugging Face whose feed-forward layers have two matrices; others have a gate too.
_UNGATED = (
    *("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"),
    *("opt", "phi", "starcoder2"),
)


def token_cost(lengths: IntArray) -> NDArray:
    """Cost of sequences of these lengths [N]: their tokens."""
    return lengths


def flops_cost(
    *,
    hidden_size: int,
    num_layers: int,
    intermediate_size: int | Sequence[int],
    num_attention_heads: int,
    vocab_size: int,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    gated_mlp: bool = True,
    sliding_window: int | None = None,
    num_sliding_layers: int | None = None,
) -> Cost:
    """FLOPs of the forward and backward pass of a decoder: a * L + b * L**2 for L tokens.

    A matrix product with a weight of P entries takes 2 * P FLOPs for each token. With D the hidden
    size, H and K query and key-value heads of d channels, F intermediate and V vocabulary size, a
    layer has D*H*d (queries) + 2*D*K*d (keys, values) + H*d*D (output) + 3*D*F entries (2*D*F
    without a gate), and the head D*V. Attention takes 2*d for the score of a query and a key and
    2*d for adding the value, so 4*H*d for each pair; a causal mask leaves half of the L**2 pairs,
    and a window of w tokens w*L - w**2/2 of them where L > w. The backward pass takes twice the
    forward pass (gradients of inputs and of weights), hence 3 in all:

        a = 3 * 2 * (layers * (2*D*H*d + 2*D*K*d + 3*D*F) + D*V),  b = 3 * layers * 4*H*d / 2

    (J. Kaplan et al., "Scaling laws for neural language models", 2020, table 1, with the causal
    half and grouped queries). Norms, activations, the softmax, a router of experts and the
    embedding's look-up are left out, about 1 %; whether the embedding is tied does not matter.

    Args:
        intermediate_size: F, or one for each layer. With a mixture of experts: the sum over the
            experts that one token passes, shared ones included.
        num_key_value_heads: K; None: as many as query heads.
        head_dim: d; None: hidden_size / num_attention_heads.
        gated_mlp: three matrices (SwiGLU and the like), else two.
        sliding_window: w, of num_sliding_layers layers (None: of all).

    Returns:
        A function of lengths int [N] to FLOPs float64 [N].

    Raises:
        ValueError: an argument is out of range or they do not go together.
    """
    heads = num_attention_heads
    key_value_heads = heads if num_key_value_heads is None else num_key_value_heads
    if head_dim is None:
        head_dim = hidden_size // heads
    sizes = (
        [intermediate_size] * num_layers
        if isinstance(intermediate_size, int)
        else [*intermediate_size]
    )
    num_sliding = 0
    if sliding_window is not None:
        check_positive(sliding_window, "sliding_window")
        num_sliding = num_layers if num_sliding_layers is None else num_sliding_layers
    for value, name in (
        (hidden_size, "hidden_size"),
        (num_layers, "num_layers"),
        (heads, "num_attention_heads"),
        (key_value_heads, "num_key_value_heads"),
        (head_dim, "head_dim"),
        (vocab_size, "vocab_size"),
    ):
        check_positive(value, name)
    for size in sizes:
        check_positive(size, "intermediate_size")
    if len(sizes) != num_layers or not 0 <= num_sliding <= num_layers:
        raise ValueError(
            f"intermediate_size must be one or one for each of {num_layers} layers, and at most so "
            f"many layers slide, got {len(sizes)} sizes and {num_sliding} sliding layers; correct "
            f"them"
        )
    attention_weights = 2 * hidden_size * (heads + key_value_heads) * head_dim
    mlp_weights = (3 if gated_mlp else 2) * hidden_size * sum(sizes)
    weights = num_layers * attention_weights + mlp_weights + hidden_size * vocab_size
    return partial(
        _flops,
        per_token=6 * weights,
        per_pair=12 * heads * head_dim,
        num_full_layers=num_layers - num_sliding,
        num_sliding_layers=num_sliding,
        sliding_window=sliding_window or 1,
    )


def flops_cost_from_config(config: Any, *, gated_mlp: bool | None = None) -> Cost:
    """`flops_cost` of a Hugging Face configuration, an object or a mapping (its config.json).

    Read are hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
    intermediate_size, vocab_size (of `text_config` if there is one); layer_types, or else
    sliding_window with use_sliding_window, max_window_layers and sliding_window_pattern; and of a
    mixture of experts num_experts_per_tok, moe_intermediate_size, n_shared_experts,
    shared_expert_intermediate_size, first_k_dense_replace, mlp_only_layers, decoder_sparse_step.

    Args:
        gated_mlp: as in `flops_cost`; None: by model_type (False for GPT-2, OPT, Falcon, ...).

    Raises:
        ValueError: a size is missing, or a layer's attention is neither full nor sliding (linear
            attention, state spaces, latent attention), so that the formula would be wrong.
    """
    get = _reader(config)
    num_layers = get("num_hidden_layers", "n_layer")
    window, num_sliding = _sliding_layers(get, num_layers)
    if get("kv_lora_rank", default=None) is not None:
        raise ValueError(
            "attention must project queries, keys and values, got kv_lora_rank (latent attention); "
            "write a cost function for this model"
        )
    if gated_mlp is None:
        gated_mlp = get("model_type", default="") not in _UNGATED
    return flops_cost(
        hidden_size=get("hidden_size", "n_embd"),
        num_layers=num_layers,
        intermediate_size=_intermediate_sizes(get, num_layers),
        num_attention_heads=get("num_attention_heads", "n_head"),
        num_key_value_heads=get("num_key_value_heads", default=None),
        head_dim=get("head_dim", default=None),
        vocab_size=get("vocab_size"),
        gated_mlp=gated_mlp,
        sliding_window=window,
        num_sliding_layers=num_sliding,
    )


def _flops(
    lengths: IntArray,
    *,
    per_token: int,
    per_pair: int,
    num_full_layers: int,
    num_sliding_layers: int,
    sliding_window: int,
) -> NDArray[np.float64]:
    """FLOPs [N]; a function of the module, so that a cost can be sent to other processes."""
    L = np.asarray(lengths, np.float64)
    seen = np.minimum(L, sliding_window)
    pairs = num_full_layers * L**2 / 2 + num_sliding_layers * (seen * L - seen**2 / 2)
    return per_token * L + per_pair * pairs


_REQUIRED = object()


def _reader(config: Any) -> Callable[..., Any]:
    """get(*names, default=...): the first of these fields that is there and not None."""

    def field(holder: Any, name: str) -> Any:
        return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)

    text = field(config, "text_config")
    holder = config if text is None else text

    def get(*names: str, default: Any = _REQUIRED) -> Any:
        for name in names:
            value = field(holder, name)
            if value is not None:
                return value
        if default is _REQUIRED:
            raise ValueError(
                f"a config must have {names[0]} for its FLOPs, got none; call flops_cost with the "
                f"sizes of the model"
            )
        return default

    return get


def _sliding_layers(get: Callable[..., Any], num_layers: int) -> tuple[int | None, int]:
    """The window of the layers that slide, and their number; (None, 0) if none does."""
    kinds = get("layer_types", default=None)
    other = set(kinds or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(
            f"layer_types must be full_attention or sliding_attention, got {sorted(other)}; write "
            f"a cost function for this model"
        )
    window = get("sliding_window", default=None)
    if window is None or not get("use_sliding_window", default=True):
        return None, 0
    pattern = get("sliding_window_pattern", default=None)
    if get("model_type", default="") == "gemma2":
        pattern = 2
    if kinds is not None:
        num_sliding = list(kinds).count("sliding_attention")
    elif pattern is not None:  # every so many layers one is full
        num_sliding = num_layers - num_layers // pattern
    else:  # the first max_window_layers are full
        num_sliding = max(num_layers - get("max_window_layers", default=0), 0)
    return (window, num_sliding) if num_sliding else (None, 0)


def _intermediate_sizes(get: Callable[..., Any], num_layers: int) -> list[int]:
    """Neurons that one token passes in the feed-forward part of every layer."""
    num_experts = get("num_experts_per_tok", default=0)
    dense = get("intermediate_size", "n_inner", default=None)
    if dense is None:
        dense = 4 * get("n_embd") if not num_experts else get("moe_intermediate_size")
    if not num_experts:
        return [dense] * num_layers
    expert = get("moe_intermediate_size", default=dense)
    shared = get("shared_expert_intermediate_size", default=0)
    routed = (num_experts + get("n_shared_experts", default=0)) * expert + shared
    dense_layers = set(get("mlp_only_layers", default=()))
    dense_layers.update(range(get("first_k_dense_replace", default=0)))
    step = get("decoder_sparse_step", default=1)
    return [
        dense if layer in dense_layers or (layer + 1) % step else routed
        for layer in range(num_layers)
    ]
