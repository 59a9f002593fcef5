"""GGUF to safetensors, on a tiny file written here: weights, tokenizer, template, errors."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from burnish_converters import read_weights
from burnish_converters.gguf import convert_gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEXT = "127 127 127 127 127 127 127 127 the sum of all the numbers in the text and 3 and 4 is 7"
GGML_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def build_model(vocab_size: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order of a rotary head's rows: first and second halves take turns."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token == "<eos>" else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if "q_proj" in name:
            tensor = interleaved(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = interleaved(tensor, config.num_key_value_heads)
        for theirs, ggml in GGML_NAMES.items():
            name = name.replace(theirs, ggml)
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=["tied", "untied"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, LlamaForCausalLM]:
    tokenizer = train_tokenizer()
    model = build_model(tokenizer.get_vocab_size(), tied=request.param == "tied")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model, tokenizer)
    return path, model


def test_weights_are_those_of_the_file(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    path, model = written
    convert_gguf(path, tmp_path, dtype=torch.float32)
    weights = dict(read_weights(tmp_path))
    expected = dict(model.named_parameters())  # a tied head once
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    token_ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(token_ids).logits, model(token_ids).logits)


def test_weights_are_bfloat16_unless_told_otherwise(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    convert_gguf(written[0], tmp_path)
    for name, tensor in read_weights(tmp_path):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, written[1].get_parameter(name).bfloat16())
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("split_digits", [False, True])
def test_tokenizer_and_template_survive(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path, split_digits: bool
) -> None:
    convert_gguf(written[0], tmp_path, split_digits=split_digits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert train_tokenizer().encode("127").tokens == ["127"]  # one token, unless split
    digits = tokenizer.encode("127", add_special_tokens=False)
    assert [tokenizer.decode(i) for i in digits] == (["1", "2", "7"] if split_digits else ["127"])
    for text in ("the sum of 3 and 4", "12 + 345 = 7,8", "ünïcode\n\n  spaces 10"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    messages = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "[user]3[assistant]4"
    assert tokenizer.eos_token == "<eos>"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"existing file, got .*nowhere\.gguf"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04zip", b"<html>"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf must begin with b'GGUF', got b'"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
