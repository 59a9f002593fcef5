"""The command with one thing broken: ``python patched.py <what> grpo --recipe ... key=value``."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from burnish_apps.grpo import stages, workers
from burnish_apps.shell import model as model_module
from burnish_apps.shell.cli import main
from burnish_converters.safetensors_io import read_weights
from burnish_generation import Replicas


def lose_weights() -> None:
    """Every weight sync sends the weights the run began with: only the version rises."""
    models: list[Path] = []
    resolve_model = model_module.resolve_model

    def resolve(source: str, cache: Path) -> Path:
        models.append(resolve_model(source, cache))
        return models[-1]

    def sync(policy: Any, engines: Replicas, weight_version: int) -> None:
        engines.update_weights(partial(read_weights, models[-1]), weight_version)

    model_module.resolve_model = resolve  # type: ignore[assignment]
    stages.sync_weights = sync  # type: ignore[assignment]


def show_engine() -> None:
    """Write the engine's process id to ``engine.pid`` in the working directory."""
    start = workers.start

    def start_and_tell(*arguments: Any) -> Any:
        policy, engines = start(*arguments)
        group = engines.engines[0]._group  # type: ignore[attr-defined]
        Path("engine.pid.new").write_text(str(group.pids[0]))
        Path("engine.pid.new").rename("engine.pid")
        return policy, engines

    workers.start = start_and_tell  # type: ignore[assignment]


if __name__ == "__main__":
    {"lose_weights": lose_weights, "show_engine": show_engine}[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
