"""The losses' README on a model of transformers: the model's own loss comes out."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

README = Path(__file__).parents[2] / "libs" / "losses" / "README.md"
SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
LENGTHS = [7, 4, 6]


def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SMALL, **HEADS)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)),
    }


def run_readme(model: PreTrainedModel, completion_mask: torch.Tensor) -> dict[str, Any]:
    """What the README's first and second block leave, the second being the one on transformers."""
    generator = torch.Generator().manual_seed(1)
    names: dict[str, Any] = {
        "model": model.eval(),
        "value_head": nn.Linear(16, 1),
        "reward_head": nn.Linear(16, 1),
        "input_ids": torch.randint(50, (3, 7), generator=generator),
        "attention_mask": (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long(),
        "completion_mask": completion_mask,
    }
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "get_decoder" in blocks[1]
    for block in blocks[:2]:
        exec(compile(block, str(README), "exec"), names)
    return names


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_the_loss_is_the_models_own(name: str) -> None:
    model = models()[name]
    prompts = torch.tensor([0, 2, 3])  # the first has none: its first token is still not scored
    completion_mask = (torch.arange(7) >= prompts[:, None]).long()
    names = run_readme(model, completion_mask)
    attention_mask, ids = names["attention_mask"], names["input_ids"]
    labels = torch.where((completion_mask * attention_mask).bool(), ids, -100)
    expected = model(ids, attention_mask=attention_mask, labels=labels).loss
    torch.testing.assert_close(names["loss"], expected, rtol=1e-5, atol=1e-6)

    gradients = []
    for loss in (names["loss"], expected):
        model.zero_grad()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * scale + 1e-8)
    # Negative control: a mask that is one token off gives another loss.
    shifted = run_readme(model, completion_mask.roll(1, dims=1))
    assert (shifted["loss"] - expected).abs() > 1e-3


def test_a_row_alone_has_the_scores_and_values_of_the_padded_batch() -> None:
    names = run_readme(models()["llama"], torch.ones(3, 7, dtype=torch.long))
    for b, length in enumerate(LENGTHS):
        row = names["input_ids"][b : b + 1, :length]
        hidden = names["model"].get_decoder()(row).last_hidden_state[0]
        values = names["values"].view(3, 7)[b, 1:length]
        torch.testing.assert_close(values, names["value_head"](hidden[:-1]).squeeze(-1))
        torch.testing.assert_close(names["scores"][b], names["reward_head"](hidden[-1])[0])
