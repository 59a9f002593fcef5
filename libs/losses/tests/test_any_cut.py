"""One answer, however a batch is cut: the proof that every objective of the library goes through.

Every objective is computed on a small model in float64 whose outputs are log-probs, entropies,
values, logits and one score a sequence, as one whole; with padding inside the rows; in
micro-batches; and on two processes. Loss, gradients and metrics must be the same, and two ways of
doing it wrong must not be.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from burnish_losses import (
    Aggregate,
    LossOutput,
    apo_down_pair_loss,
    apo_zero_pair_loss,
    bradley_terry_loss,
    cispo_loss,
    combine_metrics,
    constant_length,
    count,
    cpo_loss,
    dapo_loss,
    distillation_loss,
    divergence_from_hidden,
    divergence_from_logits,
    dpo_loss,
    dr_grpo_loss,
    finalize,
    grpo_loss,
    gspo_loss,
    hinge_pair_loss,
    icepop_importance,
    ipo_pair_loss,
    jensen_shannon,
    kto_loss,
    logprobs_from_hidden,
    masked_importance,
    nll_loss,
    on_policy_distillation_advantages,
    orpo_loss,
    ppo_loss,
    reinforce_plus_plus_loss,
    renormalized,
    reverse_kl,
    rloo_loss,
    robust_pair_loss,
    sapo_loss,
    sequence_masked_importance,
    sequence_mean,
    sequence_product,
    sequence_sum,
    sequence_token_ratio,
    sigmoid_pair_loss,
    simpo_loss,
    token_mean,
    top_k_divergence,
    total,
    truncated_importance,
    value_loss,
    with_tail,
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


def of_logits(aggregate: Aggregate = token_mean, **settings: object) -> Objective:
    def objective(outputs: Mapping[str, Tensor], batch: Columns) -> LossOutput:
        teacher, mask = batch["teacher_logits"], batch["token_mask"]
        divergences = divergence_from_logits(outputs["logits"], teacher, mask, **settings)
        return distillation_loss(divergences, batch, aggregate=aggregate)

    return objective


def distilled_from_hidden(outputs: Mapping[str, Tensor], batch: Columns) -> LossOutput:
    student = batch["hidden"], outputs["head"]
    teacher = batch["hidden"], outputs["head"].detach().flip(0)
    divergences = divergence_from_hidden(*student, *teacher, batch["token_mask"], chunk_tokens=3)
    return distillation_loss(divergences, batch)


def distilled_top_k(support: Callable[[Tensor], Tensor]) -> Objective:
    def objective(outputs: Mapping[str, Tensor], batch: Columns) -> LossOutput:
        teacher, ids = batch["teacher_logits"].log_softmax(-1).topk(3)
        student = outputs["logits"].log_softmax(-1).gather(-1, ids)
        divergences = top_k_divergence(student, teacher, batch["token_mask"], support=support)
        return distillation_loss(divergences, batch)

    return objective


def distilled_on_policy(outputs: Mapping[str, Tensor], batch: Columns) -> LossOutput:
    columns = batch["old_logprobs"], batch["reference_logprobs"], batch["token_mask"]
    advantages = on_policy_distillation_advantages(*columns)
    return grpo_loss(outputs["logprobs"], {**batch, "advantages": advantages})


OBJECTIVES: dict[str, Objective] = {
    "grpo": of_logprobs(grpo_loss, kl_coefficient=0.1),
    "grpo, sequence mean": of_logprobs(grpo_loss, kl_coefficient=0.1, aggregate=sequence_mean),
    "grpo, sequence sum": of_logprobs(grpo_loss, kl_coefficient=0.1, aggregate=sequence_sum),
    "grpo, constant": of_logprobs(grpo_loss, kl_coefficient=0.1, aggregate=constant_length(20)),
    "grpo, token mean": of_logprobs(grpo_loss, aggregate=token_mean),
    "dr. grpo": of_logprobs(dr_grpo_loss, num_tokens=20),
    "dapo": of_logprobs(dapo_loss),
    "gspo": of_logprobs(gspo_loss, clip_low=0.5, clip_high=0.5, kl_coefficient=0.1),
    "gspo, token": of_logprobs(gspo_loss, clip_low=0.5, clip_high=0.5, ratio=sequence_token_ratio),
    "cispo": of_logprobs(cispo_loss),
    "sapo": of_logprobs(sapo_loss),
    "rloo": of_logprobs(rloo_loss),
    "reinforce++": of_logprobs(reinforce_plus_plus_loss, kl_coefficient=0.1),
    "truncated importance": of_logprobs(grpo_loss, importance=truncated_importance),
    "masked importance": of_logprobs(
        grpo_loss, importance=partial(masked_importance, level=sequence_product)
    ),
    "icepop": of_logprobs(grpo_loss, importance=partial(icepop_importance, low=0.9, high=1.2)),
    "sequence-masked importance": of_logprobs(
        grpo_loss, importance=partial(sequence_masked_importance, low=0.9)
    ),
    "ppo, entropy and nll": lambda outputs, batch: ppo_loss(
        outputs["logprobs"],
        {**batch, "entropies": outputs["entropies"]},
        entropy_coefficient=0.1,
        nll_coefficient=0.1,
    ),
    "value": lambda outputs, batch: value_loss(outputs["values"], batch),
    "nll": of_logprobs(nll_loss),
    "nll, sequence mean": of_logprobs(nll_loss, aggregate=sequence_mean),
    "dpo": of_logprobs(dpo_loss, beta=0.5),
    "dpo, smoothed and SFT": of_logprobs(
        dpo_loss,
        beta=0.5,
        pair_loss=partial(sigmoid_pair_loss, label_smoothing=0.1),
        nll_coefficient=0.3,
    ),
    "dpo, robust": of_logprobs(
        dpo_loss, beta=0.5, pair_loss=partial(robust_pair_loss, label_smoothing=0.1)
    ),
    "dpo, hinge": of_logprobs(dpo_loss, beta=0.5, pair_loss=hinge_pair_loss),
    "dpo, ipo": of_logprobs(dpo_loss, pair_loss=ipo_pair_loss, length_average=True),
    "dpo, apo zero": of_logprobs(dpo_loss, beta=0.5, pair_loss=apo_zero_pair_loss),
    "dpo, apo down": of_logprobs(dpo_loss, beta=0.5, pair_loss=apo_down_pair_loss),
    "cpo": of_logprobs(cpo_loss, beta=0.5),
    "simpo": of_logprobs(simpo_loss, label_smoothing=0.1),
    "orpo": of_logprobs(orpo_loss, beta=0.5),
    "kto": of_logprobs(kto_loss, kl_baseline=0.3, beta=0.5, undesirable_weight=1.5),
    "bradley-terry": lambda outputs, batch: bradley_terry_loss(
        outputs["scores"], batch, center_coefficient=0.1
    ),
    "distillation, forward KL": of_logits(temperature=1.5),
    "distillation, reverse KL": of_logits(aggregate=sequence_mean, divergence=reverse_kl),
    "distillation, Jensen-Shannon": of_logits(divergence=jensen_shannon(0.3)),
    "distillation, from hidden": distilled_from_hidden,
    "distillation, top-k with tail": distilled_top_k(with_tail),
    "distillation, top-k renormalised": distilled_top_k(renormalized),
    "distillation, on-policy": distilled_on_policy,
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
    mask = batch["token_mask"]

    def at_tokens(values: Tensor) -> Tensor:
        """Of trained tokens only, NaN at the others: 0 * NaN in the backward pass is NaN."""
        return values.new_full((len(mask), *values.shape[1:]), torch.nan).index_put((mask,), values)

    logits = hidden[mask] @ head.T
    scores = logits.log_softmax(-1)
    last = batch["cu_seqlens"][1:].long() - 1
    for _ in range(10):  # before the padding
        last = torch.where(batch["token_mask"][last], last, last - 1)
    return {
        "logprobs": logprobs,
        "values": at_tokens(hidden[mask] @ scalar),
        "entropies": at_tokens(-(scores.exp() * scores).sum(-1)),
        "scores": hidden[last] @ scalar,
        "logits": at_tokens(logits),
        "head": head,
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
