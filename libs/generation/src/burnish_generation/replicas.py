"""Several engines behind one handle."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from burnish_generation.types import Completion, Engine, Sampling, WeightSource

Result = TypeVar("Result")


class Replicas:
    """Engines with the same weights, used as one: itself an `Engine`.

    Prompts are dealt out in contiguous runs, so that the samples of one prompt meet in one
    engine's prefix cache; answers come back in prompt order.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("replicas need at least one engine, got none")
        self.engines = list(engines)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """One completion per prompt, in prompt order, whichever engine made it.

        Raises:
            ValueError: if the numbers of prompts and seeds differ.
            RuntimeError: if an engine does not return one completion per prompt.
        """
        if len(prompts) != len(seeds):
            raise ValueError(f"one seed per prompt: got {len(prompts)} prompts, {len(seeds)} seeds")
        bounds = [len(prompts) * i // len(self.engines) for i in range(len(self.engines) + 1)]
        parts = [
            (engine, start, stop)
            for engine, start, stop in zip(self.engines, bounds, bounds[1:], strict=False)
            if stop > start
        ]
        results = at_once(
            [
                partial(engine.generate, prompts[start:stop], sampling, seeds[start:stop])
                for engine, start, stop in parts
            ]
        )
        for (_, start, stop), result in zip(parts, results, strict=True):
            if len(result) != stop - start:
                raise RuntimeError(
                    f"engines must return one completion per prompt, got {len(result)} for "
                    f"{stop - start} prompts"
                )
        return [completion for result in results for completion in result]

    def update_weights(self, source: WeightSource, weight_version: int) -> int:
        """Update every engine; returns the number of tensors each one loaded."""
        counts = at_once(
            [partial(engine.update_weights, source, weight_version) for engine in self.engines]
        )
        if len(set(counts)) != 1:
            raise RuntimeError(f"every engine must load the same tensors, got counts {counts}")
        return counts[0]


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run blocking calls side by side; results in order, the first failure raised at once.

    The threads are daemons: neither a failure nor Ctrl-C waits for calls that still block.
    """
    if len(calls) <= 1:
        return [call() for call in calls]
    finished: queue.SimpleQueue[tuple[int, Future[Result]]] = queue.SimpleQueue()

    def run(index: int, call: Callable[[], Result]) -> None:
        future: Future[Result] = Future()
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            future.set_exception(error)
        finished.put((index, future))

    for index, call in enumerate(calls):
        threading.Thread(target=run, args=(index, call), daemon=True).start()
    results: dict[int, Result] = {}
    for _ in calls:
        index, future = finished.get()
        results[index] = future.result()
    return [results[index] for index in range(len(calls))]
