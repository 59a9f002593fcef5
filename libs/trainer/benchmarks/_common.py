"""What the benchmarks of the trainer share: a model, rows, a measured process, a table."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
# Prompt and completion of 1,024 GSM8K problems under SmolLM2's tokenizer and chat template.
LENGTHS = HERE / "gsm8k_smollm2_lengths.npy"


def make_model(folder: Path) -> Path:
    """A model of the shape of SmolLM2-135M; speed does not depend on what the weights are."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows(num_rows: int) -> list[dict[str, list[Any]]]:
    """Random tokens in the lengths of GSM8K's problems; the completion is trained."""
    lengths = np.load(LENGTHS)
    generator = np.random.default_rng(0)
    rows = []
    for prompt, completion in lengths[generator.permutation(len(lengths))[:num_rows]]:
        token_ids = generator.integers(3, 49152, prompt + completion)
        mask = np.arange(prompt + completion) >= prompt
        rows.append({"token_ids": token_ids, "token_mask": mask})
    return rows


def model_flops(model: Any, lengths: Sequence[int]) -> float:
    """Floating-point operations of a training step on real tokens, recomputation not counted.

    6 N for every token (Kaplan et al. 2020) and causal attention: scores and their product with the
    values take 2 * 2 * width a pair of tokens, forward once and backward twice, and a sequence has
    half of length^2 pairs.
    """
    config = model.config
    num_parameters = sum(p.numel() for p in model.parameters())
    width = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    pairs = sum(n * n / 2 for n in lengths)
    return 6 * num_parameters * sum(lengths) + 12 * width * config.num_hidden_layers * pairs


def matmul_rate(size: int = 2048, seconds: float = 3.0) -> float:
    """Operations a second of a large float32 matrix product: the median over some seconds.

    The best of a few would be the rate of a processor at rest, which a long step never sees.
    """
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    durations: list[float] = []
    while sum(durations) < seconds:
        durations.append(timed(lambda: torch.mm(a, b, out=out)))
    return 2 * size**3 / statistics.median(durations)


def timed(function: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_mib() -> float:
    """The most memory this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(script: str, *arguments: str) -> dict[str, Any]:
    """Run ``script`` again as one contender; the JSON of its last line."""
    command = [sys.executable, script, *arguments]
    # Large tensors in huge pages: small ones are handed out and taken back all along.
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
