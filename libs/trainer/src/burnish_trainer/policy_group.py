"""The handle on all ranks of a policy: the driver gives whole batches and plans, no rank shows.

The ranks are Ray workers, or the processes that torchrun started: then every process runs the same
driver, and its `PolicyGroup` is the same object to it. Or the only rank is this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_distributed.collectives import all_gather_object, barrier, rank, world_size

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
    """One rank in a process of its own, whose place among the others its environment tells."""

    def __init__(self, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            initialize_process_group(
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            )
        super().__init__(**kwargs)

    def publish_weights(self) -> list[Any]:
        """Put the weights where other processes can read them; references, on rank 0 only."""
        from burnish_distributed.weight_transport import put_weights

        if rank() == 0:
            return put_weights(self.named_weights())
        for _ in self.named_weights():  # gathering a sharded tensor takes every rank
            pass
        return []


class ThisRank:
    """What `WorkerGroup` is on Ray, with this process as one of the ranks, or the only one."""

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``method`` with this rank's arguments; the results of all ranks, in order."""
        if per_rank is not None and len(per_rank) != world_size():
            raise ValueError(
                f"per_rank must hold one tuple per rank ({world_size()}), got {len(per_rank)}; "
                "plan for as many ranks as there are"
            )
        arguments = () if per_rank is None else per_rank[rank()]
        return all_gather_object(getattr(self.policy, method)(*arguments, **kwargs))

    def close(self) -> None:
        """Leave the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class PolicyGroup:
    """A policy on many ranks, used like one.

    Args:
        policy_args: arguments of `TorchPolicy`.
        num_ranks: data-parallel ranks (FSDP2 over all of them); under torchrun as many as it
            started, by default.
        launcher: ``ray``: start workers, needs `burnish-trainer[ray]`; ``torchrun``: this process
            is a rank; ``local``: it is the only one, and computes in float32.
        name: what errors call the workers: a reference in a group of its own, say.
        environment: environment variables of Ray's workers (thread counts).
        num_cpus: cores Ray reserves for each rank.
        num_gpus: GPUs Ray reserves for each rank.

    Raises:
        ValueError: if torchrun started another number of processes than ``num_ranks``, or none; for
            more than one rank in this process.
    """

    def __init__(
        self,
        policy_args: Mapping[str, Any],
        *,
        num_ranks: int | None = None,
        launcher: Literal["ray", "torchrun", "local"] = "ray",
        name: str = "policy",
        environment: Mapping[str, str] | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
    ) -> None:
        self._source = Path(policy_args["model"])
        if launcher == "torchrun":
            self.num_ranks = _started_by_torchrun(num_ranks)
            local = int(os.environ.get("LOCAL_RANK", "0"))
            if local < torch.cuda.device_count():  # all ranks of a node see all of its GPUs
                torch.cuda.set_device(local)
            self._group: Any = ThisRank(PolicyWorker(**policy_args))
            return
        if launcher == "local":
            if num_ranks not in (None, 1):
                raise ValueError(
                    f"the launcher local has one rank, got num_ranks={num_ranks}; use ray or "
                    "torchrun"
                )
            self.num_ranks = 1
            self._group = ThisRank(TorchPolicy(**policy_args))
            return
        if launcher != "ray":
            raise ValueError(
                f"launcher must be ray, torchrun or local, got {launcher!r}; choose one of them"
            )
        from burnish_distributed.workers import WorkerGroup

        self.num_ranks = num_ranks or 1
        self._group = WorkerGroup(
            PolicyWorker,
            policy_args,
            num_workers=self.num_ranks,
            name=name,
            environment=environment,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )

    def train_step(
        self, batch: RaggedBatch, plan: Plan, loss_fn: LossFunction, **kwargs: Any
    ) -> dict[str, float]:
        """One optimizer step on the whole batch; see `TorchPolicy.train_step`.

        ``loss_fn`` crosses to the workers: a function that can be imported there, or a
        ``functools.partial`` of one.
        """
        return self._with_loss("train_step", batch, plan, loss_fn, kwargs)

    def evaluate(
        self, batch: RaggedBatch, plan: Plan, loss_fn: LossFunction, **kwargs: Any
    ) -> dict[str, float]:
        """Loss and metrics of the whole batch; see `TorchPolicy.evaluate`."""
        return self._with_loss("evaluate", batch, plan, loss_fn, kwargs)

    def logprobs(
        self, batch: RaggedBatch, plan: Plan, *, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """float32 [T], in the order of ``batch``."""
        return self._score("logprobs", batch, plan, temperature=temperature)

    def reference_logprobs(
        self, batch: RaggedBatch, plan: Plan, *, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """float32 [T], in the order of ``batch``."""
        return self._score("reference_logprobs", batch, plan, temperature=temperature)

    def topk_logprobs(
        self, batch: RaggedBatch, plan: Plan, k: int, *, temperature: float = 1.0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids and log-probs [T, k], in the order of ``batch``."""
        shards = [(*shard, k) for shard in shard_batch(batch, plan.ranks)]
        results = self._group.call(
            "topk_logprobs", shards, layout=plan.mode, temperature=temperature
        )
        ids, logprobs = zip(*results, strict=True)
        return _merged(batch, plan, ids), _merged(batch, plan, logprobs)

    def values(self, batch: RaggedBatch, plan: Plan) -> npt.NDArray[np.float32]:
        """float32 [T] of a value head, in the order of ``batch``."""
        return self._score("values", batch, plan)

    def scores(self, batch: RaggedBatch, plan: Plan) -> npt.NDArray[np.float32]:
        """float32 [N] of a reward head, in the order of ``batch``."""
        results = self._group.call("scores", shard_batch(batch, plan.ranks), layout=plan.mode)
        merged = np.zeros(batch.num_sequences, dtype=np.float32)
        for slots, scores in zip(plan.ranks, results, strict=True):
            merged[[i for slot in slots for i in slot]] = scores
        return merged

    def publish_weights(self) -> list[Any]:
        """References to the current weights, for `burnish_distributed.weight_transport`; on Ray."""
        if isinstance(self._group, ThisRank):
            raise ValueError(
                "weights are published through Ray, got a group without; iterate over "
                "named_weights, on all ranks"
            )
        references: list[Any] = self._group.call("publish_weights")[0]
        return references

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) pairs, to read; under torchrun on all ranks."""
        if isinstance(self._group, ThisRank):
            yield from self._group.policy.named_weights()
            return
        from burnish_distributed.weight_transport import get_weights

        yield from get_weights(self.publish_weights())

    def offload(self) -> None:
        """Free the ranks' accelerators; see `Policy.offload`."""
        self._group.call("offload")

    def onload(self) -> None:
        """Bring back what `offload` took away."""
        self._group.call("onload")

    def save(
        self, directory: str | Path, state: Mapping[str, Any], *, keep: int | None = None
    ) -> None:
        """Write a checkpoint; it appears once it is whole, and only then are older ones deleted.

        Args:
            directory: ``.../step_<number>``.
            state: JSON values to get back from `load`.
            keep: how many checkpoints stay beside each other; all without it. One that the policy
                was built from stays in any case.
        """
        folder = Path(directory).resolve()
        self._group.call("save", directory=folder, state=dict(state))
        if keep is not None and rank() == 0:
            delete_old_checkpoints(folder.parent, keep, source=self._source)
        barrier()

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint; returns the state saved with it."""
        states: list[dict[str, Any]] = self._group.call("load", directory=Path(directory).resolve())
        return states[0]

    def close(self) -> None:
        """Kill the workers, or leave torchrun's process group."""
        self._group.close()

    def _with_loss(
        self,
        method: str,
        batch: RaggedBatch,
        plan: Plan,
        loss_fn: LossFunction,
        kwargs: Mapping[str, Any],
    ) -> dict[str, float]:
        # Numbers in the global batch, so that an error can name sequences the caller knows.
        numbers = {"sequence_ids": np.arange(batch.num_sequences), **batch.sequence_columns}
        numbered = replace(batch, sequence_columns=numbers)
        per_rank = [(*shard, loss_fn) for shard in shard_batch(numbered, plan.ranks)]
        results: list[dict[str, float]] = self._group.call(
            method, per_rank, layout=plan.mode, **kwargs
        )
        return results[0]

    def _score(
        self, method: str, batch: RaggedBatch, plan: Plan, **kwargs: Any
    ) -> npt.NDArray[np.float32]:
        shards = shard_batch(batch, plan.ranks)
        return _merged(batch, plan, self._group.call(method, shards, layout=plan.mode, **kwargs))


def _merged(
    batch: RaggedBatch, plan: Plan, results: Sequence[npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    """Token columns of the ranks' shards as one of the whole batch."""
    offsets = batch.offsets
    order = [i for slots in plan.ranks for slot in slots for i in slot]
    places = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in order])
    joined = np.concatenate(results)
    merged = np.empty_like(joined)
    merged[places] = joined
    return merged


def _started_by_torchrun(num_ranks: int | None) -> int:
    started = world_size() if torch.distributed.is_initialized() else None
    if started is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        started = int(os.environ["WORLD_SIZE"])
    if started is None or num_ranks not in (None, started):
        raise ValueError(
            f"torchrun must have started {num_ranks or 'the'} ranks, got "
            f"{'no RANK and WORLD_SIZE in the environment' if started is None else started}; run "
            f"torchrun --nproc-per-node {num_ranks or 'N'} your_script.py"
        )
    return started
