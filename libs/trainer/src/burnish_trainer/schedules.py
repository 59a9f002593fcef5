"""Learning rates as pure functions of the step, so that a resumed run goes on where it was.

``schedule(step, num_steps=..., ...)`` is the factor on the learning rate of the optimizer's step
``step``, counted from 0. Another one is a function of the same form, named by its dotted path.
"""

from __future__ import annotations

import math


def constant(step: int, *, warmup_steps: int = 0) -> float:
    """Linear warm-up to 1 over ``warmup_steps``, then 1."""
    return warm_up(step, warmup_steps)


def linear(step: int, *, num_steps: int, warmup_steps: int = 0, final: float = 0.0) -> float:
    """Warm-up, then a straight line to ``final`` at step ``num_steps``."""
    left = 1 - decayed(step, warmup_steps, num_steps)
    return warm_up(step, warmup_steps) * (final + (1 - final) * left)


def cosine(step: int, *, num_steps: int, warmup_steps: int = 0, final: float = 0.0) -> float:
    """Warm-up, then half a cosine to ``final`` (Loshchilov and Hutter 2017, without restarts)."""
    left = (1 + math.cos(math.pi * decayed(step, warmup_steps, num_steps))) / 2
    return warm_up(step, warmup_steps) * (final + (1 - final) * left)


def warmup_stable_decay(
    step: int, *, num_steps: int, warmup_steps: int = 0, decay_steps: int, final: float = 0.0
) -> float:
    """Warm-up, 1, and a straight line to ``final`` in the last ``decay_steps`` (Hu et al. 2024)."""
    if decay_steps < 0:
        raise ValueError(f"decay_steps must be at least 0, got {decay_steps}")
    left = 1 - decayed(step, max(warmup_steps, num_steps - decay_steps), num_steps)
    return warm_up(step, warmup_steps) * (final + (1 - final) * left)


def warm_up(step: int, warmup_steps: int) -> float:
    """1/(w + 1), 2/(w + 1), …, 1: no step is lost at a rate of 0."""
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
    return min(1.0, (step + 1) / (warmup_steps + 1))


def decayed(step: int, start: int, end: int) -> float:
    """How much of the way from step ``start`` to step ``end`` is done, in [0, 1]."""
    if end < 1:
        raise ValueError(f"num_steps must be at least 1, got {end}")
    return min(1.0, max(0.0, (step - start) / max(end - start, 1)))
