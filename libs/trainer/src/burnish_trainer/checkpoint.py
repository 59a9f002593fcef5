"""Checkpoints that are whole or not there.

A checkpoint is a folder::

    step_000010/
      model/        Hugging Face form: from_pretrained reads it, tokenizer included; adapters merged
      adapter/      peft's form, if adapters are trained: what is resumed from
      optimizer/    torch.distributed.checkpoint, resharded on load if the ranks differ; none if
                    the optimizer has no state (before the first step)
      policy.json   what the policy was built with, as far as it must be the same to resume, and
                    whether there is an optimizer/
      state.json    what the caller saved beside it; written last

It is written under another name, flushed to disk, and renamed: a folder without ``.incomplete``
in its name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from burnish_converters.safetensors_io import read_weights, write_checkpoint
from burnish_distributed.collectives import barrier, rank
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from burnish_trainer.checks import on_all_ranks
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
    identity: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Write a checkpoint; all ranks call it, rank 0 writes what is shared. Nothing is changed.

    Args:
        directory: the folder that is to appear.
        source: the checkpoint the model came from; its config and tokenizer are copied.
        model: the model that ``optimizers`` belong to.
        optimizers: every rank writes its own part.
        identity: JSON values that a policy must have in common with this one to load it.
        state: JSON values.

    Raises:
        ValueError: if ``state`` holds what is no JSON; before anything is written.
    """
    content = _as_json({**state, "schema_version": SCHEMA_VERSION})
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
    save_adapter(model.model, partial / "adapter", source=source)
    # Without a state torch would make one by a step of its own, and the next real one would differ.
    has_state = any(optimizer.state for optimizer in optimizers)
    if has_state:
        with _single_process_is_meant():
            dcp.save(
                {"optimizer": get_optimizer_state_dict(model, list(optimizers))},
                checkpoint_id=partial / "optimizer",
            )
    barrier()
    if rank() == 0:
        built = {**identity, "optimizer_state": has_state}
        (partial / "policy.json").write_text(json.dumps(built, indent=2))
        (partial / "state.json").write_text(content)
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
    directory: Path,
    *,
    model: ScoringModel,
    optimizers: Sequence[torch.optim.Optimizer],
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Take weights and optimizer state from ``directory``; returns the saved ``state``.

    Args:
        directory: a checkpoint.
        model: takes the weights.
        optimizers: take their state, if any.
        identity: of this policy; what both have must be equal.

    Raises:
        ValueError: if there is no whole checkpoint there, one of another schema, or one that is not
            of this policy; on every rank, and nothing has changed.
    """
    with on_all_ranks():
        state = read_state(directory)
        check_identity(directory, identity)
        weights = _read_weights(directory, model)
    content = _read_optimizers(directory, model, optimizers)
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    if content is not None:
        set_optimizer_state_dict(model, list(optimizers), content)
    return state


def check_identity(directory: Path, identity: Mapping[str, Any]) -> None:
    """Compare what a checkpoint's policy was built with with this one.

    Raises:
        ValueError: naming all that differs.
    """
    path = directory / "policy.json"
    if not path.is_file():  # of burnish-trainer 0.1
        return
    saved = _read_json(path)
    differ = [name for name in identity if name in saved and saved[name] != identity[name]]
    if differ:
        told = "; ".join(f"{name}: {saved[name]} there, {identity[name]} here" for name in differ)
        raise ValueError(
            f"a policy must be built as the one that wrote {directory} to go on from it, but they "
            f"differ in {told}; build it the same, or start a new one from {directory / 'model'}"
        )
    if saved.get("optimizer_state") and not (directory / "optimizer").is_dir():
        raise ValueError(f"{directory} must hold the folder optimizer; use another checkpoint")


def read_state(directory: Path) -> dict[str, Any]:
    """The ``state`` of a checkpoint, checked.

    Raises:
        ValueError: if there is no whole checkpoint there, or one of another schema.
    """
    path = directory / "state.json"
    if INCOMPLETE in directory.name or not path.is_file():
        raise ValueError(
            f"a checkpoint folder must hold state.json, got {directory} without; "
            "name a step_* folder that was finished"
        )
    state = _read_json(path)
    if state.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"checkpoints of schema {SCHEMA_VERSION} can be read, got "
            f"{state.get('schema_version')} in {directory}; use the version that wrote it"
        )
    return state


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        content = error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {content!r}; use another checkpoint")
    return content


def _as_json(state: Mapping[str, Any]) -> str:
    try:
        return json.dumps(state, indent=2)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"state must be JSON values, got {error}; make arrays lists, and NumPy numbers "
            "int or float"
        ) from error


def _read_weights(directory: Path, model: ScoringModel) -> dict[str, Any]:
    """Weights of a checkpoint under the model's names, and no others."""
    has_adapter = bool(adapter_layers(model))
    folder = directory / ("adapter" if has_adapter else "model")
    read = read_adapter if has_adapter else read_weights
    weights: dict[str, Any] = {f"model.{name}": tensor for name, tensor in read(folder)}
    expected = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if not has_adapter or is_adapter(name) or name.startswith(f"model.{SCALAR_HEAD}")
    }
    got = {name: tensor.shape for name, tensor in weights.items()}
    differ = sorted(name for name in expected | got if expected.get(name) != got.get(name))
    if differ:
        raise ValueError(
            f"a checkpoint must hold the model's parameters, but {differ[:5]} differ in {folder}; "
            "resume with the model and adapters it was made with"
        )
    return weights


