"""SFT of a tiny Qwen2-VL on pictures, with Qwen2-VL's own image processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from burnish_apps.sft import main as sft
from burnish_apps.shell import cli
from burnish_tracking import read_metrics
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
Start = Callable[..., int]


class Processor(Qwen2VLProcessor):
    """Qwen2-VL's, without its processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2_vl")
    tokenizer().save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 263,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        vision_start_token_id=259,
        vision_end_token_id=260,
        image_token_id=261,
        video_token_id=262,
        tie_word_embeddings=False,
    )
    Qwen2VLForConditionalGeneration(config).save_pretrained(path)
    return path


@pytest.fixture
def start(
    vision_model: Path,
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Start:
    """Runs ``burnish sft`` with overrides in this process; its exit code."""
    processor = Processor(Qwen2VLImageProcessorPil(), tokenizer(), None, chat_template=TEMPLATE)
    monkeypatch.setattr(sft, "load_processor", lambda _folder: processor)
    recipe = write_recipe(
        {
            "name": "tiny",
            "launcher": "local",
            "validate_every": 4,
            "model": {"source": str(vision_model)},
            "data": {
                "source": {"source": "tiny_shapes:rows"},
                "train": {"num_rows": 11, "seed": 0, "text_rows": 2},
                "validation": {"num_rows": 5, "seed": 1},
            },
            "training": {
                "num_epochs": 2,
                "batch_size": 4,
                "learning_rate": 1e-2,
                "max_length": 128,
                "max_tokens": 256,
            },
        }
    )

    def begin(*overrides: str, run_dir: str = "run") -> int:
        where = f"run_dir={tmp_path / run_dir}"
        return cli.main(["sft", "--recipe", str(recipe), where, *overrides])

    return begin


def steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {int(record["step"]): dict(record) for record in read_metrics(run_dir / "metrics.jsonl")}


def test_it_learns_what_is_on_pictures(start: Start, tmp_path: Path) -> None:
    assert start("training.num_epochs=16", "data.train.num_rows=24", "data.train.text_rows=0") == 0
    records = steps(tmp_path / "run")
    last = max(records)
    # Three colours and three numbers, equally likely: what can be known without a look.
    assert records[last]["validation/loss"] < 0.5 * records[0]["validation/loss"]
    assert records[last]["train/loss"] < 0.2 * records[1]["train/loss"]
    weights = load_file(
        tmp_path / "run" / "checkpoints" / f"step_{last:06d}" / "model" / "model.safetensors"
    )
    assert any("visual" in name for name in weights)


def test_packed_and_padded_are_one(start: Start, tmp_path: Path) -> None:
    sgd = ("training.optimizer=torch.optim.SGD", "training.optimizer_args={}")
    assert start(*sgd, run_dir="packed") == 0
    assert start(*sgd, "training.packing=padded", run_dir="padded") == 0
    packed, padded = steps(tmp_path / "packed"), steps(tmp_path / "padded")
    assert packed[1]["train/grad_norm"] > 0
    for step, record in padded.items():
        for name in ("train/loss", "train/grad_norm", "validation/loss"):
            if name in record:
                assert record[name] == pytest.approx(packed[step][name], rel=2e-5), (step, name)


def test_a_resumed_run_is_the_uninterrupted_one(start: Start, tmp_path: Path) -> None:
    settings = ("checkpoint_every=1", "keep_checkpoints=9")
    assert start(*settings) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000004"
    assert start(*settings, f"resume_from={checkpoint}", run_dir="again") == 0
    whole, again = steps(tmp_path / "run"), steps(tmp_path / "again")
    for step in (5, 6):
        assert again[step]["train/loss"] == whole[step]["train/loss"]
        assert again[step]["train/grad_norm"] == whole[step]["train/grad_norm"]


def test_a_picture_that_is_not_there_is_named_or_counted(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("data.train.broken=1") == 2
    assert "rows, row 1" in capsys.readouterr().err
    assert start("data.train.broken=1", "data.on_bad_row=skip") == 0
    first = steps(tmp_path / "run")[0]
    assert (first["data/train_rows"], first["data/train_skipped"]) == (10, 1)
