"""Pytest settings of the whole repository.

Tests that need a GPU are skipped without one, and counted. Hypothesis sets no deadline on examples:
the first is slow on a busy machine, and pytest-timeout stops what hangs.
"""

import importlib.util

import pytest

if importlib.util.find_spec("hypothesis"):  # not every library's tests use it
    import hypothesis

    hypothesis.settings.register_profile("burnish", deadline=None)
    hypothesis.settings.load_profile("burnish")

SKIPPED_FOR_GPU = pytest.StashKey[int]()


def has_gpu() -> bool:
    """Whether torch is installed and sees a CUDA device."""
    if not importlib.util.find_spec("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    skipped = [] if not marked or has_gpu() else marked
    for item in skipped:
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    config.stash[SKIPPED_FOR_GPU] = len(skipped)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say how much was left out for want of a GPU."""
    count = config.stash.get(SKIPPED_FOR_GPU, 0)
    terminalreporter.write_line(f"{count} tests skipped because they need a GPU")
