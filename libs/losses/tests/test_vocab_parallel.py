"""The vocabulary over 2 and 4 real ranks (gloo) gives what one process gives, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from burnish_losses import (
    _chunks,
    logprobs_from_hidden,
    logprobs_from_logits,
    topk_logprobs_from_hidden,
    topk_logprobs_from_logits,
)
from torch import Tensor

M, D = 9, 4
# Rows of every rank: 13 divides by neither, and rank 1 of 4 has only one.
SHARDS = {2: [8, 5], 4: [5, 1, 4, 3]}
V = 13

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 1.5, "temperature": 1.3},
    "entropy": {"with_entropy": True},
    "entropy and softcap": {"with_entropy": True, "softcap": 1.5, "temperature": 0.7},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7, "with_entropy": True},
    "top-k and top-p": {"top_k": 6, "top_p": 0.8, "with_entropy": True},
    "mask": {"mask": torch.arange(M) != 4},
    "three labels": {"labels": 3, "with_entropy": True},
    "frozen head": {"frozen": True, "temperature": 0.7},
    "frozen head, top-k": {"frozen": True, "top_k": 3},
    "top-k of all": {"top_k": V, "top_p": 1.0},
    # The ranks' own parts would give them other numbers of chunks, and so of collectives.
    "default chunks": {"chunk_tokens": None, "top_p": 0.7},
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def run(
    rows: slice,
    options: dict[str, Any],
    group: dist.ProcessGroup | None,
    from_logits: bool,
) -> dict[str, Tensor]:
    """Results and gradients of the part of the vocabulary; hidden and labels are whole."""
    options = {"chunk_tokens": 4, **options}
    shape = (M, options.pop("labels", 1))
    labels = torch.randint(V, shape, generator=torch.Generator().manual_seed(3))
    if shape[1] == 1:
        labels = labels.squeeze(-1)
    frozen = options.pop("frozen", False)
    hidden = randn(M, D).requires_grad_()
    weight = randn(V, D, seed=1)[rows].clone().requires_grad_(not frozen)
    bias = randn(V, seed=2)[rows].clone().requires_grad_(not frozen)
    logits = (randn(M, D) @ randn(V, D, seed=1)[rows].T).requires_grad_()
    if from_logits:
        result = logprobs_from_logits(logits, labels, group=group, **options)
    else:
        result = logprobs_from_hidden(hidden, weight, labels, bias=bias, group=group, **options)
    logprobs, entropy = result if options.get("with_entropy") else (result, torch.zeros(M))
    upstream = randn(*labels.shape, seed=5)
    ((upstream * logprobs).sum() + entropy.square().sum()).backward()
    named = {"hidden": hidden, "weight": weight, "bias": bias, "logits": logits}
    gradients = {name: x.grad for name, x in named.items() if x.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **gradients}


def run_alone(rows: slice) -> tuple[Tensor, Tensor]:
    """As if the part were the vocabulary, a label of another rank being 0 there."""
    hidden, weight, bias = randn(M, D), randn(V, D, seed=1)[rows], randn(V, seed=2)[rows]
    labels = torch.randint(V, (M,), generator=torch.Generator().manual_seed(3)) - rows.start
    labels = torch.where((labels >= 0) & (labels < len(weight)), labels, 0)
    logprobs = logprobs_from_hidden(hidden.requires_grad_(), weight, labels, bias=bias)
    (randn(M, seed=5) * logprobs).sum().backward()
    return logprobs.detach(), hidden.grad


def run_topk(rows: slice, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    hidden, weight, bias = randn(M, D), randn(V, D, seed=1)[rows], randn(V, seed=2)[rows]
    settings: dict[str, Any] = {"softcap": 2.0, "group": group}
    return (
        *topk_logprobs_from_hidden(hidden, weight, 6, bias=bias, **settings),
        *topk_logprobs_from_logits(hidden @ weight.T + bias, 6, **settings),
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_give_what_one_process_gives(num_ranks: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The ranks import this module by the name pytest gave it: its path from the root.
        patch.syspath_prepend(Path(__file__).parents[3])
        arguments = num_ranks, f"file://{tmp_path}/store", tmp_path
        mp.spawn(run_rank, arguments, nprocs=num_ranks)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(num_ranks)]
    for name, options in OPTIONS.items():
        for from_logits in (False, True):
            whole = run(slice(None), options, None, from_logits)
            for rank, results in enumerate(ranks):
                rows = rows_of(num_ranks, rank)
                for key, value in results[name, from_logits].items():
                    sharded = {"weight": (rows,), "bias": (rows,), "logits": (slice(None), rows)}
                    expected = whole[key][sharded.get(key, ())]
                    torch.testing.assert_close(
                        value, expected, rtol=1e-10, atol=1e-12, msg=f"{name}, {key}, rank {rank}"
                    )
    for results in ranks:
        # Negative control: a softmax over the rank's own part, a gradient that is not summed.
        logprobs, grad_hidden = results["alone"]
        whole = run(slice(None), {}, None, False)
        assert (logprobs - whole["logprobs"]).abs().max() > 0.1
        assert (grad_hidden - whole["hidden"]).abs().max() > 0.1
        for mine, expected in zip(results["topk"], run_topk(slice(None), None), strict=True):
            torch.testing.assert_close(mine, expected)
        assert results["label error"].startswith("labels must be in [0, 13), the whole vocabulary")
        assert results["no row error"].startswith("Every rank must hold a row of the vocabulary")


def rows_of(num_ranks: int, rank: int) -> slice:
    start = sum(SHARDS[num_ranks][:rank])
    return slice(start, start + SHARDS[num_ranks][rank])


def run_rank(rank: int, num_ranks: int, store: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    group, rows = dist.group.WORLD, rows_of(num_ranks, rank)
    _chunks.CHUNK_BYTES = 128  # of float64: 2 rows of 8 columns, 3 of 5, 16 of 1
    results: dict[Any, Any] = {
        (name, from_logits): run(rows, options, group, from_logits)
        for name, options in OPTIONS.items()
        for from_logits in (False, True)
    }
    results["alone"] = run_alone(rows)
    results["topk"] = run_topk(rows, group)
    with pytest.raises(ValueError) as error:
        logprobs_from_logits(randn(1, V)[:, rows], torch.tensor([V]), group=group)
    results["label error"] = str(error.value)
    with pytest.raises(ValueError) as error:
        logprobs_from_logits(randn(1, 5 * rank), torch.tensor([0]), group=group)
    results["no row error"] = str(error.value)
    torch.save(results, directory / f"rank{rank}.pt")
    dist.destroy_process_group()
