"""What is checked with the model and the problems at hand, before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish_data import render_prompt
from transformers import PreTrainedTokenizerBase

from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.shell.config import ConfigError, blame, cause
from burnish_apps.shell.model import (
    available_bytes,
    model_config,
    num_gpus,
    num_parameters,
    training_bytes,
)

FLOAT_BYTES = {"float32": 4, "bfloat16": 2}
KV_BLOCK_TOKENS = 128  # the engine hands out whole blocks, of at most this many tokens


def preflight(
    config: GrpoConfig,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
) -> None:
    """Check the model's files, lengths, memory and GPUs.

    Raises:
        ConfigError: with every violation.
    """
    text_config = model_config(model).get_text_config()
    with blame("model.source: its config cannot be used"):
        sequence_bytes = kv_bytes(
            text_config, config.engine.max_model_len, FLOAT_BYTES[config.model.dtype]
        )
    parameters = num_parameters(model)
    problems = length_problems(config, text_config, tokenizer, rows)
    problems += memory_problems(config, sequence_bytes, parameters)
    problems += gpu_problems(config)
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
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit and context > limit:
        return [f"engine.max_model_len must be at most the model's {limit}, got {context}"]
    if not tokenizer.chat_template and not all(isinstance(row["prompt"], str) for row in rows):
        return [
            "model.source: its tokenizer must have a chat template for prompts that are messages, "
            "got none; take an instruction-tuned model, or prompts that are text"
        ]
    room = context - config.rollout.max_new_tokens
    lengths = []
    for i, row in enumerate(rows):
        try:
            lengths.append(len(render_prompt(tokenizer, row["prompt"])))
        except Exception as error:  # noqa: BLE001  (whatever a template raises)
            return [f"data.source: the prompt of row {row.get('id', i)} fails, {cause(error)}"]
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


def gpu_problems(config: GrpoConfig) -> list[str]:
    """More GPUs than this machine has, where the run is to be on it: it would wait for ever."""
    engine, training = config.engine, config.training
    asked = engine.num_engines * engine.gpus_per_engine
    asked += training.num_ranks * training.gpus_per_rank
    if config.ray_address is not None or asked <= (found := num_gpus()):
        return []
    return [
        f"engine.gpus_per_engine and training.gpus_per_rank must fit this machine's {found} GPUs, "
        f"got {asked:g} for {engine.num_engines} engines and {training.num_ranks} ranks; ask for "
        "fewer, or give ray_address of a cluster that has them"
    ]


def memory_problems(config: GrpoConfig, sequence_bytes: int, parameters: int) -> list[str]:
    """An engine cache that holds not one sequence; a run that does not fit this machine."""
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
    engine_bytes = parameters * FLOAT_BYTES[config.model.dtype] + cache_bytes
    needed = config.engine.num_engines * engine_bytes + training_bytes(
        parameters, config.training, reference=config.training.kl_coefficient > 0
    )
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
    kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
    per_token = 2 * model_config.num_hidden_layers * kv_heads * head_dim
    return blocks * KV_BLOCK_TOKENS * per_token * float_bytes
