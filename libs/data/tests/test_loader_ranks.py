"""Loader: order, ranks, remainder, resume, batch samplers, worker processes."""

import importlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from burnish_data.loader import Loader
from burnish_data.rows import BadRowError, ListRows
from hypothesis import given
from hypothesis import strategies as st

# Worker processes import it, as they cannot import a test.
TOY = '''
import os
import signal
import time

from burnish_data.rows import BadRowError


class Squares:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index * index


class SlowAndLast(Squares):
    """Row 0, which is asked for first, comes last."""

    def __getitem__(self, index):
        time.sleep(0.3 if index == 0 else 0)
        return index


class Deadly(Squares):
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Together(Squares):
    def __getitems__(self, indices):
        return ("together", list(indices))


class Bad(Squares):
    """A later bad row is met first."""

    def __getitem__(self, index):
        if index == 7:
            raise BadRowError("no seven", index)
        if index == 5:
            time.sleep(0.5)
            raise BadRowError("no five", index, where="five.jsonl, line 6")
        return index


def total(rows):
    return sum(rows)


def large(rows):
    return bytes(3_000_000)
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy_loading.py").write_text(TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("toy_loading")


def ranks_of(num_rows: int, batch_size: int, num_ranks: int, **arguments) -> list[list[list[int]]]:
    """The batches of an epoch on every rank."""
    return [
        list(Loader(range(num_rows), batch_size, num_ranks=num_ranks, rank=rank, **arguments))
        for rank in range(num_ranks)
    ]


def test_global_batches_are_parted_among_ranks():
    assert ranks_of(10, 2, 2, shuffle=False) == [
        [[0, 1], [4, 5], [8]],
        [[2, 3], [6, 7], [9]],
    ]
    # 5 pairs, 2 ranks x 2: the last batch is one rank's, and the other has an empty one.
    assert ranks_of(5, 2, 2, shuffle=False) == [[[0, 1], []], [[2, 3], [4]]]
    assert ranks_of(11, 2, 2, shuffle=False, drop_remainder=True) == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert Loader(range(11), 2, num_ranks=2, drop_remainder=True).num_dropped == 3
    assert Loader(range(11), 2, num_ranks=2).num_dropped == 0


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5), st.booleans())
def test_ranks_are_disjoint_equally_long_and_together_all(
    num_rows, batch_size, num_ranks, seed, shuffle
):
    ranks = ranks_of(num_rows, batch_size, num_ranks, seed=seed, shuffle=shuffle)
    lengths = {len(batches) for batches in ranks}
    assert lengths == {len(Loader(range(num_rows), batch_size, num_ranks=num_ranks))}
    seen = [row for batches in ranks for batch in batches for row in batch]
    assert sorted(seen) == list(range(num_rows))
    for batches in ranks:
        assert all(len(batch) == batch_size for batch in batches[:-1])
    sizes = [len(batches[-1]) for batches in ranks]
    assert max(sizes) - min(sizes) <= 1


def test_a_mean_over_ranks_counts_every_row_once():
    losses = [1.0, 2.0, 4.0, 8.0, 16.0]
    totals = [
        (sum(batch), len(batch))
        for rank in range(2)
        for batch in Loader(losses, 2, num_ranks=2, rank=rank)
    ]
    assert sum(total for total, _ in totals) / sum(number for _, number in totals) == 6.2


def test_epochs_differ_and_are_the_same_on_every_rank_and_in_every_version():
    loader = Loader(range(8), 8, seed=0)
    first, second = list(loader), list(loader)
    assert first == [[0, 2, 1, 4, 6, 7, 3, 5]]  # as PromptLoader's
    assert second != first
    assert sorted(second[0]) == list(range(8))
    for epoch in (first, second):
        halves = [Loader(range(8), 4, seed=0, num_ranks=2, rank=rank) for rank in range(2)]
        if epoch is second:
            for half in halves:
                list(half)
        assert [row for half in halves for row in next(iter(half))] == epoch[0]
    assert list(Loader(range(8), 8, seed=1)) != first
    assert loader.epoch == 2


@given(st.data())
def test_a_resumed_loop_goes_on_exactly(data):
    num_rows = data.draw(st.integers(1, 20))
    num_ranks = data.draw(st.integers(1, 3))
    arguments = {
        "batch_size": data.draw(st.integers(1, 4)),
        "num_ranks": num_ranks,
        "rank": data.draw(st.integers(0, num_ranks - 1)),
    }
    loader = Loader(range(num_rows), **arguments)
    whole = [(epoch, batch) for epoch in range(3) for batch in loader]
    cut = data.draw(st.integers(0, len(whole)))
    loader = Loader(range(num_rows), **arguments)
    batches = ((epoch, batch) for epoch in range(3) for batch in loader)
    list(itertools.islice(batches, cut))
    state = json.loads(json.dumps(loader.state_dict()))

    resumed = Loader(range(num_rows), **arguments)
    resumed.load_state_dict(state)
    assert resumed.epoch == loader.epoch
    rest = [(epoch, batch) for epoch in range(resumed.epoch, 3) for batch in resumed]
    assert rest == whole[cut:]


def test_the_state_says_where_the_loop_stands():
    loader = Loader(range(10), 2, num_ranks=2, rank=1, seed=7)
    for _ in itertools.islice(loader, 2):
        pass
    state = {
        "schema_version": 1,
        "num_rows": 10,
        "seed": 7,
        "shuffle": True,
        "epoch": 0,
        "position": 8,
    }
    assert loader.state_dict() == state
    list(loader)
    assert loader.state_dict() == {**state, "epoch": 1, "position": 0}


def test_a_resume_with_other_ranks_and_batches_goes_through_the_same_rows():
    loader = Loader(range(10), 2, num_ranks=2, shuffle=False)
    next(iter(loader))
    resumed = [Loader(range(10), 1, num_ranks=3, rank=rank, shuffle=False) for rank in range(3)]
    for other in resumed:
        other.load_state_dict(loader.state_dict())
    assert [list(other) for other in resumed] == [[[4], [7]], [[5], [8]], [[6], [9]]]
    # What is left fills no batch any more: the next is one of the next epoch.
    large = Loader(range(10), 4, num_ranks=2, shuffle=False, drop_remainder=True)
    large.load_state_dict(loader.state_dict())
    assert large.state_dict() == {**large.state_dict(), "epoch": 1, "position": 0}
    assert list(large) == [[0, 1, 2, 3]]


def test_breaking_and_looping_again_goes_on():
    loader = Loader(range(6), 2, shuffle=False)
    for batch in loader:
        assert batch == [0, 1]
        break
    assert list(loader) == [[2, 3], [4, 5]]
    assert next(iter(loader)) == [0, 1]
    assert loader.epoch == 1


def test_two_loops_at_once_are_refused():
    loader = Loader(range(6), 2, shuffle=False)
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(RuntimeError, match="must be its only one"):
        next(first)
    third = iter(loader)
    next(third)
    loader.load_state_dict(Loader(range(6), 2, shuffle=False).state_dict())
    with pytest.raises(RuntimeError, match="load_state_dict has moved"):
        next(third)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (Loader(range(9), 2), "num_rows it was saved with, which was 10, but this one has 9"),
        (Loader(range(10), 2, seed=1), "seed it was saved with, which was 0, but this one has 1"),
        (Loader(range(10), 2, shuffle=False), "shuffle .* was True, but this one has False"),
    ],
)
def test_other_rows_or_another_order_is_refused(other, error):
    loader = Loader(range(10), 2)
    next(iter(loader))
    before = other.state_dict()
    with pytest.raises(ValueError, match=error):
        other.load_state_dict(loader.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"position": 10}, "position must be .* below that of an epoch, 10, got 10"),
        ({"position": -1}, "position must be a whole number, 0 or more, got -1"),
        ({"position": None}, "position must be .* got None"),
        ({"epoch": True}, "epoch must be .* got True"),
        ({"schema_version": 2}, "schema_version it was saved with, which was 2, .* has 1"),
    ],
)
def test_a_state_that_cannot_be_is_refused(change, error):
    loader = Loader(range(10), 2)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=error):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": None}, "either a batch_size or a batch_sampler, got neither"),
        ({"batch_sampler": [[0]]}, "either a batch_size or a batch_sampler, got both"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more, got 0"),
        ({"num_ranks": 2, "rank": 2}, "rank must be less than num_ranks, got rank 2 of 2 ranks"),
        ({"rank": -1}, "rank must be .* got -1"),
        ({"num_workers": -1}, "num_workers must be .* 0 or more, got -1"),
        ({"ahead": 0}, "ahead must be .* 1 or more, got 0"),
        ({"num_ranks": 6, "drop_remainder": True}, "got 10 rows for 6 ranks x 2"),
        (
            {"batch_size": None, "batch_sampler": [[0]], "seed": 3, "rank": 1},
            "its own, got seed, rank as well",
        ),
        ({"batch_size": None, "batch_sampler": iter([[0]])}, "iterable anew .* got a list_iter"),
        ({"batch_size": None, "batch_sampler": 4}, "iterable anew in every epoch, got a int"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        Loader(range(10), **{"batch_size": 2, **arguments})
    with pytest.raises(ValueError, match="at least one row, got none"):
        Loader([], 2)


def test_rows_are_collated_and_fetched_together_where_they_can_be(toy: ModuleType):
    loader = Loader(toy.Squares(), 3, shuffle=False, collate=toy.total)
    assert next(iter(loader)) == 0 + 1 + 4
    assert next(iter(Loader(toy.Together(), 3, shuffle=False))) == ("together", [0, 1, 2])
    # An empty batch is collated too: of one row for two ranks, the first rank gets none.
    assert list(Loader([1], 2, num_ranks=2, rank=0, shuffle=False, collate=sum)) == [0]
    assert list(Loader([1], 2, num_ranks=2, rank=1, shuffle=False, collate=sum)) == [1]


class Sampler:
    """Batches in an order of the epoch's own, with a state that only this seed takes."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.epoch, self.start = seed, 0, 0

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        start, self.start = self.start, 0
        yield from [[10 * self.epoch + i] for i in range(3)][start:]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self, num_used: int) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "num_used": num_used}

    def load_state_dict(self, state) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"the seed must be {self.seed}, got {state['seed']}")
        self.epoch, self.start = state["epoch"], state["num_used"]


class Counting(Sampler):
    """Its state counts what it gave out, which is not what the loop has used."""

    def state_dict(self):
        raise AssertionError("not to be asked")


@pytest.mark.parametrize("sampler", [Sampler, Counting])
@pytest.mark.parametrize("num_used", [0, 1, 2, 3, 4, 6])
def test_a_batch_sampler_is_told_the_epoch_and_resumed(sampler, num_used):
    loader = Loader(range(30), batch_sampler=sampler())
    assert len(loader) == 3
    batches = (batch for _ in range(3) for batch in loader)
    used = list(itertools.islice(batches, num_used))
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["num_used"]) == divmod(num_used, 3)
    assert ("batch_sampler" in state) == (sampler is Sampler)

    resumed = Loader(range(30), batch_sampler=sampler())
    resumed.load_state_dict(state)
    rest = [batch for _ in range(resumed.epoch, 3) for batch in resumed]
    assert used + rest == [[0], [1], [2], [10], [11], [12], [20], [21], [22]]


def test_a_batch_sampler_may_refuse_a_state_and_the_loader_stays():
    loader = Loader(range(30), batch_sampler=Sampler(seed=1))
    next(iter(loader))
    other = Loader(range(30), batch_sampler=Sampler(seed=2))
    with pytest.raises(ValueError, match="the seed must be 2, got 1"):
        other.load_state_dict(loader.state_dict())
    assert list(other) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="state of this batch sampler must be in the loader's"):
        other.load_state_dict(Loader(range(30), batch_sampler=[[0], [1]]).state_dict())


@pytest.mark.parametrize(
    "others",
    [
        [[0, 2], [1], [3]],  # another first batch
        [[0], [1, 2], [3]],  # the same rows, cut elsewhere
        [[0, 1]],  # fewer: none is left
    ],
)
def test_a_list_of_batches_must_be_that_of_before(others):
    loader = Loader(range(4), batch_sampler=[[0, 1], [2], [3]])
    list(itertools.islice(loader, 2))
    resumed = Loader(range(4), batch_sampler=others)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="must give again the 2 batches that are used of epoch 0"):
        next(iter(resumed))


def test_a_batch_sampler_without_batches_is_refused():
    with pytest.raises(ValueError, match="must give a batch in epoch 0 after the 0 that are used"):
        next(iter(Loader(range(4), batch_sampler=[])))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_give_the_same_batches_over_epochs_and_after_a_resume(toy, num_workers):
    alone = Loader(toy.Squares(), 3, seed=5, collate=toy.total)
    loader = Loader(toy.Squares(), 3, seed=5, collate=toy.total, num_workers=num_workers)
    expected = [batch for _ in range(2) for batch in alone]
    got = list(loader)
    processes = list(loader._workers._processes)
    got += list(itertools.islice(loader, 2))
    assert loader._workers.closed  # a loop that was broken off
    assert not any(process.is_alive() for process in processes)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 6)  # not what the workers have fetched
    resumed = Loader(toy.Squares(), 3, seed=5, collate=toy.total, num_workers=num_workers)
    resumed.load_state_dict(state)
    got += list(resumed)
    assert got == expected
    resumed.close()
    assert resumed._workers.closed


def test_workers_answer_in_order_and_stay_for_the_next_epoch(toy: ModuleType):
    loader = Loader(toy.SlowAndLast(), 1, shuffle=False, num_workers=2, ahead=3)
    assert list(loader) == [[row] for row in range(20)]
    pids = [process.pid for process in loader._workers._processes]
    assert list(loader) == [[row] for row in range(20)]
    assert [process.pid for process in loader._workers._processes] == pids
    loader.close()


def test_large_batches_pass_while_nobody_reads(toy: ModuleType):
    loader = Loader(toy.Squares(), 2, collate=toy.large, num_workers=2, ahead=3)
    for batch in loader:
        time.sleep(0.02)
        assert len(batch) == 3_000_000
    loader.close()


def test_a_worker_that_dies_is_an_error_and_ends_the_others(toy: ModuleType):
    loader = Loader(toy.Deadly(), 2, shuffle=False, num_workers=2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"got the end of worker 0 .* by signal SIGKILL"):
        list(loader)
    assert time.monotonic() - begin < 60  # two imports on a loaded machine; the rest is no wait
    assert loader._workers.closed
    assert multiprocessing.active_children() == []
    assert loader.state_dict()["position"] <= 4  # not past the batch that never came


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_says_its_place_from_a_worker_too(toy: ModuleType, num_workers: int):
    loader = Loader(toy.Bad(), 2, shuffle=False, num_workers=num_workers)
    with pytest.raises(BadRowError, match=r"five\.jsonl, line 6: expected no five, got 5"):
        list(loader)
    assert loader.state_dict()["position"] == 4


def test_rows_of_files_are_read_like_lists():
    rows = ListRows("abcd", "letters").map(str.upper)
    assert list(Loader(rows, 3, shuffle=False)) == [["A", "B", "C"], ["D"]]


SCRIPT = """
import time
from toy_loading import Squares
from burnish_data.loader import Loader

if __name__ == "__main__":
    for batch in Loader(Squares(), 1, num_workers=2):
        print(batch, flush=True)
        time.sleep(600)
"""


def heed_interrupts() -> None:
    """A background job, as this test run may be, ignores them, and so would its child."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(toy: ModuleType, tmp_path: Path, number):
    (tmp_path / "script.py").write_text(SCRIPT)
    script = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(toy.__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    assert script.stdout is not None
    assert script.stdout.readline()
    assert len(members(script.pid)) >= 3  # itself and its workers: the control of the check below
    (os.killpg if number == signal.SIGINT else os.kill)(script.pid, number)
    script.communicate(timeout=60)
    assert script.returncode == -number
    end = time.monotonic() + 60
    while members(script.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def members(group: int) -> list[int]:
    """The processes of a process group, but for those that have ended and wait to be reaped."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
