"""The loop of every supervised app: train, validate on the whole held-out set, save, log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from burnish_data import Loader
from burnish_distributed import RaggedBatch, all_gather_object, rank
from burnish_distributed.cluster import ray_cluster
from burnish_tracking import Timers
from burnish_trainer.checks import on_all_ranks
from burnish_trainer.policy import Head, LossFunction
from burnish_trainer.policy_group import PolicyGroup

from burnish_apps.shell.config import save_config
from burnish_apps.shell.policy import launched_by, num_cpus, start_policy
from burnish_apps.shell.report import say
from burnish_apps.shell.run import (
    EXIT_OK,
    interrupted_after,
    interruptible,
    make_run_directory,
    no_process_left,
)
from burnish_apps.shell.settings import is_due
from burnish_apps.supervised.batches import plan
from burnish_apps.supervised.config import SupervisedConfig
from burnish_apps.supervised.data import (
    After,
    Before,
    Encode,
    EncodedRows,
    Row,
    endless,
    first,
    load_data,
    make_loader,
    same,
)
from burnish_apps.supervised.preflight import preflight
from burnish_apps.supervised.report import Line, Report

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)
Prepare = Callable[[PolicyGroup, RaggedBatch, Any], RaggedBatch]
Begin = Callable[[PolicyGroup, Sequence[EncodedRows]], None]
Evaluate = Callable[[PolicyGroup, RaggedBatch, Any, LossFunction], dict[str, float]]


def unchanged(_policy: PolicyGroup, batch: RaggedBatch, _plan: Any) -> RaggedBatch:
    """The batch as it is."""
    return batch


def nothing(_policy: PolicyGroup, _parts: Sequence[EncodedRows]) -> None:
    """Nothing is to be done."""


def evaluate(
    policy: PolicyGroup, batch: RaggedBatch, plan: Any, loss_fn: LossFunction
) -> dict[str, float]:
    """The loss's own metrics of the held-out rows."""
    return policy.evaluate(batch, plan, loss_fn)


@dataclass(frozen=True)
class Task:
    """What an app is to the loop: plain functions.

    Attributes:
        encode: rows of the source -> one mapping of columns, or a `BadRowError`, each; as
            `burnish_data.encode_rows` takes it. Picklable.
        before: rows of the source -> rows to encode.
        after: (encoded rows, rows that were encoded) -> rows of a batch: for columns that are too
            large to be kept.
        batch: encoded rows (see `EncodedRows`) -> a batch; `make_batch` does the most of it.
        loss_fn: of a micro-batch; can be imported in the workers.
        step_line: what the line of a step shows, from its metrics. Those of the loss are named
            ``train/<name>``, of the held-out rows ``validation/<name>``.
        held_out_line: what is shown of the held-out rows.
        curve: the metric of the picture, ``train/<name>``; that of the held-out rows is its
            counterpart.
        begin: called once with the rows to train on and the held-out ones, before the first step,
            and before a run that is resumed loads its weights.
        prepare: called with every batch before it is trained or evaluated, and its plan; may add
            columns, and must not reorder or drop sequences.
        evaluate: gives the metrics of the held-out rows.
        head: what the model gives to the loss.
        reference: whether the policy keeps its first weights, for ``reference_logprobs``.
    """

    encode: Encode
    batch: Callable[[Sequence[Row]], RaggedBatch]
    loss_fn: LossFunction
    step_line: Line
    held_out_line: Line
    curve: str = "train/loss"
    before: Before = same
    after: After = first
    begin: Begin = nothing
    prepare: Prepare = unchanged
    evaluate: Evaluate = evaluate
    head: Head = "language"
    reference: bool = False


