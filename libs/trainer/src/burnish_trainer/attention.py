"""Registers packing's attention with transformers, under one name for packs and padded rows."""

from __future__ import annotations

from burnish_packing.torch.attention_mask import attention_forward
from transformers import AttentionInterface, PreTrainedConfig

ATTENTION = "burnish_packed"

# No mask function is registered with it, so transformers builds no mask of its own.
AttentionInterface.register(ATTENTION, attention_forward)


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse models that would not be computed exactly, before their weights are read.

    Raises:
        ValueError: if the model has layers other than full attention (state-space layers carry
            state from one packed sequence into the next), or scales or caps its logits after the
            head (log-probs are taken from hidden states and the head's weight).
    """
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        raise ValueError(
            f"every layer must be full attention, got {sorted(layers)} in a "
            f"{config.model_type!r} model; use a model family with full attention only"
        )
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"logits must be hidden states times the head's weight, got {name}="
                f"{getattr(config, name)} in a {config.model_type!r} model; it is not supported"
            )
