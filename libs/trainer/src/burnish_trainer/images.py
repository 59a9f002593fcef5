"""Pixels beside token columns: what a vision-language model of the Qwen2-VL family is given.

A batch carries images as sequence columns of dtype object, one array per sequence (none: an array
of no rows), as `burnish_data.encode_images` makes them: ``pixel_values`` float32 [patches, D] and
``image_grid_thw`` int64 [images, 3].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch
from burnish_packing.torch import PackedBatch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

IMAGE_COLUMNS = ("pixel_values", "image_grid_thw")
POSITIONS = "_rope_positions"  # column [T, 3] of a laid-out batch: time, height, width
SUPPORTED = ("qwen2_vl", "qwen2_5_vl")


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch, in the order in which their tokens are laid out."""

    pixel_values: Tensor  # float32 [patches, D]
    grid_thw: Tensor  # int64 [images, 3], patches by time, height and width

    def model_kwargs(self, batch: PackedBatch) -> dict[str, Any]:
        """Keyword arguments of the decoder; positions [3, B, L]."""
        return {
            "position_ids": batch.columns[POSITIONS].permute(2, 0, 1),
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.grid_thw,
        }

    def to(self, device: torch.device) -> Images:
        return Images(self.pixel_values.to(device), self.grid_thw.to(device))


def is_vision_model(model: PreTrainedModel) -> bool:
    """Whether the model takes images."""
    return getattr(model.config, "vision_config", None) is not None


def check_vision(config: PreTrainedConfig) -> None:
    """ValueError for a vision-language model of a family whose inputs are not known here."""
    if getattr(config, "vision_config", None) is not None and config.model_type not in SUPPORTED:
        raise ValueError(
            f"a vision-language model must be one of {', '.join(SUPPORTED)}, got "
            f"{config.model_type!r}; use one of these, or the family's text model"
        )


def has_images(batch: RaggedBatch) -> bool:
    """Whether the batch carries the columns of images, and any image.

    Raises:
        ValueError: if it carries one column without the other.
    """
    given = [name for name in IMAGE_COLUMNS if name in batch.sequence_columns]
    if len(given) == 1:
        raise ValueError(
            f"images must come as the sequence columns {' and '.join(IMAGE_COLUMNS)}, got "
            f"{given[0]} alone; pass both, one array per sequence"
        )
    return bool(given) and any(len(grid) for grid in batch.sequence_columns["image_grid_thw"])


def rope_positions(batch: RaggedBatch, model: PreTrainedModel) -> Tensor:
    """Positions in time, height and width of every token, int64 [T, 3], by the model's own rule."""
    decoder: Any = model.base_model
    rows = []
    grids: Any = batch.sequence_columns["image_grid_thw"]
    for token_ids, grid in zip(batch.sequences("token_ids"), grids, strict=True):
        ids = torch.tensor(token_ids, dtype=torch.int64)[None]
        if len(grid):
            is_image = (ids == model.config.image_token_id).int()
            positions, _ = decoder.get_rope_index(ids, is_image, torch.tensor(np.array(grid)))
            rows.append(positions[:, 0].T)
        else:
            rows.append(torch.arange(ids.shape[1])[:, None].expand(-1, 3))
    return torch.cat(rows)


def check_images(batch: RaggedBatch, model: PreTrainedModel) -> None:
    """Make sure that every sequence has the pixels of its image tokens, before anything reads them.

    Raises:
        ValueError: if a sequence's image tokens are not those of its images, one is trained, or
            the model takes no images.
    """
    if not has_images(batch) and not is_vision_model(model):
        return
    if not is_vision_model(model):
        raise ValueError(
            f"images must go to a vision-language model, got them with a "
            f"{model.config.model_type!r} model; drop the columns {' and '.join(IMAGE_COLUMNS)}"
        )
    merge: int = model.config.vision_config.spatial_merge_size
    for i, token_ids in enumerate(batch.sequences("token_ids")):
        grid, pixels = _images_of(batch, i)
        places = np.flatnonzero(token_ids == model.config.image_token_id)
        patches = grid.prod(axis=1)
        tokens = patches // merge**2
        if len(places) != tokens.sum() or len(pixels) != patches.sum():
            raise ValueError(
                f"the images of a sequence must fill its image tokens, got {int(tokens.sum())} "
                f"tokens and {int(patches.sum())} patches by image_grid_thw for {len(places)} "
                f"image tokens and {len(pixels)} patches in sequence {i}; encode it with the "
                "model's own processor, and do not truncate within an image"
            )
        if batch.token_columns["token_mask"][batch.offsets[i] + places].any():
            raise ValueError(
                f"image tokens must not be trained, got some with token_mask True in sequence {i}; "
                "mask them"
            )


def collect_images(batch: RaggedBatch, laid_out: PackedBatch, model: PreTrainedModel) -> Images:
    """The images of a micro-batch in the order of its layout; one in a shared prefix comes once.

    Args:
        batch: that `check_images` has passed, with an image at least.
        laid_out: its layout.
        model: a vision-language model.

    Raises:
        ValueError: if sequences differ in the images of the prefix that they share.
    """
    merge: int = model.config.vision_config.spatial_merge_size
    slots = laid_out.slots.cpu().numpy()
    found: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
    for i, token_ids in enumerate(batch.sequences("token_ids")):
        grid, pixels = _images_of(batch, i)
        places = batch.offsets[i] + np.flatnonzero(token_ids == model.config.image_token_id)
        patches = grid.prod(axis=1)
        tokens = patches // merge**2
        first_patches = np.cumsum(patches) - patches
        for place, first, count, row in zip(
            places[np.cumsum(tokens) - tokens], first_patches, patches, grid, strict=True
        ):
            slot, image = int(slots[place]), pixels[first : first + count]
            if slot in found and not np.array_equal(found[slot][0], image):
                raise ValueError(
                    "sequences behind a shared prefix must have the same images in it, got others "
                    f"in sequence {i}; give sequences with other images another prefix id"
                )
            found[slot] = (image, row)
    ordered = [found[slot] for slot in sorted(found)]
    return Images(
        torch.from_numpy(np.concatenate([p for p, _ in ordered])).float(),
        torch.from_numpy(np.stack([row for _, row in ordered])).long(),
    )


def _images_of(batch: RaggedBatch, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Grids [images, 3] and patches [patches, D] of a sequence; none without the columns."""
    if not has_images(batch):
        return np.zeros((0, 3), dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
    grid = np.asarray(batch.sequence_columns["image_grid_thw"][i]).reshape(-1, 3)
    return grid, np.asarray(batch.sequence_columns["pixel_values"][i])


def dummy_image_sum(model: PreTrainedModel) -> Tensor:
    """A scalar that depends on every weight of the vision tower: its outputs for a black image."""
    config = model.config.vision_config
    merge = config.spatial_merge_size
    size = config.in_channels * config.temporal_patch_size * config.patch_size**2
    device = next(model.parameters()).device
    base: Any = model.base_model
    output = base.get_image_features(
        torch.zeros(merge * merge, size, device=device),
        torch.tensor([[1, merge, merge]], device=device),
    )
    features = output.pooler_output
    return torch.cat(list(features)).sum() if isinstance(features, tuple | list) else features.sum()
