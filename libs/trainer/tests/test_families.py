"""Every model family, whole or with adapters, learns the same from every layout of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burnish_distributed import RaggedBatch
from burnish_losses.reduce import LossOutput, Metric, Term, masked_sum
from burnish_trainer import TorchPolicy
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Run = tuple[dict[str, float], dict[str, Tensor]]

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.1,  # log-probs far from uniform, so that a wrong mask shows
}
VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.1,
}
PATCH_SIZE = 3 * 2 * 2 * 2  # colours, times, height, width
IMAGE, VISION_END = 96, 94  # text is below 90


def qwen2_vl() -> Qwen2VLForConditionalGeneration:
    text = {**SHAPE, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    del text["head_dim"]  # Qwen2-VL computes it
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=95,
        vision_end_token_id=VISION_END,
        vision_start_token_id=93,
        tie_word_embeddings=False,
    )
    return Qwen2VLForConditionalGeneration(config)


SLIDING = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=SLIDING)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "qwen2_vl": qwen2_vl,
}
TRAINED = {"full": None, "lora": {"r": 4}}
LAYOUTS = {"fixed": "fixed", "padded": "padded", "packed": "packed", "shared-prefix": "packed"}
MICRO_BATCHES = {"one": [(0, 1, 2, 3, 4, 5, 6)], "four": [(0, 1, 2), (3, 4), (5,), (6,)]}
ALONE = [(i,) for i in range(7)]


def image_tokens(*grids: tuple[int, int, int]) -> np.ndarray:
    """The images of a prompt, each with the end that keeps it from the next."""
    parts = [[IMAGE] * (t * h * w // 4) + [VISION_END] for t, h, w in grids]
    return np.concatenate([np.array(part, dtype=np.int64) for part in parts])


def recorded_batch(*, images: bool = False) -> RaggedBatch:
    """Two prompts with three completions each, and one sequence on its own.

    With images one is in the first prompt, none in the second, and two are in the last sequence.
    """
    generator = np.random.default_rng(0)
    rows, ids, prefix = [], [], []
    grids: list[list[tuple[int, int, int]]] = []
    in_prompt: list[tuple[int, int, int]]
    for group, (num_prompt, completions) in enumerate([(7, (4, 9, 2)), (11, (3, 3, 8))]):
        in_prompt = [(1, 4, 6)] if images and group == 0 else []
        prompt = generator.integers(0, 90, num_prompt)
        if in_prompt:
            prompt = np.concatenate([prompt[:3], image_tokens(*in_prompt), prompt[3:]])
        for length in completions:
            rows.append((prompt, generator.integers(0, 90, length)))
            ids.append(group)
            prefix.append(len(prompt))
            grids.append(in_prompt)
    prompt = generator.integers(0, 90, 8)
    grids.append([(1, 2, 4), (1, 4, 4)] if images else [])
    if images:
        prompt = np.concatenate([image_tokens(*grids[-1]), prompt])
    rows.append((prompt, generator.integers(0, 90, 6)))
    columns: dict[str, Any] = {"prefix_ids": [*ids, -1], "prefix_lengths": [*prefix, 0]}
    if images:
        columns |= image_columns(grids)
    return RaggedBatch.from_rows(
        [
            {
                "token_ids": np.concatenate([prompt, completion]),
                "token_mask": np.arange(len(prompt) + len(completion)) >= len(prompt),
                "advantages": generator.normal(size=len(prompt) + len(completion)).astype("f4"),
            }
            for prompt, completion in rows
        ],
        columns,
    )


def image_columns(grids: list[list[tuple[int, int, int]]]) -> dict[str, np.ndarray]:
    """Random pixels; equal grids at the place of each prompt are the same images."""
    pixels, rows = np.empty(len(grids), dtype=object), np.empty(len(grids), dtype=object)
    for i, grid in enumerate(grids):
        rows[i] = np.array(grid, dtype=np.int64).reshape(-1, 3)
        generator = np.random.default_rng(len(grid))
        size = (int(rows[i].prod(axis=1).sum()), PATCH_SIZE)
        pixels[i] = generator.normal(size=size).astype("f4")
    return {"pixel_values": pixels, "image_grid_thw": rows}


def without_prefixes(batch: RaggedBatch) -> RaggedBatch:
    kept = {n: c for n, c in batch.sequence_columns.items() if not n.startswith("prefix_")}
    return RaggedBatch(batch.lengths, batch.token_columns, kept)


def batch_of(family: str) -> RaggedBatch:
    return recorded_batch(images=family == "qwen2_vl")


def weighted_nll(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    total = masked_sum(-logprobs * columns["advantages"], columns["token_mask"])
    return LossOutput((Term(total, "tokens"),), {"nll": Metric(total.detach(), "tokens", "mean")})


def drop_last_token(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    mask = columns["token_mask"].clone()
    mask[-1] = False
    return weighted_nll(logprobs, {**columns, "token_mask": mask})


def build(checkpoint: str, trained: str) -> TorchPolicy:
    return TorchPolicy(
        checkpoint,
        # Steps so large that adapters, of which one factor starts at zero, move as well.
        learning_rate=0.1 if trained == "full" else 0.5,
        optimizer="torch.optim.SGD",
        max_grad_norm=None,
        lora=TRAINED[trained],
    )


def weights_of(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


def three_steps(policy: TorchPolicy, batch: RaggedBatch, *args: Any, **kwargs: Any) -> Run:
    metrics = [policy.train_step(batch, *args, **kwargs) for _ in range(3)]
    return metrics[0], weights_of(policy)


def assert_equal_run(got: Run, expected: Run, start: Mapping[str, Tensor]) -> None:
    """Loss, norm and metrics to 1e-5; weights after three SGD steps to 1e-5 of the way moved.

    Three roundings of the weight itself come on top: a norm's weight near 1 moves by thousandths.
    """
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        moved = (tensor - start[name]).abs().max()
        rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (got[1][name] - tensor).abs().max() <= 1e-5 * moved + rounding, name


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("families")

    @cache
    def checkpoint(family: str) -> str:
        torch.manual_seed(0)
        FAMILIES[family]().save_pretrained(folder / family)
        return str(folder / family)

    return checkpoint


@pytest.fixture(scope="session")
def expectations(
    checkpoints: Callable[[str], str],
) -> Callable[[str, str], tuple[dict[str, Tensor], Run]]:
    """Weights at the start, and a run of every sequence alone in padded rows: nothing can leak."""

    @cache
    def expected(family: str, trained: str) -> tuple[dict[str, Tensor], Run]:
        policy = build(checkpoints(family), trained)
        start = weights_of(policy)
        batch = without_prefixes(batch_of(family))
        return start, three_steps(policy, batch, ALONE, weighted_nll, layout="padded")

    return expected


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_the_same_in_every_layout(
    checkpoints: Any, expectations: Any, family: str, trained: str, layout: str, micro_batches: str
) -> None:
    start, expected = expectations(family, trained)
    batch = batch_of(family)
    got = three_steps(
        build(checkpoints(family), trained),
        batch if layout == "shared-prefix" else without_prefixes(batch),
        MICRO_BATCHES[micro_batches],
        weighted_nll,
        layout=LAYOUTS[layout],
    )
    assert_equal_run(got, expected, start)


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_token_is_noticed(
    checkpoints: Any, expectations: Any, family: str, trained: str
) -> None:
    start, expected = expectations(family, trained)
    policy = build(checkpoints(family), trained)
    got = three_steps(policy, batch_of(family), MICRO_BATCHES["four"], drop_last_token)
    with pytest.raises(AssertionError):
        assert_equal_run(got, expected, start)
    # Also in the weights alone, where a step too small to tell runs apart would hide it.
    with pytest.raises(AssertionError):
        assert_equal_run((expected[0], got[1]), expected, start)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_move_and_only_what_they_adapt(expectations: Any, family: str) -> None:
    start, (_, weights) = expectations(family, "lora")
    moved = {name: float((weights[name] - start[name]).abs().max()) for name in start}
    # Their effect is in the weights' 4th digit at least, so that 1e-5 of it is still told.
    adapted = [n for n in start if start[n].ndim == 2 and "embed" not in n and "lm_head" not in n]
    assert len(adapted) >= 14
    assert all(moved[name] > 1e-4 for name in adapted), moved
    assert all(moved[name] == 0 for name in start if name not in adapted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_transformers_own_forward(checkpoints: Any, family: str) -> None:
    batch = batch_of(family)
    expected = own_loss(load_own(checkpoints(family)), batch)
    policy = build(checkpoints(family), "full")
    metrics = policy.train_step(batch, MICRO_BATCHES["four"], weighted_nll)
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/num_tokens"] == 35


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_the_window_is_shorter_than_the_sequences(checkpoints: Any, family: str) -> None:
    """Else the comparisons above would not see one that is ignored."""
    batch = batch_of(family)
    windowed = own_loss(load_own(checkpoints(family)), batch)
    wide = own_loss(load_own(checkpoints(family), sliding_window=4096), batch)
    assert abs(wide - windowed) > 1e-3


def test_the_pixels_matter(checkpoints: Any) -> None:
    """Else the comparisons above would not see images that are lost or exchanged."""
    batch = batch_of("qwen2_vl")
    columns = {**batch.sequence_columns}
    columns["pixel_values"] = np.array([p[::-1].copy() for p in columns["pixel_values"]], object)
    reversed_patches = RaggedBatch(batch.lengths, batch.token_columns, columns)
    own, other = (
        build(checkpoints("qwen2_vl"), "full").train_step(b, MICRO_BATCHES["one"], weighted_nll)
        for b in (batch, reversed_patches)
    )
    assert abs(own["train/loss"] - other["train/loss"]) > 1e-3


def load_own(checkpoint: str, **overrides: Any) -> Any:
    config = AutoConfig.from_pretrained(checkpoint, **overrides)
    auto: Any = AutoModelForCausalLM
    if config.model_type == "qwen2_vl":
        auto = Qwen2VLForConditionalGeneration
    model = auto.from_pretrained(Path(checkpoint), config=config, attn_implementation="sdpa")
    return model.double().eval()


def own_loss(model: Any, batch: RaggedBatch) -> float:
    """The mean of `weighted_nll` by one plain forward in float64 for each sequence."""
    total, num_tokens = 0.0, 0
    for i in range(batch.num_sequences):
        one = batch.select([i])
        ids, kwargs = torch.tensor(one.token_columns["token_ids"]), {}
        if len(one.sequence_columns.get("image_grid_thw", [()])[0]):
            kwargs = {
                "pixel_values": torch.tensor(one.sequence_columns["pixel_values"][0]).double(),
                "image_grid_thw": torch.tensor(one.sequence_columns["image_grid_thw"][0]),
                "mm_token_type_ids": (ids == IMAGE).int()[None],
            }
        with torch.no_grad():
            logprobs = model(input_ids=ids[None], **kwargs).logits[0].log_softmax(-1)
        for t in np.flatnonzero(one.token_columns["token_mask"]):
            total -= float(one.token_columns["advantages"][t]) * float(logprobs[t - 1, ids[t]])
            num_tokens += 1
    return total / num_tokens
