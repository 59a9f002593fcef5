"""What is checked with the model and the problems at hand, before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from burnish_data import render_prompt
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedTokenizerBase

from burnish_apps.grpo.config import GrpoConfig, available_bytes
from burnish_apps.shell.config import ConfigError

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
KV_BLOCK_TOKENS = 128  # the engine hands out whole blocks, of at most this many tokens


def preflight(
    config: GrpoConfig,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
) -> None:
    """Check lengths and memory.

    Raises:
        ConfigError: with every violation.
    """
    model_config = AutoConfig.from_pretrained(model).get_text_config()
    problems = length_problems(config, model_config, tokenizer, rows)
    problems += memory_problems(config, model, model_config)
    if problems:
        raise ConfigError(problems)


def length_problems(
    config: GrpoConfig,
    model_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
) -> list[str]:
    """Prompts that leave no room for a completion, and a context the model was not made for."""
    context = config.engine.max_model_len
    limit = model_config.max_position_embeddings
    if context > limit:
        return [f"engine.max_model_len must be at most the model's {limit}, got {context}"]
    room = context - config.rollout.max_new_tokens
    lengths = [len(render_prompt(tokenizer, row["prompt"])) for row in rows]
    too_long = [i for i, length in enumerate(lengths) if length > room]
    if not too_long:
        return []
    worst = max(too_long, key=lambda i: lengths[i])
    return [
        f"every prompt must have at most {room} tokens (engine.max_model_len {context} less "
        f"rollout.max_new_tokens {config.rollout.max_new_tokens}), but {len(too_long)} of "
        f"{len(rows)} have more, {lengths[worst]} in row {rows[worst].get('id', worst)}; raise "
        "engine.max_model_len or filter the data"
    ]


def memory_problems(config: GrpoConfig, model: Path, model_config: Any) -> list[str]:
    """An engine cache that holds not one sequence; a run that does not fit this machine."""
    size = FLOAT_BYTES[config.model.dtype]
    sequence_bytes = kv_bytes(model_config, config.engine.max_model_len, size)
    cache_bytes = config.engine.kv_cache_bytes
    if cache_bytes is None:
        if config.engine.gpus_per_engine:
            return []
        return [
            "engine.kv_cache_bytes must be given for an engine on a CPU, at least "
            f"{sequence_bytes} for one sequence"
        ]
    if cache_bytes < sequence_bytes:
        return [
            f"engine.kv_cache_bytes must hold at least one sequence of engine.max_model_len "
            f"tokens, {sequence_bytes} bytes, got {cache_bytes}; raise it"
        ]
    if config.engine.gpus_per_engine or config.training.gpus_per_rank or config.ray_address:
        return []  # this machine's memory does not decide
    weights_bytes = num_parameters(model) * size
    copies = 5 if config.training.kl_coefficient else 4  # weights, gradient, two moments, reference
    needed = config.engine.num_engines * (weights_bytes + cache_bytes) + copies * weights_bytes
    free = available_bytes()
    if needed <= free:
        return []
    return [
        "weights, optimizer and engine caches must fit this machine's free memory, "
        f"{free / 1e9:.1f} GB, but need {needed / 1e9:.1f} GB; lower engine.kv_cache_bytes or "
        "engine.num_engines, take a smaller model, or free memory"
    ]


def kv_bytes(model_config: Any, num_tokens: int, float_bytes: int) -> int:
    """Keys and values of one sequence, in whole blocks."""
    blocks = -(-num_tokens // KV_BLOCK_TOKENS)
    heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    per_token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads * head_dim
    return blocks * KV_BLOCK_TOKENS * per_token * float_bytes


def num_parameters(model: Path) -> int:
    """Parameters of a checkpoint, from the headers of its files."""
    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total
