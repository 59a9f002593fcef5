"""Collectives: a single process is a group of one, and two are right for any memory layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import burnish_distributed as bd
import pytest
import torch


def columns() -> torch.Tensor:
    """A transposed view, float32 [3, 2]; gloo is silently wrong on such."""
    return torch.arange(6.0).reshape(2, 3).t()


def test_one_process_is_a_group_of_one() -> None:
    assert (bd.rank(), bd.world_size()) == (0, 1)
    assert bd.all_gather_object({"a": 1}) == [{"a": 1}]
    bd.barrier()


@pytest.mark.parametrize("operation", ["sum", "max", "min"])
def test_one_process_reduces_to_a_copy(operation: str) -> None:
    tensor = columns().requires_grad_()
    result = bd.all_reduce(tensor, operation)
    assert torch.equal(result, tensor.detach())
    assert not result.requires_grad
    result += 1
    assert torch.equal(tensor.detach(), columns())


def test_an_unknown_operation_is_refused_also_in_one_process() -> None:
    with pytest.raises(ValueError, match="'average'"):
        bd.all_reduce(torch.ones(1), "average")


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    bd.initialize_process_group(
        rank=rank, world_size=2, init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    mine = columns() * (1 if rank == 0 else -10)  # keeps the transposed strides
    assert not mine.is_contiguous()
    reduced = {op: bd.all_reduce(mine, op).tolist() for op in ("sum", "max", "min")}
    strided = bd.all_reduce(torch.arange(6)[rank::2], "sum").tolist()
    gathered = bd.all_gather_object({"rank": rank, "text": "x" * rank})
    bd.barrier()
    result = {
        "rank": bd.rank(),
        "world_size": bd.world_size(),
        "mine": mine.tolist(),
        "strided": strided,
        "gathered": gathered,
        **reduced,
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    # Scripts of their own: what pytest imported by path cannot be imported by name elsewhere.
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (result["rank"], result["world_size"]) == (rank, 2)
        # [[0, 3], [1, 4], [2, 5]] and -10 times it
        assert result["sum"] == [[0, -27], [-9, -36], [-18, -45]]
        assert result["max"] == [[0, 3], [1, 4], [2, 5]]
        assert result["min"] == [[0, -30], [-10, -40], [-20, -50]]
        assert result["strided"] == [1, 5, 9]  # [0, 2, 4] + [1, 3, 5]
        assert result["gathered"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
        # The input is left as it was.
        assert result["mine"] == (columns() * (1 if rank == 0 else -10)).tolist()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]))
