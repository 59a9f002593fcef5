"""The README's Python runs as it stands, on a tiny checkpoint."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def test_examples_run(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order, as one program; the last as the one rank that torchrun would start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace("path/to/checkpoint", checkpoint), "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    loss, _ = map(float, lines[0].split())
    assert loss == pytest.approx(4.6, abs=1)  # log(97), untrained
    assert float(lines[1]) < loss  # after one step
    assert float(lines[-2]) == pytest.approx(1e-3 / 11)  # the first step of warm-up
    assert float(lines[-1]) == pytest.approx(loss, rel=1e-5)
    assert len(names["merged"]) == 21
    assert not any("lora" in name for name in names["merged"])
    assert not torch.distributed.is_initialized()
