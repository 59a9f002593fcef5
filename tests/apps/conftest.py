"""A tiny model, a tiny recipe, and the folder of these helpers on the path."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # recipes name tiny_task, tests import processes

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CONTEXT = 256


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers, with a tokenizer of 300 tokens and a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    _tokenizer().save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "Say something and then say something else to the assistant about a user and a system."
    tokenizer.train_from_iterator([text, text.lower()] * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def recipe_content(tiny_model: Path) -> dict[str, Any]:
    """A whole, tiny recipe as plain data."""
    return {
        "name": "tiny",
        "seed": 0,
        "validate_every": 2,
        "model": {"source": str(tiny_model)},
        "data": {
            "source": {"source": "tiny_task:rows"},
            "train": {"num_problems": 10, "seed": 1},
            "validation": {"num_problems": 4, "seed": 2},
        },
        "environment": {"source": "tiny_task:even_tokens"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "engine": {"max_model_len": 128, "kv_cache_bytes": 16_000_000, "max_num_seqs": 16},
        "training": {"num_steps": 3, "learning_rate": 1e-3, "max_tokens": 512},
    }


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes plain data as ``<name>.yaml`` in ``tmp_path``."""

    def write(content: Any, name: str = "tiny") -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        return path

    return write


@pytest.fixture
def tiny_recipe(write_recipe: Callable[..., Path], recipe_content: dict[str, Any]) -> Path:
    """The tiny recipe as a file in ``tmp_path``."""
    return write_recipe(recipe_content)
