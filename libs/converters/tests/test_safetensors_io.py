"""Checkpoints in and out: the same bits, the same tokenizer, one shard at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from burnish_converters import read_weights, write_checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}custom"


def write_source(folder: Path, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_source(folder, tied=request.param == "tied")
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_source(folder, tied=False)
    return folder


@pytest.mark.parametrize("max_shard_bytes", [4 << 30, 10_000, 1])
def test_what_is_written_is_what_from_pretrained_reads(
    source: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    doubled = {name: tensor * 2 for name, tensor in read_weights(source)}
    folder = tmp_path / "deep" / "target"
    write_checkpoint(folder, doubled.items(), source=source, max_shard_bytes=max_shard_bytes)

    back = dict(read_weights(folder))
    assert back.keys() == doubled.keys()
    assert all(torch.equal(back[name], doubled[name]) for name in doubled)

    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == doubled.keys()  # tied: lm_head is neither written nor missing
    assert all(torch.equal(loaded[name], doubled[name]) for name in doubled)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == model.config.tie_word_embeddings


def test_one_shard_has_the_plain_name_and_no_index(untied: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, read_weights(untied), source=untied)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_shards_obey_their_size_and_the_index_names_each_tensor(
    untied: Path, tmp_path: Path
) -> None:
    weights = dict(read_weights(untied))
    write_checkpoint(tmp_path, weights.items(), source=untied, max_shard_bytes=13_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    files = sorted({*index["weight_map"].values()})
    assert files == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert files == sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert 1 < len(files) < len(weights)
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as tensors:
            names = list(tensors.keys())
        assert {*names} == {n for n, f in index["weight_map"].items() if f == file}
        size_bytes = sum(weights[name].nbytes for name in names)
        assert size_bytes <= 13_000 or len(names) == 1


def test_the_custom_chat_template_and_the_tokenizer_survive(source: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, read_weights(source), source=source)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "a b"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>a bcustom"
    assert tokenizer.encode("b a") == [1, 0]


def test_a_chat_template_inside_the_tokenizers_settings_survives(
    untied: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in untied.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "chat_template.jinja").unlink()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    text = json.dumps(settings | {"chat_template": "older form"})
    (source / "tokenizer_config.json").write_text(text)
    write_checkpoint(tmp_path / "target", read_weights(source), source=source)
    assert AutoTokenizer.from_pretrained(tmp_path / "target").chat_template == "older form"


def test_tensors_of_any_layout_and_dtype_survive(untied: Path, tmp_path: Path) -> None:
    storage = torch.arange(24.0).reshape(4, 6)
    weights = {
        "transposed": storage.t(),
        "every second": torch.arange(10)[::2],
        "expanded": torch.tensor([2.5]).expand(3),
        "part": storage[1:3],
        "same storage": storage,
        "bfloat16": torch.tensor([1.0, torch.nan, -0.0]).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    write_checkpoint(tmp_path, weights.items(), source=untied)
    back = dict(read_weights(tmp_path))
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name].nan_to_num(), tensor.detach().nan_to_num()), name


def test_two_names_for_one_tensor_are_written_as_two(untied: Path, tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    write_checkpoint(tmp_path, [("a", shared), ("b", shared)], source=untied)
    back = dict(read_weights(tmp_path))
    assert torch.equal(back["a"], shared)
    assert torch.equal(back["b"], shared)


def test_at_most_one_shard_is_held(untied: Path, tmp_path: Path) -> None:
    written: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            written.append(len(list(tmp_path.glob("*.safetensors"))))
            yield f"w{i}", torch.zeros(10)

    write_checkpoint(tmp_path, weights(), source=untied, max_shard_bytes=40)
    assert written == [0, 0, 1, 2]


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -8])
def test_a_truncated_file_is_named(untied: Path, tmp_path: Path, keep_bytes: int) -> None:
    write_checkpoint(tmp_path, read_weights(untied), source=untied, max_shard_bytes=13_000)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ValueError, match=f"{path.name} must be a whole safetensors file, got"):
        list(read_weights(tmp_path))


def test_a_shard_that_is_missing_is_named(untied: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, read_weights(untied), source=untied, max_shard_bytes=13_000)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(ValueError, match=path.name):
        list(read_weights(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold \*\.safetensors files, got none"):
        list(read_weights(tmp_path))


def test_existing_weights_are_not_overwritten(untied: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, [("w", torch.ones(1))], source=untied)
    with pytest.raises(FileExistsError, match="already holds weights"):
        write_checkpoint(tmp_path, [("w", torch.zeros(1))], source=untied)
    assert dict(read_weights(tmp_path))["w"].tolist() == [1]


def test_a_source_without_config_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint folder with config\.json"):
        write_checkpoint(tmp_path / "new", [("w", torch.ones(1))], source=tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_without_weights_is_refused(untied: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one tensor, got none"):
        write_checkpoint(tmp_path, [], source=untied)


@pytest.mark.parametrize("max_shard_bytes", [4 << 30, 13_000], ids=["one file", "index"])
def test_a_second_copy_under_other_names_is_left_alone(
    untied: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    weights = dict(read_weights(untied))
    write_checkpoint(tmp_path, weights.items(), source=untied, max_shard_bytes=max_shard_bytes)
    save_file({"other.name": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert dict(read_weights(tmp_path)).keys() == weights.keys()


@pytest.mark.parametrize("max_shard_bytes", [4 << 30, 1], ids=["one shard", "two shards"])
def test_a_name_given_twice_is_refused(untied: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    weights = [("w", torch.ones(1)), ("w", torch.zeros(1))]
    with pytest.raises(ValueError, match="a name of its own, got 'w' twice"):
        write_checkpoint(tmp_path, weights, source=untied, max_shard_bytes=max_shard_bytes)


@pytest.mark.parametrize("text", ['{"metadata": {}}', "[]", '{"weight_map": {}}', "{", ""])
def test_an_index_that_names_no_files_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json must "):
        list(read_weights(tmp_path))
