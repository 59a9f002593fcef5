"""Loss, gradients, metrics and weights do not depend on how a batch is cut."""

import pytest
import torch
from burnish_losses import (
    Counts,
    combine_metrics,
    count,
    finalize,
    grpo_loss,
    logprobs_from_hidden,
    total,
)
from hypothesis import given, settings
from hypothesis import strategies as st

HIDDEN, VOCABULARY = 4, 7
Sequences = list[dict[str, torch.Tensor]]


def make_sequences(lengths: list[int], seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sequences = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) < 0.7
        mask[0] = False
        sequences.append(
            {
                "hidden": randn(length, HIDDEN),
                "labels": torch.randint(VOCABULARY, (length,), generator=generator),
                "token_mask": mask,
                "advantages": randn(1).expand(length),
                "old_logprobs": -1.9 + 0.1 * randn(length),
                "reference_logprobs": -1.9 + 0.1 * randn(length),
                "sampled_logprobs": -1.9 + 0.1 * randn(length),
            }
        )
    return sequences


def as_batch(sequences: Sequences) -> dict[str, torch.Tensor]:
    batch = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    lengths = torch.tensor([0] + [len(s["labels"]) for s in sequences])
    return {**batch, "cu_seqlens": lengths.cumsum(0).int()}


def start_weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)


def accumulate(
    weight: torch.Tensor, micro_batches: list[Sequences], aggregation: str, counts: Counts | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics; counts None is the fault: each micro-batch takes its own mean."""
    weight = weight.detach().clone().requires_grad_()
    losses, metrics = [], []
    for sequences in micro_batches:
        batch = as_batch(sequences)
        logprobs = logprobs_from_hidden(batch["hidden"], weight, batch["labels"], chunk_tokens=3)
        output = grpo_loss(logprobs, batch, kl_coefficient=0.1, aggregation=aggregation)  # type: ignore[arg-type]
        own = count(batch["token_mask"], batch["cu_seqlens"])
        loss = total(output.terms, counts or own) / (1 if counts else len(micro_batches))
        loss.backward()
        losses.append(loss.detach())
        metrics.append(output.metrics)
    assert weight.grad is not None
    values = finalize(combine_metrics(metrics), counts or Counts(1, 1))
    return torch.stack(losses).sum(), weight.grad, values


def global_counts(sequences: Sequences) -> Counts:
    batch = as_batch(sequences)
    return count(batch["token_mask"], batch["cu_seqlens"])


@pytest.mark.parametrize("aggregation", ["tokens", "sequences"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_cut_gives_the_same(aggregation: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    sequences = make_sequences(lengths, seed=data.draw(st.integers(0, 1000)))
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    cut = [[s for s, o in zip(sequences, owner, strict=True) if o == slot] for slot in range(4)]
    counts = global_counts(sequences)
    whole = accumulate(start_weight(), [sequences], aggregation, counts)
    parts = accumulate(start_weight(), [part for part in cut if part], aggregation, counts)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-10, atol=1e-12)
    assert parts[2] == pytest.approx(whole[2], rel=1e-10, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("aggregation", ["tokens", "sequences"])
def test_negative_control_a_mean_of_means_differs(aggregation: str) -> None:
    sequences = make_sequences([9, 2, 7, 3, 8])
    cut = [sequences[:1], sequences[1:]]
    whole = accumulate(start_weight(), [sequences], aggregation, global_counts(sequences))
    faulty = accumulate(start_weight(), cut, aggregation, None)
    assert abs(faulty[0] - whole[0]) > 1e-3
    assert (faulty[1] - whole[1]).abs().max() > 1e-3


@pytest.mark.parametrize("aggregation", ["tokens", "sequences"])
def test_four_updates_on_one_batch_do_not_depend_on_accumulation(aggregation: str) -> None:
    sequences = make_sequences([9, 2, 7, 3, 8, 5, 4, 6])
    counts = global_counts(sequences)
    weights = []
    for num_micro_batches in (1, 4):
        size = len(sequences) // num_micro_batches
        cut = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        weight = start_weight()
        for _ in range(4):  # the old log-probs stay those of the first pass
            weight = weight - 0.5 * accumulate(weight, cut, aggregation, counts)[1]
        weights.append(weight)
    moved = (weights[0] - start_weight()).abs().max()
    assert moved > 0.01
    assert (weights[0] - weights[1]).abs().max() < 1e-12 * moved
