"""A merged weight against the sum written out."""

from __future__ import annotations

import pytest
import torch
from burnish_converters.lora import merge_lora


def test_a_merged_weight_worked_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    lora_a = torch.tensor([[1.0, 0.0, -1.0]])
    lora_b = torch.tensor([[2.0], [0.5]])
    merged = merge_lora(weight, lora_a, lora_b, scaling=0.5)
    assert merged.tolist() == [[2.0, 2.0, 2.0], [4.25, 5.0, 5.75]]
    assert weight[0, 0] == 1  # a new tensor


def test_a_transposed_weight_is_merged_in_its_own_form() -> None:
    weight, lora_a, lora_b = torch.randn(5, 3), torch.randn(2, 5), torch.randn(3, 2)
    merged = merge_lora(weight, lora_a, lora_b, scaling=3.0, transposed=True)
    torch.testing.assert_close(merged, merge_lora(weight.T, lora_a, lora_b, scaling=3.0).T)
    assert not torch.equal(merged, weight)


def test_the_sum_of_narrow_weights_is_rounded_once() -> None:
    """256 + 1 + 1 in bfloat16: 256 if each product were rounded on its own, 258 in float32."""
    weight = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    ones = torch.ones(1, 2, dtype=torch.bfloat16)
    merged = merge_lora(weight, ones.T, ones, scaling=1.0)
    assert merged.dtype == torch.bfloat16
    assert merged.item() == 258


def test_float64_stays_exact() -> None:
    weight = torch.ones(1, 1, dtype=torch.float64)
    tiny = torch.full((1, 1), 1e-6, dtype=torch.float64)
    merged = merge_lora(weight, tiny, tiny, scaling=1.0)
    assert merged.dtype == torch.float64
    assert merged.item() - 1 == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize(
    ("lora_a", "lora_b"), [((2, 4), (3, 2)), ((2, 3), (3, 2)), ((2, 3), (4, 3))]
)
def test_shapes_that_do_not_go_together_are_refused(
    lora_a: tuple[int, int], lora_b: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"must have adapters \[r, in\] and \[out, r\]"):
        merge_lora(torch.ones(4, 3), torch.ones(lora_a), torch.ones(lora_b), scaling=1.0)
