"""Images beside token columns: what is refused, and ranks of which only one has any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_trainer import TorchPolicy
from burnish_trainer.images import check_vision
from torch import Tensor
from transformers import (
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.1,
}
VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.1,
}
PATCH_SIZE = 3 * 2 * 2 * 2  # colours, times, height, width
IMAGE = 96
GRID = (1, 4, 4)  # 16 patches, 4 tokens
ALL = [(0, 1, 2, 3)]
ALONE = [(0,), (1,), (2,), (3,)]


def image_batch() -> RaggedBatch:
    """Four sequences: the first two with the same prompt and image in it, two without images."""
    generator = np.random.default_rng(0)
    prompt = np.concatenate(
        [generator.integers(0, 90, 3), [IMAGE] * 4, generator.integers(0, 90, 2)]
    )
    prompts = [prompt, prompt, generator.integers(0, 90, 4), generator.integers(0, 90, 6)]
    rows = []
    for before, length in zip(prompts, (4, 6, 5, 3), strict=True):
        size = len(before) + length
        rows.append(
            {
                "token_ids": np.concatenate([before, generator.integers(0, 90, length)]),
                "token_mask": np.arange(size) >= len(before),
            }
        )
    pixels, grids = np.empty(4, dtype=object), np.empty(4, dtype=object)
    image = generator.normal(size=(16, PATCH_SIZE)).astype("f4")
    for i in range(4):
        pixels[i] = image if i < 2 else np.zeros((0, PATCH_SIZE), dtype="f4")
        grids[i] = np.array([GRID] if i < 2 else [], dtype=np.int64).reshape(-1, 3)
    return RaggedBatch.from_rows(
        rows,
        {
            "pixel_values": pixels,
            "image_grid_thw": grids,
            "prefix_ids": [0, 0, -1, -1],
            "prefix_lengths": [len(prompt), len(prompt), 0, 0],
        },
    )


def with_columns(batch: RaggedBatch, **columns: Any) -> RaggedBatch:
    """Sequence columns replaced, or taken out by None."""
    kept = {n: c for n, c in {**batch.sequence_columns, **columns}.items() if c is not None}
    return RaggedBatch(batch.lengths, batch.token_columns, kept)


def with_pixels(batch: RaggedBatch, sequence: int, pixels: np.ndarray) -> RaggedBatch:
    column = batch.sequence_columns["pixel_values"].copy()
    column[sequence] = pixels
    return with_columns(batch, pixel_values=column)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen2_vl")
    config = Qwen2VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]},
        },
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=95,
        vision_start_token_id=93,
        vision_end_token_id=94,
        tie_word_embeddings=False,
    )
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**TEXT)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def policy(checkpoint: str) -> TorchPolicy:
    """For tests that do not train."""
    return TorchPolicy(checkpoint, learning_rate=None)


def nll(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    assert "pixel_values" not in columns
    total = masked_sum(-logprobs, columns["token_mask"])
    return LossOutput((Term(total, "tokens"),), {})


def test_images_to_a_text_model_are_refused(text_checkpoint: str) -> None:
    text = TorchPolicy(text_checkpoint, learning_rate=None)
    batch = image_batch()
    with pytest.raises(ValueError, match=r"must go to a vision-language model, .* 'llama' model"):
        text.logprobs(batch, ALL)
    # Columns without any image in them are no images.
    without = batch.select([2, 3])
    expected = text.logprobs(
        with_columns(without, pixel_values=None, image_grid_thw=None), [(0, 1)]
    )
    np.testing.assert_array_equal(text.logprobs(without, [(0, 1)]), expected)


@pytest.mark.parametrize("missing", ["pixel_values", "image_grid_thw"])
def test_one_column_of_images_without_the_other_is_refused(
    policy: TorchPolicy, missing: str
) -> None:
    given = {"pixel_values": "image_grid_thw", "image_grid_thw": "pixel_values"}[missing]
    with pytest.raises(ValueError, match=f"got {given} alone; pass both"):
        policy.logprobs(with_columns(image_batch(), **{missing: None}), ALL)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_trained_image_tokens_are_refused(policy: TorchPolicy, layout: str) -> None:
    batch = with_columns(image_batch(), prefix_ids=None, prefix_lengths=None)
    mask = batch.token_columns["token_mask"].copy()
    mask[batch.offsets[1] + 5] = True
    assert batch.token_columns["token_ids"][batch.offsets[1] + 5] == IMAGE
    with pytest.raises(ValueError, match=r"must not be trained, .* in sequence 1; mask them"):
        policy.logprobs(batch.with_token_column("token_mask", mask), ALL, layout=layout)


def test_patches_that_do_not_fill_the_image_tokens_are_refused(policy: TorchPolicy) -> None:
    batch = image_batch()
    image = batch.sequence_columns["pixel_values"][1]
    message = "16 patches by image_grid_thw for 4 image tokens and {} patches in sequence 1"
    for wrong in (image[:-1], np.concatenate([image, image])):
        with pytest.raises(ValueError, match=message.format(len(wrong))):
            policy.logprobs(with_pixels(batch, 1, wrong), ALL)


def test_an_image_cut_off_or_without_pixels_is_refused(policy: TorchPolicy) -> None:
    batch = image_batch()
    alone = with_columns(batch, prefix_ids=None, prefix_lengths=None)
    # Sequence 1 has image tokens and says it has no image; sequence 0 has both.
    grids = batch.sequence_columns["image_grid_thw"].copy()
    grids[1] = grids[1][:0]
    no_image = with_pixels(with_columns(alone, image_grid_thw=grids), 1, np.zeros((0, PATCH_SIZE)))
    with pytest.raises(ValueError, match=r"got 0 tokens and 0 patches .* for 4 image tokens"):
        policy.logprobs(no_image, ALL)
    # Nor does any sequence of the micro-batch.
    with pytest.raises(ValueError, match=r"got 0 tokens and 0 patches .* for 4 image tokens"):
        policy.logprobs(no_image.select([1]), [(0,)])
    bare = with_columns(no_image.select([1]), pixel_values=None, image_grid_thw=None)
    with pytest.raises(ValueError, match=r"got 0 tokens and 0 patches .* for 4 image tokens"):
        policy.logprobs(bare, [(0,)])


def test_a_truncated_image_is_refused(policy: TorchPolicy) -> None:
    batch = with_columns(image_batch(), prefix_ids=None, prefix_lengths=None).select([1])
    kept = {name: column[:5] for name, column in batch.token_columns.items()}
    cut = RaggedBatch(np.array([5]), kept, batch.sequence_columns)
    with pytest.raises(ValueError, match=r"got 4 tokens and 16 patches .* for 2 image tokens"):
        policy.logprobs(cut, [(0,)])


def test_one_shared_prefix_with_two_images_is_refused(policy: TorchPolicy) -> None:
    batch = image_batch()
    other = with_pixels(batch, 1, -batch.sequence_columns["pixel_values"][1])
    with pytest.raises(ValueError, match=r"must have the same images in it, .* in sequence 1"):
        policy.logprobs(other, ALL)
    # Apart they are two prompts, and the image tells them from each other.
    apart = with_columns(other, prefix_ids=None, prefix_lengths=None)
    got = policy.logprobs(apart, ALL)
    np.testing.assert_allclose(got, policy.logprobs(apart, ALONE, layout="padded"), atol=1e-5)
    assert np.abs(got - policy.logprobs(batch, ALL)).max() > 1e-3


def test_the_images_are_those_of_their_own_sequences(policy: TorchPolicy) -> None:
    """A plan that turns the order round, in every layout."""
    batch = with_columns(image_batch(), prefix_ids=None, prefix_lengths=None)
    batch = with_pixels(batch, 1, -batch.sequence_columns["pixel_values"][1])
    expected = policy.logprobs(batch, ALONE, layout="padded")
    for plan in ([(3, 1, 2, 0)], [(1, 0), (3, 2)]):
        for layout in ("packed", "padded", "fixed"):
            got = policy.logprobs(batch, plan, layout=layout)
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_another_head_on_a_vision_language_model_is_refused(checkpoint: str, head: Any) -> None:
    with pytest.raises(ValueError, match=f"must have a language head, got '{head}' for"):
        TorchPolicy(checkpoint, learning_rate=0.1, head=head)


def test_other_vision_families_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llava")
    with pytest.raises(ValueError, match="one of qwen2_vl, qwen2_5_vl, got 'llava'"):
        check_vision(config)
    config.save_pretrained(tmp_path)  # before any weights are looked for: there are none
    with pytest.raises(ValueError, match="one of qwen2_vl, qwen2_5_vl, got 'llava'"):
        TorchPolicy(str(tmp_path), learning_rate=0.1)


def sgd_policy(checkpoint: str) -> TorchPolicy:
    return TorchPolicy(
        checkpoint, learning_rate=0.1, optimizer="torch.optim.SGD", max_grad_norm=None
    )


def three_steps(policy: TorchPolicy, *args: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    metrics = [policy.train_step(*args) for _ in range(3)]
    return metrics[-1], {name: tensor.clone() for name, tensor in policy.named_weights()}


# Rank 0 has all images, rank 1 an empty slot.
RANKS = [[(0, 1), (2,)], [(3,), ()]]


def _rank_main(rank: int, checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    results = []
    for sign in (1, -1):  # the images, and others
        batch = image_batch()
        for i in (0, 1):
            batch = with_pixels(batch, i, sign * batch.sequence_columns["pixel_values"][i])
        shard, slots = shard_batch(batch, RANKS)[rank]
        assert any(len(grid) for grid in shard.sequence_columns["image_grid_thw"]) == (rank == 0)
        results.append(three_steps(sgd_policy(checkpoint), shard, slots, nll))
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_of_which_one_has_images_equal_one_process(
    checkpoint: str, tmp_path: Path
) -> None:
    start = {name: tensor.clone() for name, tensor in sgd_policy(checkpoint).named_weights()}
    expected = three_steps(sgd_policy(checkpoint), image_batch(), ALONE, nll)
    with pytest.MonkeyPatch.context() as patch:
        # The ranks import this module by the name pytest gave it: its path from the root.
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(_rank_main, (checkpoint, str(tmp_path)), nprocs=2)
    same, other = torch.load(tmp_path / "results.pt", weights_only=False)
    assert_equal_run(same, expected, start)
    tower = "model.visual.patch_embed.proj.weight"
    assert not torch.equal(same[1][tower], start[tower])
    with pytest.raises(AssertionError):
        assert_equal_run(other, expected, start)


def test_a_vision_tower_without_images_decays_as_on_many_ranks(checkpoint: str) -> None:
    """Its gradient is 0, not missing, as it is where another rank has images."""
    policy = TorchPolicy(
        checkpoint, learning_rate=0.1, optimizer_args={"weight_decay": 0.5}, max_grad_norm=None
    )
    start = {name: tensor.clone() for name, tensor in policy.named_weights()}
    policy.train_step(image_batch().select([2, 3]), [(0, 1)], nll)
    tower = "model.visual.patch_embed.proj.weight"
    torch.testing.assert_close(dict(policy.named_weights())[tower], start[tower] * 0.95)


def assert_equal_run(got: Any, expected: Any, start: Mapping[str, Tensor]) -> None:
    """Loss and norm to 1e-5, weights to 1e-5 of the way moved and three roundings."""
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        moved = (tensor - start[name]).abs().max()
        rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (got[1][name] - tensor).abs().max() <= 1e-5 * moved + rounding, name
