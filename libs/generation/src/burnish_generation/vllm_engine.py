"""vLLM in this process, on a CPU or a GPU, with weights that can be replaced while it runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from burnish_generation.types import Completion, Sampling, WeightSource


def engine_environment(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that is to hold a `VllmEngine`.

    Args:
        num_threads: compute threads on a CPU.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its own binding hands each engine all cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: callables can be sent
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",  # a checkpoint is a local folder by now
    }


class VllmEngine:
    """A vLLM engine that satisfies `burnish_generation.types.Engine`.

    Args:
        model: folder of a Hugging Face checkpoint.
        max_model_len: tokens of prompt and completion together, at most.
        kv_cache_bytes: memory for keys and values; ``None`` lets vLLM take
            ``gpu_memory_utilization`` of the GPU.
        dtype: of weights and computation.
        max_num_seqs: sequences decoded at once.
        block_size: tokens per cache block; prefixes are shared in whole blocks. ``None`` is 32
            on a CPU (vLLM's own 128 shares nothing between short prompts) and vLLM's choice
            elsewhere.
        seed: of the engine; every request also carries its own.
        engine_args: further arguments of ``vllm.LLM``.

    The engine starts at weight version 0.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        kv_cache_bytes: int | None = None,
        dtype: str = "float32",
        max_num_seqs: int = 256,
        block_size: int | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.5,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        for name, value in engine_environment(num_threads=1).items():
            os.environ.setdefault(name, value)
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            block_size = block_size or 32
            gpu_memory_utilization = 0.1  # vLLM checks it against the host's memory; unused here
        arguments: dict[str, Any] = {
            "model": model,
            "max_model_len": max_model_len,
            "dtype": dtype,
            "max_num_seqs": max_num_seqs,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "burnish_generation.weight_receiver.WeightReceiver",
            "disable_log_stats": True,
            "enable_prefix_caching": True,
        }
        if kv_cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = kv_cache_bytes
        if block_size is not None:
            arguments["block_size"] = block_size
        self._llm = LLM(**arguments | (engine_args or {}))
        self.max_model_len = max_model_len
        self.weight_version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion per prompt, in prompt order.

        Args:
            prompts: token ids of each prompt, taken as they are.
            sampling: how to draw; the same for all.
            seeds: one per prompt.

        Raises:
            ValueError: if a prompt is empty or leaves no room for a token, or the numbers of
                prompts and seeds differ. Nothing is generated then.
        """
        if len(prompts) != len(seeds):
            raise ValueError(f"one seed per prompt: got {len(prompts)} prompts, {len(seeds)} seeds")
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.max_model_len:
                raise ValueError(
                    f"a prompt must have 1 to {self.max_model_len - 1} tokens (max_model_len "
                    f"{self.max_model_len} less one to generate), got {len(prompt)} in prompt {i}"
                )
        inputs: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(
            inputs,
            [
                self._parameters(sampling, seed, self.max_model_len - len(prompt))
                for prompt, seed in zip(prompts, seeds, strict=True)
            ],
            use_tqdm=False,
        )
        return [_completion(output.outputs[0], self.weight_version) for output in outputs]

    def update_weights(self, source: WeightSource, weight_version: int) -> int:
        """Load new weights into the running model and forget what the old ones cached.

        Args:
            source: a callable that returns an iterator of (Hugging Face name, tensor), or its
                dotted path ``"package.module:function"``.
            weight_version: what completions report from now on.

        Returns:
            The number of tensors loaded.
        """
        num_tensors: int = self._llm.collective_rpc("receive_weights", args=(source,))[0]
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache must be empty after a weight update, but requests still hold "
                "blocks of it; update between calls of generate"
            )
        self.weight_version = weight_version
        return num_tensors

    def _parameters(self, sampling: Sampling, seed: int, room_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=min(sampling.max_new_tokens, room_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            seed=seed,
            logprobs=0,  # only the sampled token's
        )


def _completion(output: Any, weight_version: int) -> Completion:
    token_ids = tuple(int(token) for token in output.token_ids)
    logprobs = tuple(
        float(choices[token].logprob)
        for choices, token in zip(output.logprobs, token_ids, strict=True)
    )
    reason = output.finish_reason if output.finish_reason in ("stop", "length") else "abort"
    return Completion(token_ids, logprobs, reason, weight_version)
