"""Hugging Face checkpoints as named weights, read and written one shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

# What belongs to a model beside its weights; copied from the checkpoint it came from.
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
INDEX = "model.safetensors.index.json"


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs of a checkpoint folder, mapped from disk.

    They are those of the files that its index names, else of ``model.safetensors``, else of all
    ``*.safetensors``: some checkpoints hold the same weights a second time under other names.

    Raises:
        ValueError: if there are none, or a file is missing, truncated or not safetensors, or the
            index names no files; it is named.
    """
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"{path} must be a whole safetensors file, got: {error}; fetch or write it again"
            ) from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        files = [folder / name for name in _files_of_index(folder / INDEX)]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"a checkpoint folder must hold *.safetensors files, got none in {folder}; convert it"
        )
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} must exist, {INDEX} beside it names it; fetch it again")
    return files


def _files_of_index(path: Path) -> list[str]:
    try:
        index = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{path} must be JSON, got: {error}; fetch it again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path} must hold a weight_map of tensor names to files, got "
            f"{sorted(index) if isinstance(index, dict) else type(index).__name__}; fetch it again"
        )
    return sorted({*weight_map.values()})


def write_checkpoint(
    folder: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write named weights as a folder that ``from_pretrained`` reads.

    Args:
        folder: is made; existing weight files in it are an error.
        weights: (Hugging Face name, tensor) pairs; consumed one by one, at most one shard is held.
        source: checkpoint whose config, tokenizer and chat template are copied (their dtype entry
            is kept: loaders say which dtype they want).
        max_shard_bytes: bytes per safetensors file.

    Raises:
        ValueError: if ``source`` holds no config.json, there are no weights, or two of one name.
        FileExistsError: if ``folder`` already holds weights.
    """
    if not (source / "config.json").is_file():
        raise ValueError(f"source must be a checkpoint folder with config.json, got {source}")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise FileExistsError(f"{folder} already holds weights; give a new folder")
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)

    shards: list[list[str]] = []
    for shard in _shards(weights, max_shard_bytes):
        save_file(shard, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
    if not shards:
        raise ValueError("a checkpoint must hold at least one tensor, got none")
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))


def _shards(
    weights: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size_bytes = 0
    memory: set[int] = set()
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise ValueError(
                f"every tensor must have a name of its own, got {name!r} twice; rename or drop one"
            )
        seen.add(name)
        if shard and size_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size_bytes, memory = {}, 0, set()
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in memory:  # save_file refuses shared memory
            plain = plain.clone()
        memory.add(plain.untyped_storage().data_ptr())
        shard[name] = plain
        size_bytes += tensor.nbytes
    if shard:
        yield shard
