"""One answer, however a batch is cut: the proof that every objective of the library goes through.

Every objective is computed on a small model in float64 whose outputs are log-probs, entropies,
values, logits and one score a sequence, as one whole; with padding inside the rows; in
micro-batches; and on two processes. Loss, gradients and metrics must be the same, and two ways of
doing it wrong must not be.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from burnish_losses import (
    LossOutput,
    combine_metrics,
    constant_length,
    count,
    finalize,
    grpo_loss,
    logprobs_from_hidden,
    sequence_mean,
    sequence_sum,
    token_mean,
    total,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HIDDEN, VOCABULARY = 4, 7
Columns = dict[str, Tensor]
# (outputs of the model, columns) -> terms and metrics.
Objective = Callable[[Mapping[str, Tensor], Columns], LossOutput]


def of_logprobs(loss: Callable[..., LossOutput], **settings: object) -> Objective:
    return lambda outputs, batch: loss(outputs["logprobs"], batch, **settings)


OBJECTIVES: dict[str, Objective] = {
    "grpo": of_logprobs(grpo_loss, kl_coefficient=0.1),
    "grpo, sequence mean": of_logprobs(grpo_loss, kl_coefficient=0.1, aggregate=sequence_mean),
    "grpo, sequence sum": of_logprobs(grpo_loss, kl_coefficient=0.1, aggregate=sequence_sum),
    "grpo, constant": of_logprobs(grpo_loss, kl_coefficient=0.1, aggregate=constant_length(20)),
    "grpo, token mean": of_logprobs(grpo_loss, aggregate=token_mean),
}


def make_pairs(num_pairs: int, seed: int = 0) -> list[Columns]:
    """Sequences 2k and 2k + 1 are a pair: chosen, rejected. Token columns [L], others [1]."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sequences = []
    for i in range(2 * num_pairs):
        length = int(torch.randint(2, 10, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0], mask[-1] = False, True
        chosen = i % 2 == 0
        sequences.append(
            {
                "hidden": randn(length, HIDDEN),
                "labels": torch.randint(VOCABULARY, (length,), generator=generator),
                "token_mask": mask,
                "nll_mask": mask & chosen,
                "advantages": randn(1).expand(length),
                "old_logprobs": -1.9 + 0.1 * randn(length),
                "reference_logprobs": -1.9 + 0.1 * randn(length),
                "sampled_logprobs": -1.9 + 0.1 * randn(length),
                "returns": randn(length),
                "old_values": randn(length),
                "teacher_logits": randn(length, VOCABULARY),
                "pair_ids": torch.tensor([i // 2]),
                "chosen": torch.tensor([chosen]),
                "desirable": torch.tensor([chosen]),
                "margins": randn(1).abs().expand(1) if chosen else torch.zeros(1).double(),
            }
        )
    return sequences


def padded(sequence: Columns, length: int) -> Columns:
    """Untrained tokens of NaN at the end, as rows of a padded batch have them."""
    num_more = length - len(sequence["token_mask"])
    result = {}
    for name, values in sequence.items():
        if len(values) == 1:  # of the sequence
            result[name] = values
            continue
        filler = torch.nan if values.is_floating_point() else 0
        more = torch.full((num_more, *values.shape[1:]), filler, dtype=values.dtype)
        result[name] = torch.cat([values, more])
    return result


def as_batch(sequences: list[Columns]) -> Columns:
    if not sequences:  # an explicit empty slot: nothing of any column
        return {name: values[:0] for name, values in as_batch(make_pairs(1)).items()} | {
            "cu_seqlens": torch.zeros(1, dtype=torch.int32)
        }
    batch = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    lengths = torch.tensor([0] + [len(s["labels"]) for s in sequences])
    return {**batch, "cu_seqlens": lengths.cumsum(0).int()}


def start_parameters() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    scalar = torch.randn(HIDDEN, generator=generator, dtype=torch.float64)
    return head.requires_grad_(), scalar.requires_grad_()


def outputs_of(parameters: tuple[Tensor, Tensor], batch: Columns) -> Columns:
    head, scalar = parameters
    hidden = batch["hidden"]
    logprobs = logprobs_from_hidden(hidden, head, batch["labels"], chunk_tokens=3)
    values = hidden @ scalar
    last = batch["cu_seqlens"][1:].long() - 1
    for _ in range(10):  # before the padding
        last = torch.where(batch["token_mask"][last], last, last - 1)
    return {
        "logprobs": logprobs,
        "values": values,
        "scores": values[last],
        "logits": hidden @ head.T,
    }


def run(
    objective: Objective,
    micro_batches: list[list[Columns]],
    counts: Mapping[str, int] | None,
    shift_mask: bool = False,
) -> tuple[Tensor, list[Tensor], list[Mapping[str, object]]]:
    """Loss, gradients and metrics. Faults: counts None, a mean each; shift_mask, off by one."""
    parameters = start_parameters()
    loss_sum, metrics = torch.zeros((), dtype=torch.float64), []
    for sequences in micro_batches:
        batch = as_batch(sequences)
        if shift_mask:
            batch["token_mask"] = batch["token_mask"].roll(1)
        output = objective(outputs_of(parameters, batch), batch)
        loss = total(output.terms, counts or count(batch)) / (1 if counts else len(micro_batches))
        loss.backward()
        loss_sum += loss.detach()
        metrics.append(output.metrics)
    zeros = [torch.zeros_like(p) for p in parameters]
    gradients = [z if p.grad is None else p.grad for p, z in zip(parameters, zeros, strict=True)]
    return loss_sum, gradients, metrics


def global_counts(sequences: list[Columns]) -> dict[str, int]:
    return count(as_batch(sequences))


def assert_same(parts, whole, counts) -> None:
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-10, atol=1e-12)
    of_parts, of_whole = (finalize(combine_metrics(result[2]), counts) for result in (parts, whole))
    assert of_parts == pytest.approx(of_whole, rel=1e-10, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_cut_gives_the_same(name: str, data: st.DataObject) -> None:
    num_pairs = data.draw(st.integers(1, 5))
    sequences = make_pairs(num_pairs, seed=data.draw(st.integers(0, 1000)))
    owners = data.draw(st.lists(st.integers(0, 2), min_size=num_pairs, max_size=num_pairs))
    cut = [
        [sequence for i, sequence in enumerate(sequences) if owners[i // 2] == slot]
        for slot in range(3)
    ]
    counts = global_counts(sequences)
    whole = run(OBJECTIVES[name], [sequences], counts)
    assert_same(run(OBJECTIVES[name], cut, counts), whole, counts)
    rows = [padded(sequence, 12) for sequence in reversed(sequences)]
    assert_same(run(OBJECTIVES[name], [rows], counts), whole, counts)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_negative_control_a_mean_of_means_and_a_shifted_mask_differ(name: str) -> None:
    sequences = make_pairs(4)
    counts = global_counts(sequences)
    whole = run(OBJECTIVES[name], [sequences], counts)
    assert abs(whole[0]) > 1e-4
    shifted = run(OBJECTIVES[name], [sequences], counts, shift_mask=True)
    for faulty in (run(OBJECTIVES[name], [sequences[:2], sequences[2:]], None), shifted):
        assert (
            max(float((f - w).abs().max()) for f, w in zip(faulty[1], whole[1], strict=True)) > 1e-3
        )


def test_two_processes_give_the_same(tmp_path: Path) -> None:
    """Half of the pairs on each of two ranks; gradients, counts and losses summed by gloo."""
    with pytest.MonkeyPatch.context() as patch:
        # The ranks import this module by the name pytest gave it: its path from the root.
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(run_rank, (f"file://{tmp_path}/store", tmp_path), nprocs=2)
    sequences = make_pairs(5)
    counts = global_counts(sequences)
    for name, (loss, gradients) in torch.load(tmp_path / "rank0.pt").items():
        whole = run(OBJECTIVES[name], [sequences], counts)
        torch.testing.assert_close(loss, whole[0], rtol=1e-10, atol=1e-12, msg=name)
        torch.testing.assert_close(gradients, whole[1], rtol=1e-10, atol=1e-12, msg=name)


def run_rank(rank: int, store: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    own = make_pairs(5)[:4] if rank == 0 else make_pairs(5)[4:]
    local = global_counts(own)
    summed = torch.tensor(list(local.values()))
    dist.all_reduce(summed)
    counts = dict(zip(local, summed.tolist(), strict=True))
    results = {}
    for name, objective in OBJECTIVES.items():
        loss, gradients, _ = run(objective, [own], counts)
        for tensor in (loss, *gradients):
            dist.all_reduce(tensor)
        results[name] = (loss, gradients)
    if rank == 0:
        torch.save(results, directory / "rank0.pt")
    dist.destroy_process_group()


def test_four_updates_on_one_batch_do_not_depend_on_accumulation() -> None:
    sequences = make_pairs(4)
    counts = global_counts(sequences)
    objective = OBJECTIVES["grpo"]
    weights = []
    for size in (8, 2):
        cut = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        parameters = start_parameters()
        for _ in range(4):  # the old log-probs stay those of the first pass
            for sequences_of_one in cut:
                batch = as_batch(sequences_of_one)
                total(objective(outputs_of(parameters, batch), batch).terms, counts).backward()
            with torch.no_grad():
                parameters[0].sub_(0.5 * parameters[0].grad)
            parameters[0].grad = None
        weights.append(parameters[0].detach())
    moved = (weights[0] - start_parameters()[0].detach()).abs().max()
    assert moved > 0.01
    assert (weights[0] - weights[1]).abs().max() < 1e-12 * moved
