"""Reinforcement learning of a language model with group-relative rewards (GRPO).

Each step samples `rollout.group_size` answers to `rollout.prompts_per_step` problems with vLLM,
judges them, raises the probability of answers better than their group's mean, and loads the new
weights into the running engine. On-policy, one model on any number of FSDP2 ranks, any number of
engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from burnish_data import render_prompt
from burnish_distributed.cluster import ray_cluster
from burnish_generation import Sampling
from burnish_tracking import Timers

from burnish_apps.grpo import stages, workers
from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.grpo.inputs import enter_environment, load_rows, make_loader
from burnish_apps.grpo.preflight import preflight
from burnish_apps.grpo.report import Report
from burnish_apps.shell.config import load_config, save_config
from burnish_apps.shell.model import load_tokenizer, model_folder
from burnish_apps.shell.policy import num_cpus
from burnish_apps.shell.run import (
    EXIT_OK,
    interrupted_after,
    interruptible,
    make_run_directory,
    no_process_left,
)
from burnish_apps.shell.settings import is_due

RECIPES = Path(__file__).parent / "recipes"


def run(recipe: str, overrides: Sequence[str]) -> int:
    """Load the recipe, check it, and train; returns the exit code."""
    config = load_config(GrpoConfig, RECIPES, recipe, overrides)
    config.check()
    with interruptible(), no_process_left():
        main(config)
    return EXIT_OK


def main(config: GrpoConfig) -> Path:
    """The whole run; returns its directory."""
    model = model_folder(config.model)
    tokenizer = load_tokenizer(model)
    train_rows, validation_rows = load_rows(config)
    preflight(config, model, tokenizer, [*train_rows, *validation_rows])
    loader = make_loader(config, train_rows)
    render = partial(render_prompt, tokenizer)
    decode = partial(stages.decode, tokenizer)
    timers = Timers()

    with ExitStack() as stack:
        environment = enter_environment(config, stack)
        run_dir = make_run_directory(config.run_dir, config.name)
        save_config(config, run_dir / "config.yaml")
        output = stack.enter_context(Report(run_dir, config))
        output.say(f"run directory: {run_dir}")
        output.say("starting the policy and the engine, about a minute")
        with interrupted_after():  # a half-started Ray does not end cleanly
            cpus = num_cpus(config.training.num_ranks + config.engine.num_engines)
            stack.enter_context(ray_cluster(config.ray_address, num_cpus=cpus))
        policy, engines = workers.start(config, model)

        done, weight_version, failed_steps = 0, 0, 0
        if config.resume_from:
            state = policy.load(Path(config.resume_from).resolve())
            done, weight_version = state["step"], state["weight_version"]
            stages.sync_weights(policy, engines, weight_version)

        validate = partial(
            stages.evaluate, validation_rows, environment, engines, config, render, decode
        )
        with timers("validation"):
            metrics, groups = validate()
        output.log(done, metrics | timers.take(), groups)
        stages.check_judged(groups)

        output.start_progress(done)
        for step in range(done + 1, config.training.num_steps + 1):
            with timers("generation"):
                groups = stages.sample(
                    next(loader),
                    environment,
                    engines,
                    training_sampling(config),
                    group_size=config.rollout.group_size,
                    render=render,
                    decode=decode,
                    seed=stages.step_seed(config.seed, step),
                )
            failed_steps = stages.count_failed_steps(groups, failed_steps)
            batch, metrics = stages.training_batch(groups, config)
            if batch is not None:
                with timers("training"):
                    metrics |= stages.update(policy, batch, config)
                stages.check_agreement(metrics, config.engine.max_mismatch)
                weight_version += 1
                with timers("weight_sync"):
                    stages.sync_weights(policy, engines, weight_version)
            if is_due(step, config.validate_every, config.training.num_steps):
                with timers("validation"):
                    held_out, _ = validate()
                metrics |= held_out
            if is_due(step, config.checkpoint_every, config.training.num_steps):
                state = {"step": step, "weight_version": weight_version}
                with timers("checkpoint"):
                    policy.save(
                        run_dir / "checkpoints" / f"step_{step:06d}",
                        state | {"loader": loader.state_dict()},
                        keep=config.keep_checkpoints,
                    )
            output.log(step, metrics | timers.take(), groups)
    return run_dir


def training_sampling(config: GrpoConfig) -> Sampling:
    """How training rollouts are drawn."""
    rollout = config.rollout
    return Sampling(rollout.max_new_tokens, temperature=rollout.temperature, stop=rollout.stop)
