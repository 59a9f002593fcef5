"""The support sets of top-k and top-p are those that vLLM's sampler draws from."""

import pytest
import torch
from burnish_losses.support import support_threshold


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, at its import
@pytest.mark.parametrize(("top_k", "top_p"), [(5, None), (None, 0.8), (9, 0.7)])
def test_the_support_is_vllms(top_k: int | None, top_p: float | None) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    theirs = topk_topp_sampler.apply_top_k_top_p_pytorch(
        logits.clone(),
        None if top_k is None else torch.full((20,), top_k),
        None if top_p is None else torch.full((20,), top_p),
    )
    mine = logits >= support_threshold(logits, top_k, top_p)
    assert (mine == (theirs > -torch.inf)).all()
    # Negative control: one more or one fewer token is another set.
    if top_k is not None:
        assert (mine != (logits >= support_threshold(logits, top_k + 1, top_p))).any()
