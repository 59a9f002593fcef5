"""Checkpoints that are whole or not there.

A checkpoint is a folder::

    step_000010/
      model/        Hugging Face form: from_pretrained reads it, tokenizer included; adapters merged
      adapter/      peft's form, if adapters are trained: what is resumed from
      optimizer/    torch.distributed.checkpoint, resharded on load if the ranks differ
      state.json    what the caller saved beside it; written last

It is written under another name, flushed to disk, and renamed: a folder without ``.incomplete``
in its name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from burnish_converters.safetensors_io import read_weights, write_checkpoint
from burnish_distributed.collectives import barrier, rank
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from burnish_trainer.heads import SCALAR_HEAD, write_head_config
from burnish_trainer.lora import (
    adapter_layers,
    is_adapter,
    merged_weights,
    read_adapter,
    save_adapter,
)
from burnish_trainer.scoring import ScoringModel

SCHEMA_VERSION = 1
INCOMPLETE = ".incomplete"


def save_checkpoint(
    directory: Path,
    *,
    source: Path,
    model: ScoringModel,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
) -> None:
    """Write a checkpoint; all ranks call it, rank 0 writes what is shared.

    Args:
        directory: the folder that is to appear.
        source: the checkpoint the model came from; its config and tokenizer are copied.
        model: the model that ``optimizers`` belong to.
        optimizers: every rank writes its own part.
        state: JSON values.
    """
    partial = directory.with_name(directory.name + INCOMPLETE)
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    weights = merged_weights(model.model)  # gathering is a collective: all ranks iterate
    if rank() == 0:
        write_checkpoint(partial / "model", weights, source=source)
        write_head_config(model.model, partial / "model", model.head)
    else:
        deque(weights, maxlen=0)
    save_adapter(model.model, partial / "adapter")
    if optimizers:
        with _single_process_is_meant():
            dcp.save(
                {"optimizer": get_optimizer_state_dict(model, list(optimizers))},
                checkpoint_id=partial / "optimizer",
            )
    barrier()
    if rank() == 0:
        content = {**state, "schema_version": SCHEMA_VERSION}
        (partial / "state.json").write_text(json.dumps(content, indent=2))
        _flush(partial)
        if directory.exists():  # out of the way first, deleted only once the new one is in place
            replaced = directory.with_name(directory.name + ".replaced" + INCOMPLETE)
            shutil.rmtree(replaced, ignore_errors=True)
            directory.rename(replaced)
            partial.rename(directory)
            shutil.rmtree(replaced)
        else:
            partial.rename(directory)
        _flush(directory.parent, recurse=False)
    barrier()


def load_checkpoint(
    directory: Path, *, model: ScoringModel, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Take weights and optimizer state from ``directory``; returns the saved ``state``.

    Raises:
        ValueError: if there is no whole checkpoint there, or one of a newer schema.
    """
    state = read_state(directory)
    has_adapter = bool(adapter_layers(model))
    folder = directory / ("adapter" if has_adapter else "model")
    read = read_adapter if has_adapter else read_weights
    weights: dict[str, Any] = {f"model.{name}": tensor for name, tensor in read(folder)}
    expected = {
        name
        for name, _ in model.named_parameters()
        if not has_adapter or is_adapter(name) or name.startswith(f"model.{SCALAR_HEAD}")
    }
    if expected ^ set(weights):
        raise ValueError(
            f"a checkpoint must hold the model's parameters, but "
            f"{sorted(expected ^ set(weights))[:5]} differ in {folder}; resume with the model and "
            "adapters it was made with"
        )
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    if not optimizers:  # the policy only scores
        return state
    content = {"optimizer": get_optimizer_state_dict(model, list(optimizers))}
    with _single_process_is_meant():
        dcp.load(content, checkpoint_id=directory / "optimizer")
    set_optimizer_state_dict(model, list(optimizers), content["optimizer"])
    return state


def read_state(directory: Path) -> dict[str, Any]:
    """The ``state`` of a checkpoint, checked.

    Raises:
        ValueError: if there is no whole checkpoint there, or one of a newer schema.
    """
    path = directory / "state.json"
    if INCOMPLETE in directory.name or not path.is_file():
        raise ValueError(
            f"a checkpoint folder must hold state.json, got {directory} without; "
            "name a step_* folder that was finished"
        )
    state: dict[str, Any] = json.loads(path.read_text())
    if state.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"checkpoints of schema {SCHEMA_VERSION} can be read, got "
            f"{state.get('schema_version')} in {directory}; use the version that wrote it"
        )
    return state


def latest_checkpoint(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step in ``directory``, or None."""
    return max(_whole_checkpoints(directory), key=_step, default=None)


def delete_old_checkpoints(directory: Path, keep: int) -> None:
    """Delete all whole checkpoints in ``directory`` but the ``keep`` of the highest steps."""
    for path in sorted(_whole_checkpoints(directory), key=_step)[: -max(keep, 1)]:
        # Renamed first: a deletion that is cut short leaves nothing that looks whole.
        _remove(path)


def _remove(path: Path) -> None:
    doomed = path.with_name(path.name + INCOMPLETE)
    shutil.rmtree(doomed, ignore_errors=True)  # what an interrupted run may have left
    shutil.rmtree(path.rename(doomed))


def _whole_checkpoints(directory: Path) -> list[Path]:
    return [
        path
        for path in directory.glob("step_*")
        if path.name.removeprefix("step_").isdecimal() and (path / "state.json").is_file()
    ]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without a process group torch warns that it assumes a single process: it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _flush(path: Path, *, recurse: bool = True) -> None:
    """fsync a folder, and what is in it."""
    paths = [*path.rglob("*"), path] if recurse else [path]
    for entry in paths:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
