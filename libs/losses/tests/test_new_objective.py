"""The page of the documentation on writing an objective: its code runs, and does what it says."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from burnish_losses import combine_metrics, count, finalize, total
from torch import Tensor

PAGE = Path(__file__).parents[3] / "docs" / "libraries" / "losses-new-objective.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's code defines, after it has run from top to bottom."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)  # the page draws logits
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    names["source"] = "\n".join(blocks)
    return names


def some_batch() -> tuple[Tensor, dict[str, Tensor]]:
    """Two sequences of two and three tokens, the first of each untrained and NaN throughout."""
    nan = math.nan
    logprobs = torch.tensor([nan, -1.0, nan, -2.0, -1.0], dtype=torch.float64)
    return logprobs.requires_grad_(), {
        "token_mask": torch.tensor([False, True, False, True, True]),
        "answer_mask": torch.tensor([False, True, False, False, True]),
        "advantages": torch.tensor([nan, 2.0, nan, -1.0, -1.0]),
        # Ratios 2, 1/2 and 1.
        "old_logprobs": torch.tensor([nan, -1 - math.log(2), nan, -2 + math.log(2), -1]).double(),
        # x = log reference - log policy: ln 2, 0 and -ln 2.
        "reference_logprobs": torch.tensor([nan, -1 + math.log(2), nan, -2, -1 - math.log(2)]),
        "entropies": torch.tensor([nan, 1.0, nan, 2.0, 3.0]),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    }


def cut(batch: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    part = {name: values[tokens] for name, values in batch.items()}
    length = len(part["token_mask"])
    return {**part, "cu_seqlens": torch.tensor([0, length])}


def test_the_objective_takes_fewer_than_20_lines(page: dict[str, Any]) -> None:
    (source,) = re.findall(r"(?ms)^def anchored_loss.*?\n(?=\n*\S|\Z)", page["source"])
    lines = [line for line in source.splitlines() if line.strip()]
    assert 5 < len(lines) < 20
    assert lines[-1].strip().startswith("return LossOutput")


def test_the_page_runs(page: dict[str, Any]) -> None:
    assert page["counts"] == {"tokens": 6, "sequences": 3, "answer_tokens": 3}
    assert set(finalize(combine_metrics(page["metrics"]), page["counts"])) == {"policy/kl_answer"}
    gradients = page["logits"].grad[page["token_mask"]]
    assert gradients.isfinite().all()
    assert (gradients != 0).any(-1).all()


def test_by_hand(page: dict[str, Any]) -> None:
    logprobs, batch = some_batch()
    output = page["anchored_loss"](logprobs, batch, kl_weight=0.5, entropy_weight=0.25)
    # Surrogates: -min(2, 1.28) 2, -min(-1/2, -0.8) and 1; entropies 6 in all;
    # KL 2 (2 - ln 2 - 1) and 1 (1/2 + ln 2 - 1).
    policy, entropy = (-2.56 + 0.8 + 1) / 3, -6 / 3
    kl = (2 * (1 - math.log(2)) + math.log(2) - 0.5) / 2
    counts = count(batch)
    assert total(output.terms, counts).item() == pytest.approx(policy + 0.25 * entropy + 0.5 * kl)
    assert finalize(output.metrics, counts) == {"policy/kl_answer": pytest.approx(kl)}


def test_micro_batches_give_what_the_whole_gives(page: dict[str, Any]) -> None:
    loss_fn = page["anchored_loss"]
    logprobs, batch = some_batch()
    counts = count(batch)
    whole = loss_fn(logprobs, batch)
    (expected,) = torch.autograd.grad(total(whole.terms, counts), logprobs)
    assert expected.isfinite().all()
    assert expected.tolist()[0] == expected.tolist()[2] == 0
    slices = (slice(0, 2), slice(2, 5))
    parts = [loss_fn(logprobs[tokens], cut(batch, tokens)) for tokens in slices]
    loss = sum(total(part.terms, counts) for part in parts)
    torch.testing.assert_close(loss, total(whole.terms, counts))
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], expected)
    combined = finalize(combine_metrics([part.metrics for part in parts]), counts)
    assert combined == pytest.approx(finalize(whole.metrics, counts))
    # A mean of means differs, so the lines above say something.
    means = [
        total(part.terms, count(cut(batch, tokens))) / 2
        for part, tokens in zip(parts, slices, strict=True)
    ]
    assert abs(sum(means) - loss) > 0.01


def test_no_trained_token_gives_zero(page: dict[str, Any]) -> None:
    logprobs, batch = some_batch()
    nothing = torch.zeros_like(batch["token_mask"])
    batch |= {"token_mask": nothing, "answer_mask": nothing}
    loss = total(page["anchored_loss"](logprobs, batch).terms, count(batch))
    loss.backward()
    assert loss.item() == 0
    assert (logprobs.grad == 0).all()