def _read_optimizers(
    directory: Path, model: ScoringModel, optimizers: Sequence[torch.optim.Optimizer]
) -> Any:
    """The optimizers' state as `set_optimizer_state_dict` takes it; None if there is none to take.

    They are without a state afterwards, as before their first step, but for a state that is taken.
    """
    folder = directory / "optimizer"
    kept = [optimizer.state for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.state = defaultdict(dict)
    if not optimizers or not folder.is_dir():  # the policy only scores, or it was never trained
        return None
    try:
        with _single_process_is_meant():
            content = {"optimizer": get_optimizer_state_dict(model, list(optimizers))}
            with on_all_ranks():
                _check_optimizer_keys(content["optimizer"], folder)
            with on_all_ranks(), _readable(folder):
                dcp.load(content, checkpoint_id=folder)
    except ValueError:
        for optimizer, before in zip(optimizers, kept, strict=True):
            optimizer.state = before
        raise
    return content["optimizer"]


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """What torch raises for files that are missing or broken as a ValueError."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError, LookupError, EOFError) as error:
        raise ValueError(
            f"{folder} must hold the whole state of an optimizer, got: {str(error)[:300]}; use "
            "another checkpoint"
        ) from error


def _check_optimizer_keys(content: Mapping[str, Any], folder: Path) -> None:
    """Every entry must be there in its shape: torch loads a part of a checkpoint without a word."""
    here = {
        f"optimizer.state.{name}.{key}": getattr(value, "shape", None)
        for name, entries in content["state"].items()
        for key, value in entries.items()
    }
    with _readable(folder):
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    there = {
        name: getattr(entry, "size", None)
        for name, entry in metadata.items()
        if name.startswith("optimizer.state.")
    }
    differ = sorted(name for name in there | here if there.get(name, ()) != here.get(name, ()))
    if differ:
        raise ValueError(
            f"an optimizer must be of the kind and the trained parameters that it was saved with, "
            f"but {differ[:3]} differ in {folder}; build the policy the same"
        )


def latest_checkpoint(directory: Path) -> Path | None:
    """The whole checkpoint of the highest step in ``directory``, or None."""
    return max(_whole_checkpoints(directory), key=_step, default=None)


def delete_old_checkpoints(directory: Path, keep: int, *, source: Path | None = None) -> None:
    """Delete all whole checkpoints in ``directory`` but the ``keep`` of the highest steps.

    One that holds ``source`` stays too: its config and tokenizer go into the next one.
    """
    for path in sorted(_whole_checkpoints(directory), key=_step)[: -max(keep, 1)]:
        if source is None or path.resolve() not in source.resolve().parents:
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
