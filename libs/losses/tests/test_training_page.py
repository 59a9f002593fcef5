"""The page on training loops: one gradient, accumulated or on two ranks, of the whole batch."""

import contextlib
import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from burnish_losses import combine_metrics, count, finalize, nll_loss, total
from torch import Tensor

PAGE = Path(__file__).parents[3] / "docs" / "libraries" / "losses-training.md"


def training_page() -> dict[str, Any]:
    """The names of the page after its blocks, with the gradients of its accumulation."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    return names


def gradients_of(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def whole_batch(page: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of each row by itself, without padding, put together by hand."""
    model = copy.deepcopy(page["model"])
    model.zero_grad()
    nlls = []
    for row, prompt_length in zip(page["rows"], page["prompt_lengths"], strict=True):
        scores = model.head(model.layer(model.embedding(row[None]))[0][0]).log_softmax(-1)
        of_next = scores[:-1].gather(1, row[1:, None])[:, 0]
        nlls.append(-of_next[max(prompt_length, 1) - 1 :])
    loss = torch.cat(nlls).mean()
    loss.backward()
    return loss.item(), gradients_of(model)


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    page = training_page()
    loss, gradients = whole_batch(page)
    assert_same(gradients_of(page["model"]), gradients)
    metrics = finalize(combine_metrics(page["metrics"]), page["counts"])
    assert metrics["nll"] == pytest.approx(loss, rel=1e-5)
    # Negative control: each micro-batch divided by its own count.
    model = page["model"]
    model.zero_grad()
    for batch in page["micro_batches"]:
        output = nll_loss(model(batch["token_ids"], batch["token_mask"]), batch)
        (total(output.terms, count(batch)) / 3).backward()
    assert (gradients_of(model)[0] - gradients[0]).abs().max() > 1e-3


def test_two_ranks_leave_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The ranks import this module by the name pytest gave it: its path from the root.
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(run_rank, (f"file://{tmp_path}/store", tmp_path), nprocs=2)
    loss, gradients = whole_batch(training_page())
    for rank in range(2):
        for result in torch.load(tmp_path / f"rank{rank}.pt"):
            assert_same(result["gradients"], gradients)
            assert result["nll"] == pytest.approx(loss, rel=1e-5)
            # Negative control: the mean over ranks, as DDP takes it.
            assert (result["gradients"][0] / 2 - gradients[0]).abs().max() > 1e-3


def run_rank(rank: int, store: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    page = training_page()
    ddp_model = torch.nn.parallel.DistributedDataParallel(page["model"])
    micro_batches = page["micro_batches"]
    nothing = page["padded_columns"]([torch.tensor([1])], [1])
    results = []
    # More than one on the first rank, so that some are under no_sync; then nothing on the second.
    for of_ranks in (micro_batches[:2], micro_batches[2:]), (micro_batches, [nothing]):
        page["model"].zero_grad()
        metrics = page["backward_on_ranks"](ddp_model, of_ranks[rank])
        results.append({"gradients": gradients_of(page["model"]), "nll": metrics["nll"]})
    torch.save(results, directory / f"rank{rank}.pt")
    dist.destroy_process_group()
