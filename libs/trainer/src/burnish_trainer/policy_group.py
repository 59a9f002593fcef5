"""The Ray handle on a policy's ranks: the driver gives whole batches and plans, no rank shows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_distributed.weight_transport import put_weights
from burnish_distributed.workers import WorkerGroup

from burnish_trainer.checkpoint import delete_old_checkpoints
from burnish_trainer.policy import LossFunction
from burnish_trainer.torch_policy import TorchPolicy


class Plan(Protocol):
    """What is read of a `burnish_packing.MicroBatchPlan`."""

    @property
    def mode(self) -> str: ...

    @property
    def ranks(self) -> Sequence[Sequence[Sequence[int]]]: ...


class PolicyWorker(TorchPolicy):
    """One rank in a process of its own."""

    def __init__(self, **kwargs: Any) -> None:
        initialize_process_group(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        )
        super().__init__(**kwargs)

    def publish_weights(self) -> list[Any]:
        """Put the weights where other processes can read them; references, on rank 0 only."""
        if os.environ["RANK"] == "0":
            return put_weights(self.named_weights())
        for _ in self.named_weights():  # gathering a sharded tensor takes every rank
            pass
        return []


class PolicyGroup:
    """A policy on ``num_ranks`` Ray workers, used like one.

    Args:
        policy_args: arguments of `TorchPolicy`.
        num_ranks: data-parallel ranks (FSDP2 over all of them).
        environment: environment variables of the workers (thread counts).
        num_cpus: cores Ray reserves for each rank.
        num_gpus: GPUs Ray reserves for each rank.
    """

    def __init__(
        self,
        policy_args: Mapping[str, Any],
        *,
        num_ranks: int = 1,
        environment: Mapping[str, str] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
    ) -> None:
        self.num_ranks = num_ranks
        self._group = WorkerGroup(
            PolicyWorker,
            policy_args,
            num_workers=num_ranks,
            name="policy",
            environment=environment,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )

    def train_step(
        self, batch: RaggedBatch, plan: Plan, loss_fn: LossFunction, *, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on the whole batch; see `TorchPolicy.train_step`.

        ``loss_fn`` crosses to the workers: a function that can be imported there, or a
        ``functools.partial`` of one.
        """
        per_rank = [(shard, slots, loss_fn) for shard, slots in shard_batch(batch, plan.ranks)]
        results: list[dict[str, float]] = self._group.call(
            "train_step", per_rank, layout=plan.mode, temperature=temperature
        )
        return results[0]

    def logprobs(
        self, batch: RaggedBatch, plan: Plan, *, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """float32 [T], in the order of ``batch``."""
        return self._score("logprobs", batch, plan, temperature)

    def reference_logprobs(
        self, batch: RaggedBatch, plan: Plan, *, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """float32 [T], in the order of ``batch``."""
        return self._score("reference_logprobs", batch, plan, temperature)

    def publish_weights(self) -> list[Any]:
        """References to the current weights, for `burnish_distributed.weight_transport`."""
        references: list[Any] = self._group.call("publish_weights")[0]
        return references

    def save(self, directory: Path, state: Mapping[str, Any], *, keep: int | None = None) -> None:
        """Write a checkpoint; it appears once it is whole, and only then are older ones deleted.

        Args:
            directory: ``.../step_<number>``.
            state: JSON values to get back from `load`.
            keep: how many checkpoints stay beside each other; all without it.
        """
        self._group.call("save", directory=directory.resolve(), state=dict(state))
        if keep is not None:
            delete_old_checkpoints(directory.parent, keep)

    def load(self, directory: Path) -> dict[str, Any]:
        """Resume from a checkpoint; returns the state saved with it."""
        states: list[dict[str, Any]] = self._group.call("load", directory=directory.resolve())
        return states[0]

    def close(self) -> None:
        """Kill the workers."""
        self._group.close()

    def _score(
        self, method: str, batch: RaggedBatch, plan: Plan, temperature: float
    ) -> npt.NDArray[np.float32]:
        shards = shard_batch(batch, plan.ranks)
        results = self._group.call(method, shards, layout=plan.mode, temperature=temperature)
        offsets = batch.offsets
        merged = np.zeros(batch.num_tokens, dtype=np.float32)
        for slots, (shard, _), scores in zip(plan.ranks, shards, results, strict=True):
            own = [i for slot in slots for i in slot]
            bounds = shard.offsets
            for k, i in enumerate(own):
                merged[offsets[i] : offsets[i + 1]] = scores[bounds[k] : bounds[k + 1]]
        return merged
