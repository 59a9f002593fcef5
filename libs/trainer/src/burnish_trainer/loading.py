"""A checkpoint folder as a model that is computed exactly, with its head and adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from burnish_packing.torch.attention import attention_forward
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

from burnish_trainer.freezing import freeze
from burnish_trainer.heads import (
    SCALAR_HEAD,
    auto_class,
    check_language_head,
    check_loaded,
    head_overrides,
    reset_head,
)
from burnish_trainer.images import check_vision
from burnish_trainer.lora import BASE, add_lora, is_adapter

ATTENTION = "burnish_packed"
LAYERS = {"full_attention", "sliding_attention"}

# No mask function is registered with it, so transformers builds no mask of its own.
AttentionInterface.register(ATTENTION, attention_forward)


def load_model(
    source: Path,
    *,
    head: str = "language",
    lora: Mapping[str, Any] | None = None,
    frozen: Sequence[str] = (),
    trained: bool = True,
    gradient_checkpointing: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """A model on the CPU in float32 that attends over packs; see `TorchPolicy` for the arguments.

    Raises:
        ValueError: for a model that would not be computed exactly, weights that are not those of
            the config, a pattern that freezes nothing.
    """
    if not (source / "config.json").is_file():
        raise ValueError(
            f"model must be the folder of a checkpoint with config.json, got {source}; convert or "
            "download one"
        )
    if isinstance(frozen, str):
        raise ValueError(f"frozen must be a list of globs, got {frozen!r}; pass [{frozen!r}]")
    config = AutoConfig.from_pretrained(source, **head_overrides(head))
    check_supported(config)
    loaded: Any = auto_class(config, head).from_pretrained(
        source,
        config=config,
        dtype=torch.float32,
        # By part: a vision tower attends within images, which its own lengths keep apart. A part
        # that is not named keeps its default, so the text model's is named too.
        attn_implementation={"": ATTENTION, "text_config": ATTENTION, "vision_config": "sdpa"}
        if getattr(config, "vision_config", None) is not None
        else ATTENTION,
        output_loading_info=True,
    )
    model, info = loaded
    missing = check_loaded(info, source, head)
    if head == "language":
        check_language_head(model)
    else:
        reset_head(model, missing, seed)
    if lora is not None:
        add_lora(model, lora)
    if frozen:
        freeze(model, frozen)
    if not trained:
        model.requires_grad_(False)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def fingerprint(model: PreTrainedModel) -> str:
    """Whether two models are the same: a hash over some values of every weight.

    Adapters and a value or reward head are left out: they are drawn from a seed.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if is_adapter(name) or name.startswith(SCALAR_HEAD):
            continue
        values = parameter.detach().flatten()
        places = torch.linspace(0, max(len(values) - 1, 0), 256, dtype=torch.float64).long()
        digest.update(name.replace(BASE, ".").encode() + str(list(parameter.shape)).encode())
        digest.update(values[places].numpy().tobytes())
    return digest.hexdigest()[:16]


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse models that would not be computed exactly, before their weights are read.

    Raises:
        ValueError: if the model has layers other than full and sliding attention (state-space and
            linear-attention layers carry state from one packed sequence into the next), or images
            in a form that is not known.
    """
    check_vision(config)
    layers = set(getattr(config.get_text_config(), "layer_types", None) or LAYERS)
    if layers - LAYERS:
        raise ValueError(
            f"every layer must be full or sliding attention, got {sorted(layers - LAYERS)} in a "
            f"{config.model_type!r} model; use a model family with attention only"
        )
