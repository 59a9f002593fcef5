"""Registers packing's attention with transformers, under one name for packs and padded rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish_packing.torch.attention import attention_forward
from transformers import AttentionInterface, PreTrainedConfig

ATTENTION = "burnish_packed"
LOADING_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys")

# No mask function is registered with it, so transformers builds no mask of its own.
AttentionInterface.register(ATTENTION, attention_forward)


def check_loaded(info: Mapping[str, Any], source: Path) -> None:
    """Refuse a checkpoint whose weights are not those of its config.

    Args:
        info: what ``from_pretrained(..., output_loading_info=True)`` tells.
        source: the checkpoint's folder.

    Raises:
        ValueError: if a weight is missing (it would be random), left over, or of another shape.
    """
    wrong = {kind: sorted(map(str, info.get(kind) or [])) for kind in LOADING_FAULTS}
    if any(wrong.values()):
        told = "; ".join(f"{kind}: {names[:3]}" for kind, names in wrong.items() if names)
        raise ValueError(
            f"the weights in {source} must be those of its config.json, got {told}; fetch or "
            "convert the checkpoint again"
        )


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
