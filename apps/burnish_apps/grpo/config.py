"""What a GRPO recipe may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from burnish_apps.shell.config import ConfigError, Part, Section
from burnish_apps.shell.optimization import Gpus, Optimization
from burnish_apps.shell.settings import Data, RunSettings, resume_problems

STATE = {"step": int, "weight_version": int, "loader": dict}  # beside a checkpoint


class Rollout(Section):
    """How the policy is sampled."""

    prompts_per_step: PositiveInt
    group_size: int = Field(ge=2)
    max_new_tokens: PositiveInt
    temperature: float = Field(default=1.0, ge=0.01, le=2)  # vLLM raises less, and refuses more
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()


class Engine(Section):
    """The inference engines. Lengths in tokens, memory in bytes per engine."""

    num_engines: PositiveInt = 1
    max_model_len: PositiveInt
    max_num_seqs: PositiveInt = 256
    kv_cache_bytes: PositiveInt | None = None
    gpus_per_engine: Gpus = 0
    engine_args: dict[str, Any] = Field(default_factory=dict)
    max_mismatch: PositiveFloat | None = 5e-5  # mean |log-prob difference| to the trainer, in nats


class Training(Optimization):
    """The optimizer steps of a batch of rollouts."""

    num_steps: PositiveInt
    updates_per_step: PositiveInt = 1
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    kl_coefficient: NonNegativeFloat = 0.0
    normalize_advantages: bool = True
    aggregation: Literal["tokens", "sequences"] = "tokens"

    @property
    def num_updates(self) -> int:
        """Steps of the optimizer in the whole run."""
        return self.num_steps * self.updates_per_step


class GrpoConfig(RunSettings):
    """A whole run."""

    name: str = Field(default="grpo", pattern=r"^\w[\w.+-]*$")  # part of a folder's name
    data: Data
    environment: Part
    rollout: Rollout
    engine: Engine
    training: Training

    def check(self) -> None:
        """Everything that can be told without reading the model.

        Raises:
            ConfigError: with every violation.
        """
        problems = self.environment.problems("environment")
        problems += self.data.problems()
        problems += self.model.problems()
        problems += self.training.problems(self.training.num_updates)
        problems += resume_problems(self.resume_from, self.training.num_steps, STATE)
        prompts, updates = self.rollout.prompts_per_step, self.training.updates_per_step
        if prompts % updates:
            problems.append(
                f"rollout.prompts_per_step must be a multiple of training.updates_per_step, got "
                f"{prompts} and {updates}; change one of them"
            )
        smallest = prompts // updates * self.rollout.group_size
        if smallest < self.training.num_ranks:
            problems.append(
                f"every rank must have a sequence in each update, got {smallest} sequences for "
                f"{self.training.num_ranks} ranks; raise rollout.prompts_per_step"
            )
        if self.rollout.max_new_tokens >= self.engine.max_model_len:
            problems.append(
                f"engine.max_model_len must exceed rollout.max_new_tokens, got "
                f"{self.engine.max_model_len} and {self.rollout.max_new_tokens}"
            )
        if self.training.max_tokens < self.engine.max_model_len:
            problems.append(
                f"training.max_tokens must hold the longest sequence, engine.max_model_len = "
                f"{self.engine.max_model_len}, got {self.training.max_tokens}"
            )
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
