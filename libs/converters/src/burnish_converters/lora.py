"""Low-rank adapters as weights: merged into those they adapt."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_lora(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, *, scaling: float, transposed: bool = False
) -> Tensor:
    """W + scaling * B A (Hu et al. 2021, "LoRA", eq. 3), computed in float32 or wider.

    Args:
        weight: [out, in], or [in, out] if transposed.
        lora_a: [r, in].
        lora_b: [out, r].
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) for rank-stabilised adapters.
        transposed: the layer keeps its weight the other way round, as GPT-2's Conv1D does.

    Returns:
        In the shape and dtype of ``weight``; a new tensor.

    Raises:
        ValueError: for shapes that do not go together.
    """
    shape = weight.T.shape if transposed else weight.shape
    if (lora_b.shape[0], lora_a.shape[-1]) != tuple(shape) or lora_a.shape[0] != lora_b.shape[-1]:
        raise ValueError(
            f"a weight [out, in] must have adapters [r, in] and [out, r], got {tuple(shape)}, "
            f"{tuple(lora_a.shape)} and {tuple(lora_b.shape)}; load the adapter of this model"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta = scaling * (lora_b.to(wide) @ lora_a.to(wide))
    return (weight.to(wide) + (delta.T if transposed else delta)).to(weight.dtype)
