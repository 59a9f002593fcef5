"""Reward and multi-turn worlds for post-training."""

from burnish_envs.math import MathEnvironment, MathVerifier, Verdict, Verifier, math_environment
from burnish_envs.rollout import collect_groups, sample_seed
from burnish_envs.training_rows import training_rows
from burnish_envs.types import (
    Completion,
    CompletionLike,
    Decode,
    Environment,
    FinishReason,
    Generate,
    Message,
    Prompt,
    Render,
    Rollout,
    RolloutGroup,
    Row,
    StepResult,
    Turn,
)

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "CompletionLike",
    "Decode",
    "Environment",
    "FinishReason",
    "Generate",
    "MathEnvironment",
    "MathVerifier",
    "Message",
    "Prompt",
    "Render",
    "Rollout",
    "RolloutGroup",
    "Row",
    "StepResult",
    "Turn",
    "Verdict",
    "Verifier",
    "collect_groups",
    "math_environment",
    "sample_seed",
    "training_rows",
]
