"""Low-rank adapters (Hu et al. 2021) by peft, injected into the model in place.

The policy keeps weights and adapters apart; everybody else sees merged weights of the model's own
names, `W + scaling * B A` in float32, by `burnish_converters.lora`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish_converters.lora import merge_lora
from burnish_converters.safetensors_io import read_weights
from burnish_distributed.collectives import rank
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish_trainer.heads import SCALAR_HEAD
from burnish_trainer.parallelize import full_tensor

ADAPTER = "default"
BASE = ".base_layer."
PEFT_PREFIX = "base_model.model."
# All others change what is computed or trained beside `W + scaling * B A`.
TAKEN = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("fan_in_fan_out", "task_type", "base_model_name_or_path", "revision"),
}
MEANING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
NEUTRAL = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}


def add_lora(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Any:
    """Inject adapters; only they, and a value or reward head, are trained from then on.

    Args:
        model: changed in place.
        arguments: of `peft.LoraConfig`: ``r``, ``lora_alpha``, ``target_modules`` (by default all
            linear layers but the head), ``lora_dropout``, ``use_rslora``, ``exclude_modules``, …

    Returns:
        The `peft.LoraConfig`.

    Raises:
        ImportError: without peft.
        ValueError: for arguments that peft does not take, a variant that cannot be merged here, or
            targets that are not linear layers.
    """
    config = lora_config(arguments)
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    scalar_head = getattr(model, SCALAR_HEAD.rstrip("."), None)
    if scalar_head is not None and not config.exclude_modules:
        config.exclude_modules = [SCALAR_HEAD.rstrip(".")]  # it is trained whole
    try:
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lora must fit the model, got {dict(arguments)}: {error}; change target_modules"
        ) from error
    wrong = [name for name, layer in adapter_layers(model) if not isinstance(layer, Linear)]
    if wrong:
        raise ValueError(f"lora must target linear layers, got {wrong[:3]}; change target_modules")
    heads = [model.get_output_embeddings(), scalar_head]
    if any(layer is head for head in heads for _, layer in adapter_layers(model)):
        raise ValueError(
            "lora must target layers of the decoder, got the head; leave it out of target_modules"
        )
    for name, parameter in model.named_parameters():
        if name.startswith(SCALAR_HEAD):
            parameter.requires_grad_(True)
    return config


def lora_config(arguments: Mapping[str, Any]) -> Any:
    """A `peft.LoraConfig` of plain low-rank adapters, on all linear layers unless told otherwise.

    Raises:
        ImportError: without peft.
        ValueError: for arguments that peft does not take, or a variant that cannot be merged here.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError(
            'LoRA must have peft, which is not installed; pip install "burnish-trainer[lora]"'
        ) from error
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"lora must be arguments of peft.LoraConfig, got {arguments!r}; pass {{'r': 8}}"
        )
    try:
        config = LoraConfig(**{"target_modules": "all-linear", **arguments})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"lora must be arguments of peft.LoraConfig, got {dict(arguments)}: {error}"
        ) from error
    refused = [
        name
        for name, value in arguments.items()
        if value and name not in TAKEN and value not in NEUTRAL.get(name, ())
    ]
    if refused:
        raise ValueError(
            f"lora must be plain low-rank adapters, got {', '.join(refused)}; leave it out"
        )
    return config


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of all layers with adapters; none without peft."""
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapters, within the block."""
    layers = [layer for _, layer in adapter_layers(model)]
    trained = [p for p in model.parameters() if p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        model.requires_grad_(False)  # peft has turned on those that are frozen, too
        for parameter in trained:
            parameter.requires_grad_(True)


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor), adapters merged; tied tensors once. A collective."""
    layers = dict(adapter_layers(model))
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        weight = full_tensor(parameter)
        prefix, base, rest = name.partition(BASE)
        if base and rest == "weight":
            layer = layers[prefix]
            weight = merge_lora(
                weight,
                full_tensor(layer.lora_A[ADAPTER].weight),
                full_tensor(layer.lora_B[ADAPTER].weight),
                scaling=layer.scaling[ADAPTER],
                transposed=layer.fan_in_fan_out,
            )
        yield f"{prefix}.{rest}" if base else name, weight


def adapter_identity(model: PreTrainedModel) -> dict[str, Any]:
    """What makes adapters mean the same on a model, as JSON values."""
    if not adapter_layers(model):
        return {"lora": False}
    config: Any = model.peft_config[ADAPTER]
    values = {f"lora.{name}": getattr(config, name) for name in MEANING}
    return {"lora": True, **json.loads(json.dumps(values))}


def save_adapter(model: PreTrainedModel, folder: Path, *, source: Path) -> None:
    """Write adapters and a new head in the form that peft reads. A collective.

    Nothing is written for a model without adapters.
    """
    if not adapter_layers(model):
        return
    weights = {
        PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): full_tensor(parameter).cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name) or name.startswith(SCALAR_HEAD)
    }
    if rank() == 0:
        folder.mkdir(parents=True)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config: Any = copy.copy(model.peft_config[ADAPTER])
        config.base_model_name_or_path = config.base_model_name_or_path or str(source)
        config.save_pretrained(folder)


def read_adapter(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name in the model, tensor) pairs of `save_adapter`'s file.

    Raises:
        ValueError: if the file is missing or broken.
    """
    for name, tensor in read_weights(folder):
        plain = name.removeprefix(PEFT_PREFIX)
        for part in (".lora_A.", ".lora_B."):
            plain = plain.replace(part, f"{part}{ADAPTER}.")
        yield plain, tensor


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name
