"""A policy on torch-native parallelism: any number of ranks, on CPUs or GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from burnish_distributed import RaggedBatch
from burnish_distributed.collectives import all_gather_object, all_reduce
from burnish_losses.reduce import Counts, Metric, combine_metrics, count, finalize, total
from burnish_packing.torch import PackedBatch, empty_batch, pack_sequences, pad_sequences
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from burnish_trainer.attention import ATTENTION, check_loaded, check_supported
from burnish_trainer.checkpoint import load_checkpoint, save_checkpoint
from burnish_trainer.optim import build_optimizer, warm_up
from burnish_trainer.parallelize import full_tensor, shard_parameters
from burnish_trainer.policy import LossFunction, NonFiniteGradientError
from burnish_trainer.scoring import ScoringModel

MicroBatches = Sequence[Sequence[int]]
LAYOUTS = ("packed", "padded", "fixed")


class TorchPolicy:
    """A transformers causal language model that is trained. See `Policy` for its methods.

    Args:
        model: folder of a Hugging Face checkpoint.
        learning_rate: of the optimizer, after the warm-up.
        optimizer: dotted path of its class.
        optimizer_args: its further arguments.
        warmup_steps: steps of linear warm-up.
        max_grad_norm: gradients are scaled down to this global 2-norm.
        dtype: of the computation. Weights, gradients and optimizer are float32 in any case: a step
            of 1e-6 is lost in a bfloat16 weight. Other than float32 it needs a process group.
        device: where to compute; by default the current CUDA device if there is one, else the CPU.
        reference: also keep the weights the policy starts from, for `reference_logprobs`.
        gradient_checkpointing: recompute activations in the backward pass.
        seed: of dropout.

    Raises:
        ValueError: for a model that would not be computed exactly.
    """

    def __init__(
        self,
        model: str,
        *,
        learning_rate: float,
        optimizer: str = "torch.optim.AdamW",
        optimizer_args: Mapping[str, Any] | None = None,
        warmup_steps: int = 0,
        max_grad_norm: float = 1.0,
        dtype: str = "float32",
        device: str | None = None,
        reference: bool = False,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        if dtype != "float32" and not torch.distributed.is_initialized():
            raise ValueError(
                f"computing in {dtype} needs a process group (FSDP keeps the float32 weights), got "
                "none; call burnish_distributed.initialize_process_group, also for one process"
            )
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._source = Path(model)
        self._model = self._load_model(dtype, gradient_checkpointing)
        self._reference = self._load_model(dtype).requires_grad_(False) if reference else None
        self._optimizer = build_optimizer(
            self._model.parameters(),
            optimizer=optimizer,
            learning_rate=learning_rate,
            optimizer_args=optimizer_args,
        )
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self.num_steps = 0

    def logprobs(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """float32 [T] log-probs aligned to tokens; 0 where ``token_mask`` is False."""
        return _score(self._model, batch, micro_batches, layout, temperature)

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
        return _score(self._reference, batch, micro_batches, layout, temperature)

    def train_step(
        self,
        batch: RaggedBatch,
        micro_batches: MicroBatches,
        loss_fn: LossFunction,
        *,
        layout: str = "packed",
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on the whole global batch.

        Returns:
            The loss's metrics over the whole batch, ``train/loss``, ``train/grad_norm`` (before
            clipping), ``train/learning_rate``, ``train/num_tokens`` and ``train/num_sequences``
            (trained ones).

        Raises:
            ValueError: if no token of the whole batch is trained.
            NonFiniteGradientError: if the gradient is NaN or infinite; nothing has changed.
        """
        _check_plan(batch, micro_batches, layout)
        counts = _global_counts(batch, self._model.device())
        self._model.train()
        self._optimizer.zero_grad()  # a step that raised may have left gradients behind
        parts: list[Mapping[str, Metric]] = []
        loss_sum = torch.zeros((), dtype=torch.float64)
        for indices in micro_batches:
            micro_batch = batch.select(indices)
            model_batch = _lay_out(micro_batch, layout).to(self._model.device())
            logprobs = model_batch.scatter(self._model(model_batch, temperature))
            if indices:
                output = loss_fn(logprobs, _columns(micro_batch, logprobs.device))
                loss = total(output.terms, counts)
                parts.append(output.metrics)
            else:  # nothing to train, but the other ranks wait in the collectives of the backward
                loss = logprobs.sum()
            loss.backward()
            loss_sum += loss.detach().double().cpu()
        grad_norm = self._clip_gradients()
        if not np.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise NonFiniteGradientError(
                f"gradients must be finite, got a norm of {grad_norm} with a loss of "
                f"{float(all_reduce(loss_sum, 'sum'))} in step {self.num_steps}; look for NaN in "
                "rewards, advantages or log-probs. The weights are as before the step"
            )
        learning_rate = warm_up(self._learning_rate, self.num_steps, self._warmup_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_steps += 1
        return _reduce_metrics(parts, counts) | {
            "train/loss": float(all_reduce(loss_sum, "sum")),
            "train/grad_norm": grad_norm,
            "train/learning_rate": learning_rate,
            "train/num_tokens": float(counts["tokens"]),
            "train/num_sequences": float(counts["sequences"]),
        }

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) pairs; tied tensors once. A collective."""
        for name, parameter in self._model.named_weights():
            yield name, full_tensor(parameter)

    def save(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Write weights (Hugging Face form), optimizer and ``state``; atomic. A collective."""
        save_checkpoint(
            directory,
            weights=self.named_weights(),
            source=self._source,
            model=self._model,
            optimizer=self._optimizer,
            state={**state, "num_optimizer_steps": self.num_steps},
        )

    def load(self, directory: Path) -> dict[str, Any]:
        """Take weights and optimizer from a checkpoint of `save`. A collective."""
        state = load_checkpoint(directory, model=self._model, optimizer=self._optimizer)
        self.num_steps = int(state["num_optimizer_steps"])
        return state

    def _load_model(self, dtype: str, gradient_checkpointing: bool = False) -> ScoringModel:
        config = AutoConfig.from_pretrained(self._source)
        check_supported(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            self._source,
            config=config,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
        model, info = loaded
        check_loaded(info, self._source)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        scoring = ScoringModel(model)
        scoring.to(self._device)
        shard_parameters(scoring, device=self._device, compute_dtype=getattr(torch, dtype))
        return scoring

    def _clip_gradients(self) -> float:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        return float(full_tensor(norm))


def _check_plan(batch: RaggedBatch, micro_batches: MicroBatches, layout: str) -> None:
    """ValueError unless each sequence is planned once, in a layout that is known."""
    planned = sorted(i for indices in micro_batches for i in indices)
    if not micro_batches or planned != list(range(batch.num_sequences)):
        raise ValueError(
            f"micro-batches must name each of the {batch.num_sequences} sequences exactly once, "
            f"got {len(planned)} entries for {len(set(planned))}; make them from this batch"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def _lay_out(batch: RaggedBatch, layout: str) -> PackedBatch:
    """One micro-batch as one model call; prefixes that columns name are stored once."""
    if batch.num_sequences == 0:
        return empty_batch()
    token_ids = torch.tensor(batch.token_columns["token_ids"], dtype=torch.int64)
    token_mask = torch.tensor(batch.token_columns["token_mask"], dtype=torch.bool)
    if layout != "packed":
        return pad_sequences(token_ids, batch.lengths, token_mask=token_mask)
    columns = batch.sequence_columns
    return pack_sequences(
        token_ids,
        batch.lengths,
        token_mask=token_mask,
        prefix_ids=columns.get("prefix_ids"),
        prefix_lengths=columns.get("prefix_lengths"),
    )


def _columns(batch: RaggedBatch, device: torch.device) -> dict[str, Tensor]:
    columns = {name: torch.tensor(column) for name, column in batch.token_columns.items()}
    columns["cu_seqlens"] = torch.tensor(batch.offsets, dtype=torch.int32)
    return {name: column.to(device) for name, column in columns.items()}


def _score(
    model: ScoringModel,
    batch: RaggedBatch,
    micro_batches: MicroBatches,
    layout: str,
    temperature: float,
) -> npt.NDArray[np.float32]:
    _check_plan(batch, micro_batches, layout)
    model.eval()
    offsets = batch.offsets
    result = np.zeros(batch.num_tokens, dtype=np.float32)
    with torch.no_grad():
        for indices in micro_batches:
            model_batch = _lay_out(batch.select(indices), layout).to(model.device())
            scores = model_batch.scatter(model(model_batch, temperature)).cpu().numpy()
            start = 0
            for i in indices:
                length = int(batch.lengths[i])
                result[offsets[i] : offsets[i + 1]] = scores[start : start + length]
                start += length
    return result


def _global_counts(batch: RaggedBatch, device: torch.device) -> dict[str, int]:
    """What the batch holds over all ranks, by unit."""
    local = count(_columns(batch, torch.device("cpu")))
    summed = all_reduce(torch.tensor(list(local.values()), device=device), "sum")
    counts = dict(zip(local, summed.tolist(), strict=True))
    if counts["tokens"] == 0:
        raise ValueError(
            "a training batch must hold at least one trained token, got none on any rank; "
            "skip batches without any"
        )
    return counts


def _reduce_metrics(parts: Sequence[Mapping[str, Metric]], counts: Counts) -> dict[str, float]:
    local = {
        name: Metric(metric.value.detach().cpu(), metric.unit, metric.reduction)
        for name, metric in combine_metrics(parts).items()
    }
    return finalize(combine_metrics(all_gather_object(local)), counts)
