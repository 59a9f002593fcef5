"""What a group of workers asks of a cluster, without a cluster."""

from typing import Any

import pytest
import ray
from burnish_distributed.workers import WorkerError, WorkerGroup


class FakeActor:
    """Ray's actor class, actor and method in one; nothing it is asked is ever done."""

    def __getattr__(self, _name: str) -> Any:
        return FakeActor()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return FakeActor()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A cluster of 2 cores and 1 GPU on which nothing is placed; the actors made."""
    actors: list[Any] = []

    def remote(cls: type) -> FakeActor:
        actors.append(cls)
        return FakeActor()

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray, "wait", lambda pending, **_: ([], pending))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return actors


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_workers": 3}, "3 workers ask for 3 CPUs of 2 that it has"),
        ({"num_gpus": 2}, "1 workers ask for 2 GPUs of 1"),
        ({"num_workers": 3, "num_gpus": 0.5}, "3 CPUs of 2 and 1.5 GPUs of 1"),
    ],
)
def test_more_than_the_cluster_has(made: list[Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerGroup(dict, name="policy", **asked)
    assert made == []


def test_a_cluster_without_gpus(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ValueError, match=r"policy must fit the cluster, but .* 1 GPUs of 0 that"):
        WorkerGroup(dict, name="policy", num_gpus=1)


@pytest.mark.parametrize("asked", [{"num_workers": 2, "num_gpus": 0.5}, {"num_cpus": 2}])
def test_what_fits_but_gets_no_place(made: list[Any], asked: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match=r"workers of policy did not answer within 0\.01 s"):
        WorkerGroup(dict, name="policy", placement_timeout_s=0.01, **asked)
    assert len(made) == 1


def test_fractions_add_up_inexactly(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 0.3})
    with pytest.raises(WorkerError):
        WorkerGroup(dict, num_workers=3, num_cpus=0.1, placement_timeout_s=0.01)