def train(config: SupervisedConfig, model: Path, task: Task) -> Path:
    """The whole run; returns its directory.

    Args:
        config: checked by its own `check`.
        model: the checkpoint folder of ``config.model``.
        task: the app.

    Raises:
        ConfigError: for what only shows with model and data at hand; before anything is started.
    """
    training = config.training
    train_rows, held_out_rows = load_data(config, task.encode, task.before, task.after)
    say(f"training rows: {train_rows}")
    say(f"held-out rows: {held_out_rows}")
    loader = make_loader(config, train_rows)
    num_steps = training.steps(len(loader))
    preflight(config, model, [train_rows, held_out_rows], num_steps, reference=task.reference)
    timers = Timers()

    with ExitStack() as stack:
        run_dir = new_run_directory(config)
        report = stack.enter_context(make_report(run_dir, num_steps, task))
        report.say(f"run directory: {run_dir}")
        policy = start(config, model, task, num_steps, stack)
        task.begin(policy, [train_rows, held_out_rows])
        done = 0
        if config.resume_from:
            done = policy.load(Path(config.resume_from).resolve())["step"]

        held_out = task.batch(list(held_out_rows.rows))
        held_out_plan = plan(held_out, training, policy.num_ranks)
        with timers("preparation"):
            held_out = task.prepare(policy, held_out, held_out_plan)
        counts = train_rows.counts("train") | held_out_rows.counts("validation")
        with timers("validation"):
            metrics = task.evaluate(policy, held_out, held_out_plan, task.loss_fn)
        report.log(done, counts | named("validation", metrics) | timers.take())

        report.start_progress(done)
        for step, rows in zip(range(done + 1, num_steps + 1), endless(loader), strict=False):
            batch = task.batch(rows)
            batch_plan = plan(batch, training, policy.num_ranks)
            with timers("preparation"):
                batch = task.prepare(policy, batch, batch_plan)
            with timers("training"):
                metrics = policy.train_step(batch, batch_plan, task.loss_fn)
            metrics = named("train", metrics) | progress(step, batch, loader)
            if is_due(step, config.validate_every, num_steps):
                with timers("validation"):
                    found = task.evaluate(policy, held_out, held_out_plan, task.loss_fn)
                metrics |= named("validation", found)
            if is_due(step, config.checkpoint_every, num_steps):
                with timers("checkpoint"):
                    policy.save(
                        run_dir / "checkpoints" / f"step_{step:06d}",
                        {"step": step, "loader": loader.state_dict()},
                        keep=config.keep_checkpoints,
                    )
            report.log(step, metrics | timers.take())
    return run_dir


def run_task(config: ConfigT, main: Callable[[ConfigT], object]) -> int:
    """Check a config and run it, as one of torchrun's ranks if need be; returns the exit code."""
    config.check()
    ranks = launched_by(config.launcher, config.training.num_ranks)
    with interruptible(), no_process_left(), ranks:
        main(config)
    return EXIT_OK


def new_run_directory(config: SupervisedConfig) -> Path:
    """The run's directory, with its config; the first rank makes it for all."""
    run_dir = None
    with on_all_ranks():
        if rank() == 0:
            run_dir = make_run_directory(config.run_dir, config.name)
            save_config(config, run_dir / "config.yaml")
    made: Path = all_gather_object(run_dir)[0]
    return made


def start(
    config: SupervisedConfig, model: Path, task: Task, num_steps: int, stack: ExitStack
) -> PolicyGroup:
    """The ranks, and what they run on; both end with ``stack``."""
    if config.launcher == "ray":
        with interrupted_after():  # a half-started Ray does not end cleanly
            cpus = num_cpus(config.training.num_ranks)
            stack.enter_context(ray_cluster(config.ray_address, num_cpus=cpus))
    policy = start_policy(
        config.model,
        model,
        config.training,
        num_updates=num_steps,
        seed=config.seed,
        launcher=config.launcher,
        head=task.head,
        reference=task.reference,
    )
    stack.callback(policy.close)
    return policy


def make_report(run_dir: Path, num_steps: int, task: Task) -> Report:
    """The report of the run."""
    return Report(
        run_dir,
        num_steps,
        curve=task.curve,
        step_line=task.step_line,
        held_out_line=task.held_out_line,
    )


def named(part: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics with the part they are of in front, where they do not have it."""
    return {k if k.startswith(f"{part}/") else f"{part}/{k}": v for k, v in metrics.items()}


def progress(step: int, batch: RaggedBatch, loader: Loader[Row]) -> dict[str, float]:
    """How much was read."""
    return {
        "train/num_input_tokens": float(batch.num_tokens),
        "train/epoch": step / len(loader),
    }
