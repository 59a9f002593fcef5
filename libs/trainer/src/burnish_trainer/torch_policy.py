"""A policy on torch-native parallelism: any number of ranks, on CPUs or GPUs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch
from burnish_distributed.collectives import rank
from torch import Tensor
from transformers import PreTrainedModel

from burnish_trainer.checkpoint import load_checkpoint, save_checkpoint
from burnish_trainer.checks import check_arguments, chosen_device
from burnish_trainer.loading import fingerprint, load_model
from burnish_trainer.lora import adapter_identity, merged_weights
from burnish_trainer.nonfinite import describe, find_culprits, is_finite
from burnish_trainer.offload import move
from burnish_trainer.optim import build_optimizers, schedule_factor, set_learning_rate
from burnish_trainer.parallelize import compile_layers, full_tensor, shard_parameters
from burnish_trainer.passes import Work, accumulate, prepare, score, summarize
from burnish_trainer.policy import Head, LossFunction, MicroBatches, NonFiniteGradientError
from burnish_trainer.reference import Reference
from burnish_trainer.scoring import OUTPUTS, Request, ScoringModel


class TorchPolicy:
    """A transformers model that is trained. See `Policy` for its methods.

    Args:
        model: folder of a Hugging Face checkpoint.
        learning_rate: of the optimizer, at the schedule's highest point. None: nothing is trained,
            the policy only scores (a reference or a teacher in a worker group of its own).
        head: ``language``, ``value`` (a number a token) or ``reward`` (one a sequence). The last
            two get a new head, drawn from ``seed``, if the checkpoint has none.
        optimizer: dotted path of its class; see `burnish_trainer.optim`.
        optimizer_args: its further arguments.
        schedule: dotted path of a function of `burnish_trainer.schedules`' form.
        schedule_args: its further arguments, such as ``num_steps`` and ``warmup_steps``.
        max_grad_norm: gradients are scaled down to this global 2-norm; None: never.
        on_nonfinite: on a gradient that is NaN or infinite, ``stop`` with an error, or ``skip`` the
            step with a warning; either names the sequences.
        frozen: globs over Hugging Face names of parameters that are not trained.
        lora: arguments of `peft.LoraConfig`: train adapters instead of the weights.
        dtype: of the computation. Weights, gradients and optimizer are float32 in any case: a step
            of 1e-6 is lost in a bfloat16 weight. Other than float32 it needs a process group.
        device: where to compute; by default the current CUDA device if there is one, else the CPU.
        reference: for `reference_logprobs`, keep the weights the policy starts from, in the CPU's
            memory. With adapters it is the model without them and costs nothing.
        gradient_checkpointing: recompute activations in the backward pass.
        cpu_offload: keep weights, gradients and optimizer in the CPU's memory and bring them to the
            device layer by layer; needs a GPU.
        compile: compile the parts of every layer but its attention (torch.compile, dynamic shapes).
        seed: of dropout, which depends on it, the step and the rank alone, and of new heads and
            adapters.

    Raises:
        ValueError: for a model that would not be computed exactly, or arguments that do not fit it.
    """

    def __init__(
        self,
        model: str,
        *,
        learning_rate: float | None,
        head: Head = "language",
        optimizer: str = "torch.optim.AdamW",
        optimizer_args: Mapping[str, Any] | None = None,
        schedule: str = "burnish_trainer.schedules.constant",
        schedule_args: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = 1.0,
        on_nonfinite: str = "stop",
        frozen: Sequence[str] = (),
        lora: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        device: str | None = None,
        reference: bool = False,
        gradient_checkpointing: bool = False,
        cpu_offload: bool = False,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        check_arguments(
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            dtype=dtype,
            reference=reference,
            seed=seed,
        )
        self._device = chosen_device(device)
        self._source, self._head, self._seed = Path(model), head, seed
        self._cpu_offload, self._max_grad_norm = cpu_offload, max_grad_norm
        self._learning_rate, self._on_nonfinite = learning_rate, on_nonfinite
        self.num_steps = self.num_skipped_steps = 0
        with self._randomness(0, of_rank=0):  # the same new weights on all ranks
            loaded = load_model(
                self._source,
                head=head,
                lora=lora,
                frozen=frozen,
                trained=learning_rate is not None,
                gradient_checkpointing=gradient_checkpointing,
                seed=seed,
            )
        self._identity: dict[str, Any] = {"head": head}  # what a checkpoint has in common with it
        if lora is not None or reference:
            self._identity |= adapter_identity(loaded) | {"base": fingerprint(loaded)}
        if learning_rate is not None:
            self._identity |= trained_identity(loaded, optimizer, optimizer_args, frozen)
        self._model = ScoringModel(loaded, head)
        if compile:
            compile_layers(self._model)
        shard_parameters(
            self._model,
            device=self._device,
            compute_dtype=getattr(torch, dtype),
            cpu_offload=cpu_offload,
        )
        self._reference = Reference(self._model) if reference else None
        self._schedule, self._schedule_args = schedule, dict(schedule_args or {})
        schedule_factor(self._schedule, 0, self._schedule_args)  # an error now, not in a step
        self._optimizers = build_optimizers(
            self._model,
            optimizer=optimizer,
            learning_rate=learning_rate,
            optimizer_args=optimizer_args,
        )

    def logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """float32 [T] log-probs aligned to tokens; 0 where ``token_mask`` is False."""
        self._check_head("language")
        request = Request(temperature=temperature)
        return score(self._model, batch, micro_batches, layout, request)["logprobs"]

    def reference_logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """`logprobs` under the weights the policy started from."""
        if self._reference is None:
            raise ValueError("reference log-probs need a policy built with reference=True")
        with self._reference.swapped_in():
            return self.logprobs(batch, micro_batches, layout=layout, temperature=temperature)

    def topk_logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        k: int,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Ids and log-probs [T, k] of the likeliest tokens in the place of each trained token."""
        self._check_head("language")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        request = Request(temperature=temperature, top_k=k)
        outputs = score(self._model, batch, micro_batches, layout, request)
        return outputs["topk_ids"], outputs["topk_logprobs"]

    def values(
        self, batch: RaggedBatch, micro_batches: MicroBatches, *, layout: str = "packed"
    ) -> npt.NDArray[np.float32]:
        """float32 [T] of the value head, aligned to tokens; 0 where ``token_mask`` is False."""
        self._check_head("value")
        return score(self._model, batch, micro_batches, layout, Request())["values"]

    def scores(
        self, batch: RaggedBatch, micro_batches: MicroBatches, *, layout: str = "packed"
    ) -> npt.NDArray[np.float32]:
        """float32 [N] of the reward head, one a sequence."""
        self._check_head("reward")
        return score(self._model, batch, micro_batches, layout, Request())["scores"]

    def train_step(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """One optimizer step on the whole global batch.

        Args:
            with_entropy: give the loss the differentiable column ``entropies`` [T].

        Returns:
            The loss's metrics over the whole batch, ``train/loss``, ``train/grad_norm`` (before
            clipping), ``train/learning_rate``, ``train/num_tokens`` and ``train/num_sequences``
            (trained ones), ``train/skipped`` (1 if the step was left out for its gradient).

        Raises:
            ValueError: for a batch or plan that the model cannot take (every rank raises), a whole
                batch without anything trained, or a policy that only scores.
            NonFiniteGradientError: if the loss or its gradient is NaN or infinite; nothing has
                changed.
        """
        if self._learning_rate is None:
            raise ValueError("training needs a policy built with a learning_rate, got None")
        request = Request(temperature=temperature, with_entropy=with_entropy)
        work = prepare(self._model, batch, micro_batches, loss_fn, layout, request)
        self._model.train()
        self._model.zero_grad()  # a step that raised may have left gradients behind
        with self._randomness(self.num_steps + 1):
            loss, parts = accumulate(self._model, work, backward=True)
        grad_norm = self._clip_gradients()
        skipped = not is_finite(grad_norm, loss)
        if skipped:
            self._report_nonfinite(work)
        rate = set_learning_rate(
            self._optimizers,
            self._learning_rate,
            self._schedule,
            self.num_steps,
            self._schedule_args,
        )
        for optimizer in () if skipped else self._optimizers:
            optimizer.step()
        self._model.zero_grad()
        self.num_steps += 1
        return summarize("train", work, loss, parts) | {
            "train/grad_norm": grad_norm,
            "train/learning_rate": rate,
            "train/skipped": float(skipped),
        }

    def evaluate(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """The loss's metrics over the whole global batch, without dropout; nothing is changed.

        Returns:
            The loss's metrics, ``validation/loss``, ``validation/num_tokens`` and
            ``validation/num_sequences``.
        """
        request = Request(temperature=temperature, with_entropy=with_entropy)
        work = prepare(self._model, batch, micro_batches, loss_fn, layout, request)
        self._model.eval()
        with torch.no_grad():
            loss, parts = accumulate(self._model, work, backward=False)
        return summarize("validation", work, loss, parts)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) pairs, adapters merged; tied ones once. A collective.

        A tensor may be the policy's own memory: whoever keeps one over the next step copies it.
        """
        yield from merged_weights(self._model.model)

    def offload(self) -> None:
        """Weights and optimizer to the CPU's memory, and the device's freed."""
        move(self._model, self._optimizers, torch.device("cpu"))

    def onload(self) -> None:
        """Weights and optimizer back to the device, unless ``cpu_offload`` keeps them off it."""
        if self._cpu_offload:
            return
        move(self._model, self._optimizers, self._device)

    def save(self, directory: str | Path, state: Mapping[str, Any]) -> None:
        """Write weights (Hugging Face form), optimizer and ``state`` (JSON). A collective.

        The folder appears once it is whole, and nothing of the policy is changed.

        Raises:
            ValueError: if ``state`` holds what is no JSON; nothing is written.
        """
        save_checkpoint(
            Path(directory),
            source=self._source,
            model=self._model,
            optimizers=self._optimizers,
            identity=self._identity,
            state={
                **state,
                "num_optimizer_steps": self.num_steps,
                "num_skipped_steps": self.num_skipped_steps,
            },
        )

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Take weights and optimizer from a checkpoint of `save`; its ``state``. A collective.

        The learning rate and its schedule stay those of this policy. A policy that only scores
        takes the weights of any checkpoint of its model.

        Raises:
            ValueError: if it is not whole, or the policy that wrote it was built with another head,
                optimizer, adapter, frozen part, or, where it is kept, base model; nothing has
                changed.
        """
        state = load_checkpoint(
            Path(directory),
            model=self._model,
            optimizers=self._optimizers,
            identity=self._identity,
        )
        self.num_steps = int(state["num_optimizer_steps"])
        self.num_skipped_steps = int(state.get("num_skipped_steps", 0))
        return state

    def _report_nonfinite(self, work: Work) -> None:
        """Name what made the gradient not finite, as an error or as a warning."""
        with self._randomness(self.num_steps + 1):
            culprits = find_culprits(self._model, work)
        message = describe(culprits, self.num_steps)
        if self._on_nonfinite == "stop":
            raise NonFiniteGradientError(
                f"{message}, or pass on_nonfinite='skip' to leave such steps out"
            )
        self.num_skipped_steps += 1
        if rank() == 0:
            warnings.warn(f"step skipped: {message}", stacklevel=3)

    def _clip_gradients(self) -> float:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        return float(full_tensor(norm))

    @contextmanager
    def _randomness(self, step: int, of_rank: int | None = None) -> Iterator[None]:
        """Dropout that depends on seed, step and rank alone: no state to save, none disturbed."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            entropy = [self._seed, step, rank() if of_rank is None else of_rank]
            words = np.random.SeedSequence(entropy).generate_state(2)
            torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
            yield

    def _check_head(self, head: str) -> None:
        if self._head != head:
            raise ValueError(
                f"{OUTPUTS[head]} must come from a policy with a {head} head, got one with a "
                f"{self._head} head; build it with head={head!r}"
            )


def trained_identity(
    model: PreTrainedModel,
    optimizer: str,
    optimizer_args: Mapping[str, Any] | None,
    frozen: Sequence[str],
) -> dict[str, Any]:
    """What must be the same for an optimizer's state to mean the same, as JSON values."""
    return {
        "optimizer": optimizer,
        "optimizer_args": json.loads(json.dumps(dict(optimizer_args or {}), default=str)),
        "frozen": sorted(frozen),
        **adapter_identity(model),
    }
