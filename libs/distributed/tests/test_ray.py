"""Worker groups and the object store on a real local Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from burnish_distributed.cluster import ray_cluster
from burnish_distributed.weight_transport import get_weights, put_weights
from burnish_distributed.workers import WorkerError, WorkerGroup
from ray import cloudpickle

# Workers cannot import a module that pytest imported by path, so its classes travel as code.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL: dict[str, Any] = {"num_cpus": 0.1, "environment": {"OMP_NUM_THREADS": "1"}}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=2):
        yield


class TwoPartError(Exception):
    """Its constructor takes more than a message, which breaks naive pickling of exceptions."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class Plain:
    """A class that knows nothing of Ray."""

    def __init__(self, start: int = 0, fail_on_rank: int = -1) -> None:
        if int(os.environ["RANK"]) == fail_on_rank:
            raise ValueError(f"no such model on rank {fail_on_rank}")
        self.value = start

    def add(self, amount: int, *, factor: int = 1) -> int:
        self.value += amount * factor
        return self.value

    def slow_rank(self) -> int:
        rank = int(os.environ["RANK"])
        time.sleep(0.4 * (1 - rank))
        return rank

    def environment(self) -> dict[str, str]:
        return {**os.environ, "hash": str(hash("burnish"))}

    def lock(self) -> Any:
        return threading.Lock()  # cannot be pickled

    def no_number(self) -> int:
        return int("seven")

    def fail_on_rank_1(self, how: str) -> None:
        if os.environ["RANK"] == "0":
            time.sleep(600)
        if how == "raise":
            raise TwoPartError(7, "reward was a string")
        os._exit(3)

    def first_values(self, references: list[Any]) -> dict[str, Any]:
        return {name: (str(t.dtype), t.float().sum().item()) for name, t in get_weights(references)}


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    """Workers of all tests that leave them alive."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "123", "BURNISH_TEST": "here"}
    group = WorkerGroup(
        Plain, {"start": 5}, num_workers=2, name="adders", num_cpus=0.1, environment=environment
    )
    yield group
    group.close()


def is_running(pid: int) -> bool:
    try:
        # A zombie is only an entry in its parent's table.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: list[int], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.05)


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert group.call("slow_rank") == [0, 1]  # rank 1 finishes first


def test_each_worker_keeps_its_own_state(group: WorkerGroup) -> None:
    before = group.call("add", amount=0)
    assert group.call("add", [(1,), (10,)]) == [before[0] + 1, before[1] + 10]
    assert group.call("add", [(1,), (10,)], factor=2) == [before[0] + 3, before[1] + 30]
    first, second = group.workers
    assert (first.add(0), second.add(100)) == (before[0] + 3, before[1] + 130)


def test_workers_are_processes_of_their_own(group: WorkerGroup) -> None:
    assert len({*group.pids, os.getpid()}) == 3


def test_environment_is_set_before_python_starts(group: WorkerGroup) -> None:
    first, second = group.call("environment")
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    for environment in (first, second):
        assert environment["BURNISH_TEST"] == "here"
        assert (environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "0")
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (
        second["MASTER_ADDR"],
        second["MASTER_PORT"],
    )
    # This variable decides the hash of a text, and is read when Python starts.
    expected = subprocess.check_output(
        [sys.executable, "-c", "print(hash('burnish'))"],
        env=os.environ | {"PYTHONHASHSEED": "123"},
        text=True,
    )
    assert first["hash"] == second["hash"] == expected.strip()


def test_wrong_number_of_arguments_is_refused(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"one tuple per worker \(2\), got 1"):
        group.call("add", [(1,)])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "raised RuntimeError: TwoPartError: 7: reward was a string"),
        ("exit", r"died \(ActorDiedError\); look for"),
    ],
)
def test_a_failing_rank_is_named_at_once_while_another_hangs(how: str, message: str) -> None:
    group = WorkerGroup(Plain, num_workers=2, name="policy", **SMALL)
    pids = group.pids
    assert all(map(is_running, pids))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"^worker 1 of policy {message}.*in fail_on_rank_1"):
        group.call("fail_on_rank_1", how=how)
    assert time.monotonic() - start < 30  # not the ten minutes of rank 0
    group.close()
    assert_gone(pids)
    group.close()  # a second time does nothing


def test_a_result_that_does_not_pickle_is_named(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"worker 0 of adders .*cannot pickle .*lock"):
        group.workers[0].lock()


def test_an_exception_that_pickles_stays_what_it_was(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"raised ValueError: invalid literal.*'seven'") as caught:
        group.workers[0].no_number()
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'int("seven")' in str(caught.value.__cause__)  # the worker's traceback


def test_a_worker_is_of_use_after_it_raised(group: WorkerGroup) -> None:
    _, second = group.workers
    before = second.add(0)
    with pytest.raises(WorkerError, match=r"worker 1 of adders raised TypeError.*in add"):
        second.add("text")
    assert second.add(1) == before + 1


def test_an_unknown_method_names_the_class(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="'Plain' object has no attribute 'subtract'"):
        group.call("subtract")


def test_a_constructor_that_raises_takes_the_group_down() -> None:
    with pytest.raises(WorkerError, match="worker 1 of Plain raised ValueError: no such model"):
        WorkerGroup(Plain, {"fail_on_rank": 1}, num_workers=2, **SMALL)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 28])
def test_weights_through_the_object_store(bucket_bytes: int) -> None:
    torch.manual_seed(0)
    weights = {
        "plain": torch.randn(100, 100),
        "bfloat16": torch.randn(8).bfloat16(),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    references = put_weights(weights.items(), bucket_bytes)
    assert len(references) == (1 if bucket_bytes > 1 else 5)
    got = dict(get_weights(references))
    assert list(got) == list(weights)
    for name, tensor in weights.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_weights_reach_another_process(group: WorkerGroup) -> None:
    references = put_weights({"w": torch.ones(3, 2).t(), "b": torch.ones(4).bfloat16()}.items())
    expected = {"w": ("torch.float32", 6.0), "b": ("torch.bfloat16", 4.0)}
    assert group.call("first_values", references=references) == [expected, expected]


LEAVES_NOTHING = """
import os
import sys
import time
from collections import Counter
from pathlib import Path

from burnish_distributed.cluster import ray_cluster
from burnish_distributed.workers import WorkerGroup


def parents():
    table = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            table[int(stat.parent.name)] = int(fields[1])
    return table


def descendants(pid, table):
    children = [child for child, parent in table.items() if parent == pid]
    return {*children}.union(*(descendants(child, table) for child in children))


started = set()
try:
    with ray_cluster(num_cpus=1):
        group = WorkerGroup(Counter, {"a": 2}, num_cpus=0.1)
        assert group.call("total") == [2]
        started = descendants(os.getpid(), parents())
        assert {*group.pids} < started and len(started) > 3, started
        raise KeyboardInterrupt  # Ctrl-C, with the group still open
except KeyboardInterrupt:
    pass
group.close()  # after Ray is gone: nothing to do
deadline = time.monotonic() + 20
while started & parents().keys():
    if time.monotonic() > deadline:
        sys.exit(f"still running: {started & parents().keys()}")
    time.sleep(0.1)
print("nothing left")
"""


def test_no_ray_process_is_left_after_the_cluster() -> None:
    output = subprocess.run(
        [sys.executable, "-c", LEAVES_NOTHING],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert output.stdout == "nothing left\n", output.stderr[-2000:]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_an_address_that_is_not_there_is_an_error_at_once(address: str) -> None:
    with pytest.raises(ConnectionError, match=f"running Ray cluster, got {address}"):
        ray_cluster(address).__enter__()
