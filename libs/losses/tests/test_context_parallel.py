"""Two real ranks, each with its zig-zag part of a pack, give the loss and gradients of one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from burnish_losses import gather_context_parallel, logprobs_from_hidden, sequence_sums
from torch import Tensor

# A pack of sequences of 8 and 4 positions, cp 2: a rank holds the outer or the inner quarters.
HELD = [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
CU_SEQLENS = torch.tensor([0, 8, 12], dtype=torch.int32)
D, V = 3, 7


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss_of(logprobs: Tensor) -> Tensor:
    """Of sequences, and not linear: no rank could compute it from its part."""
    return (
        sequence_sums(logprobs, CU_SEQLENS).square().sum()
        + (logprobs * torch.arange(12).double()).sum()
    )


def model(held: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and head, and the log-probs of the held tokens."""
    hidden, weight = randn(12, D, seed=0)[held], randn(V, D, seed=1)
    labels = torch.randint(V, (12,), generator=torch.Generator().manual_seed(2))[held]
    hidden.requires_grad_(), weight.requires_grad_()
    return hidden, weight, logprobs_from_hidden(hidden, weight, labels)


def order_of(held: list[list[int]]) -> Tensor:
    """Where each token of the pack lies in the shards, concatenated."""
    return torch.tensor([position for shard in held for position in shard]).argsort()


def test_two_ranks_give_the_loss_and_gradients_of_one(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The ranks import this module by the name pytest gave it: its path from the root.
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(run_rank, (f"file://{tmp_path}/store", tmp_path), nprocs=2)
    hidden, weight, logprobs = model(list(range(12)))
    loss = loss_of(logprobs)
    loss.backward()
    for rank in range(2):
        results = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(results["whole"], logprobs.detach())
        torch.testing.assert_close(results["loss"], loss.detach())
        torch.testing.assert_close(results["hidden"], hidden.grad[HELD[rank]])
        torch.testing.assert_close(results["weight"], weight.grad)
        # Negative controls: shards in the order of the ranks, and a mean of the ranks' gradients.
        assert (results["unordered loss"] - loss).abs() > 0.1
        assert (results["weight"] / 2 - weight.grad).abs().max() > 0.1


def run_rank(rank: int, store: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    hidden, weight, logprobs = model(HELD[rank])
    whole = gather_context_parallel(logprobs, order_of(HELD), dist.group.WORLD)
    loss = loss_of(whole)
    loss.backward()
    dist.all_reduce(weight.grad)
    unordered = gather_context_parallel(logprobs, torch.arange(12), dist.group.WORLD)
    results = {
        "whole": whole,
        "loss": loss,
        "hidden": hidden.grad,
        "weight": weight.grad,
        "unordered loss": loss_of(unordered),
    }
    torch.save({name: x.detach() for name, x in results.items()}, directory / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_one_process_without_a_group_reorders_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    whole = gather_context_parallel(values, torch.tensor([2, 0, 1]), None)
    assert whole.tolist() == [3.0, 1.0, 2.0]
    (whole * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
    assert values.grad.tolist() == [20.0, 30.0, 10.0]


def test_gradcheck_and_trailing_dimensions() -> None:
    order = torch.tensor([2, 0, 1])
    assert torch.autograd.gradcheck(
        lambda values: gather_context_parallel(values, order, None),
        randn(3, 2, seed=0).requires_grad_(),
    )


def test_no_tokens_stay_attached() -> None:
    values = torch.zeros(0, requires_grad=True)
    whole = gather_context_parallel(values, torch.zeros(0, dtype=torch.int64), None)
    whole.sum().backward()
    assert values.grad.shape == (0,)


def test_a_wrong_order_is_named() -> None:
    with pytest.raises(ValueError, match=r"order must be int64 \[1 \* 3\]"):
        gather_context_parallel(torch.zeros(3), torch.arange(4), None)
    with pytest.raises(ValueError, match="order must be int64"):
        gather_context_parallel(torch.zeros(3), torch.arange(3).int(), None)
    for order in ([0, 0, 2], [0, 1, -1], [0, 1, 3]):
        with pytest.raises(ValueError, match="order must hold each of the 3 places once"):
            gather_context_parallel(torch.zeros(3), torch.tensor(order), None)
