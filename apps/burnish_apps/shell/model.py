"""The model at hand: its files, its tokenizer, and whether it fits this machine.

Other people's files are met here, before any process starts. Whatever they raise becomes a
`ConfigError` that names the key of the recipe.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from burnish_converters.model_source import resolve_model
from burnish_converters.safetensors_io import read_weights
from burnish_trainer.loading import check_supported
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from burnish_apps.shell.config import blame
from burnish_apps.shell.optimization import Optimization
from burnish_apps.shell.report import say
from burnish_apps.shell.settings import Model

WEIGHT_BYTES = 4  # what is trained is float32, whatever the model computes in


def model_folder(model: Model) -> Path:
    """The model's checkpoint folder, fetched if need be."""
    say(f"model: {model.source} (fetched the first time)")
    with blame("model.source"):
        return resolve_model(model.source, Path(model.cache_dir).expanduser())


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a checkpoint folder."""
    with blame("model.source: its config cannot be used"):
        AutoConfig.from_pretrained(folder)  # the tokenizer reads it too, and would be blamed
    with blame("model.source: its tokenizer cannot be read"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        return tokenizer


def model_config(folder: Path) -> PreTrainedConfig:
    """The config of a checkpoint that the trainer computes exactly.

    Raises:
        ConfigError: if it would not, or there is none.
    """
    with blame("model.source: its config cannot be used"):
        config = AutoConfig.from_pretrained(folder)
        check_supported(config)
        return config


def num_parameters(folder: Path) -> int:
    """Parameters of a checkpoint; its files are mapped, not read.

    Raises:
        ConfigError: if there are none, or one is missing or truncated.
    """
    with blame("model.source: its weights cannot be read"):
        return sum(tensor.numel() for _, tensor in read_weights(folder))


def training_bytes(parameters: int, training: Optimization, *, reference: bool) -> int:
    """What the ranks hold together: weights, gradient, two moments, and the reference."""
    copies = 5 if reference else 4
    if training.lora is not None:
        copies = 1  # beside the weights, those of the adapters are little
    return copies * parameters * WEIGHT_BYTES


def available_bytes() -> int:
    """Memory this machine can give to new processes."""
    return int(psutil.virtual_memory().available)


def num_gpus() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count()
