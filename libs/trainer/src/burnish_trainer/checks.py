"""What a policy is given, refused before anything depends on it, and on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from burnish_distributed import RaggedBatch
from burnish_distributed.collectives import all_gather_object
from transformers import PreTrainedConfig

from burnish_trainer.layouts import MicroBatches, check_plan

DTYPES = ("float32", "bfloat16")  # gradients in float16 underflow without a scale of the loss
# Columns that the policy makes for the loss.
MADE = ("cu_seqlens", "entropies", "student_topk_logprobs")


@contextmanager
def on_all_ranks() -> Iterator[None]:
    """A ValueError in the block on one rank becomes one on every rank, so that none waits for it.

    A collective.
    """
    error = None
    try:
        yield
    except ValueError as raised:
        error = raised
    errors = all_gather_object(None if error is None else str(error))
    if error is not None:
        raise error
    for number, message in enumerate(errors):
        if message is not None:
            raise ValueError(f"{message} (on rank {number})")


def check_work(
    batch: RaggedBatch,
    micro_batches: MicroBatches,
    layout: str,
    config: PreTrainedConfig,
    *,
    masked: bool,
) -> None:
    """Check a batch and its plan on every rank. A collective.

    Args:
        config: of the model.
        masked: the column ``token_mask`` is read.

    Raises:
        ValueError: for a column that is missing, reserved or of another dtype, an id outside the
            vocabulary, a sequence that is empty or longer than the model allows, a plan that is
            another batch's, or ranks with different numbers of micro-batches.
    """
    with on_all_ranks():
        if not isinstance(batch, RaggedBatch):
            raise ValueError(
                f"batch must be a burnish_distributed.RaggedBatch, got {type(batch).__name__}; "
                "make one with RaggedBatch.from_rows"
            )
        check_plan(batch, micro_batches, layout)
        if batch.num_sequences:
            _check_columns(batch, masked)
            _check_tokens(batch, config.get_text_config())
            _check_video(batch, config)
    nums = all_gather_object(len(micro_batches))
    if len(set(nums)) > 1:
        raise ValueError(
            f"all ranks must have equally many micro-batches, got {nums}; plan them together, and "
            "fill up with empty ones: ()"
        )


def _check_columns(batch: RaggedBatch, masked: bool) -> None:
    columns = batch.token_columns
    for name in ("token_ids", *(["token_mask"] if masked else [])):
        if name not in columns:
            raise ValueError(
                f"a batch must have the token column {name}, got {sorted(columns)}; add it"
            )
    if not np.issubdtype(columns["token_ids"].dtype, np.integer) or columns["token_ids"].ndim != 1:
        raise ValueError(
            f"token_ids must be integers [T], got {_told(columns['token_ids'])}; pass ids"
        )
    mask = columns.get("token_mask")
    if mask is not None and (mask.dtype != np.bool_ or mask.ndim != 1):
        raise ValueError(
            f"token_mask must be bool [T], got {_told(mask)}; use mask.astype(bool), and give "
            "weights in a column that the loss reads"
        )
    twice = columns.keys() & batch.sequence_columns.keys()
    made = (columns.keys() | batch.sequence_columns.keys()) & set(MADE)
    if twice or made:
        raise ValueError(
            f"a column must have a name of its own, got {sorted(twice | made)} "
            f"{'as token and as sequence column' if twice else 'which the policy makes'}; rename it"
        )


def _check_tokens(batch: RaggedBatch, config: PreTrainedConfig) -> None:
    if not batch.lengths.all():
        raise ValueError(
            f"every sequence must hold a token, got none in {np.flatnonzero(batch.lengths == 0)[0]}"
            "; leave empty sequences out"
        )
    longest, limit = int(batch.lengths.max()), getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(
            f"sequences must be at most {limit} tokens long (max_position_embeddings), got "
            f"{longest} in sequence {batch.lengths.argmax()}; cut them, or raise it in config.json "
            "together with the RoPE scaling that the model needs for it"
        )
    ids = batch.token_columns["token_ids"]
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if len(wrong):
        sequence = np.searchsorted(batch.offsets, wrong[0], side="right") - 1
        raise ValueError(
            f"token_ids must be in [0, {config.vocab_size}), got {ids[wrong[0]]} in sequence "
            f"{sequence}; encode with the model's own tokenizer"
        )


def _check_video(batch: RaggedBatch, config: PreTrainedConfig) -> None:
    video = getattr(config, "video_token_id", None)
    if video is not None and (batch.token_columns["token_ids"] == video).any():
        raise ValueError(
            f"a batch must hold no videos, got their token {video}; only images are supported"
        )


def check_arguments(
    *,
    learning_rate: float | None,
    max_grad_norm: float | None,
    on_nonfinite: str,
    dtype: str,
    reference: bool,
    seed: int,
) -> None:
    """Check those of `TorchPolicy` that cost nothing to check.

    Raises:
        ValueError: that says what must hold.
    """
    for name, value in {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
    if max_grad_norm == 0:
        raise ValueError("max_grad_norm must be above 0, got 0; pass None to clip nothing")
    if on_nonfinite not in ("stop", "skip"):
        raise ValueError(f"on_nonfinite must be stop or skip, got {on_nonfinite!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if dtype != "float32" and not torch.distributed.is_initialized():
        raise ValueError(
            f"computing in {dtype} needs a process group (FSDP keeps the float32 weights), got "
            "none; call burnish_distributed.initialize_process_group, also for one process"
        )
    if reference and learning_rate is None:
        raise ValueError(
            "a policy that only scores is its own reference, got reference=True without a "
            "learning_rate; use logprobs"
        )
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")


def chosen_device(device: str | None) -> torch.device:
    """The device of a name; by default CUDA's current one if there is one, else the CPU.

    One with a number becomes CUDA's current one.

    Raises:
        ValueError: for a name that is none, or CUDA where there is none.
    """
    available = torch.cuda.is_available()
    try:
        chosen = torch.device(device or ("cuda" if available else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {device!r}") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not available):
        raise ValueError(
            f"device must be cpu, or cuda where there is a GPU, got {device!r} "
            f"{'with' if available else 'without'} one"
        )
    if chosen.index is not None and chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _told(column: np.ndarray[Any, Any]) -> str:
    return f"{column.dtype} of shape {list(column.shape)}"
