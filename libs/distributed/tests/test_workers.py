"""The handle on a worker, without a cluster."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from burnish_distributed.workers import Worker


class Group:
    """Answers with what it is asked."""

    def submit(self, *call: Any) -> Any:
        return call

    def wait(self, submitted: list[Any], method: str, ranks: list[int]) -> list[Any]:
        return submitted


def test_a_handle_is_copied_and_pickled() -> None:
    worker: Any = Worker(Group(), 3)  # type: ignore[arg-type]
    for again in (copy.copy(worker), copy.deepcopy(worker), pickle.loads(pickle.dumps(worker))):
        assert again.add(1, b=2) == (3, "add", (1,), {"b": 2})


@pytest.mark.parametrize("name", ["__len__", "__array__", "_repr_html_"])
def test_private_names_are_no_remote_methods(name: str) -> None:
    worker = Worker(Group(), 0)  # type: ignore[arg-type]
    assert not hasattr(worker, name)
    with pytest.raises(AttributeError, match=f"'Worker' object has no attribute '{name}'"):
        getattr(worker, name)
