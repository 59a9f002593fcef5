"""GGUF (llama.cpp's single-file form) to a Hugging Face safetensors checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def convert_gguf(
    gguf_file: Path,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    split_digits: bool = False,
) -> None:
    """Dequantise a GGUF file into a folder that ``from_pretrained`` reads.

    Args:
        gguf_file: the file; its architecture must be one that transformers reads from GGUF.
        folder: is made.
        dtype: of the written weights.
        split_digits: restore a pre-tokenizer that splits numbers into digits. GGUF names its
            pre-tokenizer (``smollm``, for one) and transformers' reader drops that part, so that
            "127" would become one token where the model was trained on three.

    Raises:
        ValueError: if the file is missing or no GGUF.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not gguf_file.is_file():
        raise ValueError(f"gguf_file must be an existing file, got {gguf_file}")
    with gguf_file.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{gguf_file} must begin with b'GGUF', got {magic!r}; fetch it again")

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    # The weights are plain now; with this entry save_pretrained refuses to write them.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if split_digits:
        _split_digits(folder / "tokenizer.json")


def _split_digits(path: Path) -> None:
    content = json.loads(path.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [digits, content["pre_tokenizer"]],
    }
    path.write_text(json.dumps(content, ensure_ascii=False))
