"""The README's Python runs as it stands, with a small model for the transformers' one."""

import ast
import contextlib
import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

README = Path(__file__).parents[1] / "README.md"


class HuggingFaceLike(nn.Module):
    """What the README asks of a model of transformers, which is not installed here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.GRU(8, 8, batch_first=True)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def get_decoder(self) -> Any:
        def decoder(input_ids: Tensor, *, attention_mask: Tensor) -> SimpleNamespace:
            assert attention_mask.shape == input_ids.shape
            return SimpleNamespace(last_hidden_state=self.layer(self.embedding(input_ids))[0])

        return decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


@pytest.fixture
def names() -> dict[str, Any]:
    """What a reader has already, and what the README's blocks make of it."""
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "model": HuggingFaceLike(),
        "value_head": nn.Linear(8, 1),
        "reward_head": nn.Linear(8, 1),
        "input_ids": torch.randint(11, (3, 6)),
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 0, 0, 1, 1, 1]]),
    }
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    return {**names, "printed": printed.getvalue().splitlines()}


def test_rewards_become_a_loss(names: dict[str, Any]) -> None:
    metrics, importance = names["printed"]
    assert float(importance) == pytest.approx(math.exp(-0.01), rel=1e-6)
    # Two rewards in a group, 1 and 0: half a deviation of sqrt(1/2) from their mean.
    r = 0.5**0.5
    assert names["advantages"].tolist() == pytest.approx([r, -r, -r, r])
    assert names["counts"] == {"tokens": 8, "sequences": 4}
    # Of the 8 trained tokens 3 and 2 have the advantage r, 1 and 2 have -r; the ratio is 1.
    assert ast.literal_eval(metrics)["loss/policy"] == pytest.approx(-2 * r / 8)


def test_the_loss_of_a_padded_batch_is_cross_entropy_of_the_next_token(
    names: dict[str, Any],
) -> None:
    model, ids = names["model"], names["input_ids"]
    logits = model.lm_head(names["hidden"])
    # Trained: columns 2-5 of row 0, 1-3 of row 1, 3-4 of row 2.
    trained = [(0, 2), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]

    def mean_nll(shift: int) -> Tensor:
        nlls = [-logits[b, t - shift].log_softmax(-1)[ids[b, t]] for b, t in trained]
        return torch.stack(nlls).mean()

    torch.testing.assert_close(names["loss"], mean_nll(1))
    assert (names["loss"] - mean_nll(0)).abs() > 1e-3  # unshifted: what a copier is taught by


def test_heads_see_the_state_before_a_token_and_the_one_after_the_last(
    names: dict[str, Any],
) -> None:
    hidden = names["hidden"]
    values = names["value_head"](hidden).squeeze(-1)
    torch.testing.assert_close(names["values"].view(3, 6)[:, 1:], values[:, :-1])
    last = torch.stack([hidden[0, 5], hidden[1, 3], hidden[2, 4]])
    torch.testing.assert_close(names["scores"], names["reward_head"](last).squeeze(-1))
