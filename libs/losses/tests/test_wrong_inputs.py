"""What a newcomer gives in the place of what is wanted, and what the error says to do."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from burnish_losses import (
    bradley_terry_loss,
    cispo_loss,
    clip_fractions,
    constant_length,
    count,
    cpo_loss,
    dapo_loss,
    distillation_loss,
    divergence_from_hidden,
    divergence_from_logits,
    dpo_loss,
    gae,
    gather_context_parallel,
    gdpo_advantages,
    group_relative_advantages,
    groups_with_spread,
    grpo_loss,
    gspo_loss,
    keep_sequences,
    kto_log_ratio_sum,
    kto_loss,
    length_adaptive_lambda,
    logprob_mismatch,
    logprobs_from_hidden,
    logprobs_from_logits,
    masked_max,
    masked_sum,
    nll_loss,
    on_policy_distillation_advantages,
    orpo_loss,
    ppo_loss,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_loss,
    remax_advantages,
    rescale_rewards,
    reward_metrics,
    rloo_advantages,
    rloo_loss,
    sapo_loss,
    select,
    sequence_geometric_mean,
    sequence_mean,
    sequence_ratio,
    sequence_sum,
    sequence_sums,
    sequence_token_ratio,
    simpo_loss,
    soft_overlong_penalty,
    to_tokens,
    token_mean,
    token_rewards,
    topk_logprobs_from_hidden,
    topk_logprobs_from_logits,
    total,
    value_loss,
    weight_clip_fractions,
    weight_moments,
    whiten,
)
from torch import Tensor, nn

CU_SEQLENS = torch.tensor([0, 2, 6, 6, 9], dtype=torch.int32)
TWO, SIX = torch.zeros(2), torch.zeros(6)
FIVE_IDS = torch.zeros(5, dtype=torch.int64)


def make_batch() -> dict[str, Tensor]:
    """Four sequences, one of them empty, nine tokens, all trained; one pair."""
    tokens = torch.linspace(-1.0, -0.1, 9)
    names = "advantages old_logprobs reference_logprobs sampled_logprobs returns old_values"
    return {
        **dict.fromkeys(names.split(), tokens),
        "entropies": -tokens,
        "token_mask": torch.ones(9, dtype=torch.bool),
        "nll_mask": torch.ones(9, dtype=torch.bool),
        "cu_seqlens": CU_SEQLENS,
        "pair_ids": torch.tensor([0, 0, -1, -1]),
        "chosen": torch.tensor([True, False, False, False]),
        "desirable": torch.tensor([True, False, False, False]),
    }


OF_TOKENS: dict[str, Callable[[Tensor, dict[str, Tensor]], Any]] = {
    "nll": nll_loss,
    "dpo": dpo_loss,
    "cpo": cpo_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
    "kto": lambda x, batch: kto_loss(x, batch, kl_baseline=0.0),
    "kto baseline": kto_log_ratio_sum,
    "value": value_loss,
    "distillation": distillation_loss,
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "rloo": rloo_loss,
    "select": select,
    "token mean": token_mean,
    "sequence mean": sequence_mean,
    "sequence sum": sequence_sum,
    "constant": constant_length(7),
    "geometric mean": sequence_geometric_mean,
    "sequence ratio": lambda x, batch: sequence_ratio(x, x, batch),
    "sequence-token ratio": lambda x, batch: sequence_token_ratio(x, x, batch),
    "mismatch": lambda x, batch: logprob_mismatch(x, x, batch),
    "sequence sums": lambda x, batch: sequence_sums(x, batch["cu_seqlens"]),
    "masked sum": lambda x, batch: masked_sum(x, batch["token_mask"]),
    "masked max": lambda x, batch: masked_max(x, batch["token_mask"]),
    "moments": lambda x, batch: weight_moments("w", x, batch["token_mask"]),
    "whiten": lambda x, batch: whiten(x, batch["token_mask"]),
    "gae": lambda x, batch: gae(x, x, batch["token_mask"], batch["cu_seqlens"]),
    "clip fractions": lambda x, batch: clip_fractions(
        x, x, batch["token_mask"], clip_low=0.1, clip_high=0.1
    ),
    "weight clip fractions": lambda x, batch: weight_clip_fractions(
        x, x, batch["token_mask"], clip_low=0.1, clip_high=0.1
    ),
    "on-policy distillation": lambda x, batch: on_policy_distillation_advantages(
        x, x, batch["token_mask"]
    ),
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_padded_rows_are_refused_with_what_to_do(name: str) -> None:
    batch = make_batch()
    rows = {k: v.view(3, 3) if len(v) == 9 else v for k, v in batch.items()}
    rows["cu_seqlens"] = torch.arange(4) * 3
    OF_TOKENS[name](batch["old_logprobs"], batch)
    with pytest.raises(ValueError, match=r"must be \[T\], got \(3, 3\); flatten the rows, cu_seql"):
        OF_TOKENS[name](rows["old_logprobs"], rows)
    with pytest.raises(ValueError, match=r"must be a tensor \[T\], got list"):
        OF_TOKENS[name](batch["old_logprobs"].tolist(), batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"all be \[T\]|have the shape \(4,\)|of tokens, 4"):
        OF_TOKENS[name](batch["old_logprobs"][:4], batch)


def test_counting_padded_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[T\], got \(2, 3\); flatten the rows"):
        count({"token_mask": torch.ones(2, 3).bool(), "cu_seqlens": torch.tensor([0, 3, 6])})
    with pytest.raises(ValueError, match=r"must be \[T\], got \(2, 3\)"):
        keep_sequences(torch.ones(2, 3).bool(), torch.ones(2).bool(), torch.tensor([0, 3, 6]))
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match=r"must be \[T\], got \(2, 3\)"):
        divergence_from_logits(logits, logits, torch.ones(2, 3).bool())


@pytest.mark.parametrize("name", ["token_mask", "advantages", "old_logprobs", "cu_seqlens"])
@pytest.mark.parametrize("convert", [np.asarray, lambda x: x.tolist()])
def test_a_column_is_a_tensor(name: str, convert: Callable[[Tensor], Any]) -> None:
    batch = make_batch()
    logprobs = batch["old_logprobs"]
    batch[name] = convert(batch[name])
    kind = type(batch[name]).__name__
    with pytest.raises(ValueError, match=rf"{name} must be a tensor .*got {kind}; torch.tensor\("):
        grpo_loss(logprobs, batch, aggregate=sequence_mean)


HEAD, STATES, LABELS = torch.zeros(7, 4), torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
REWARDS, IDS, MASK = [1.0, 0.0], [0, 0], torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: group_relative_advantages(REWARDS, torch.tensor(IDS)), "rewards"),
        (lambda: group_relative_advantages(torch.tensor(REWARDS), IDS), "group_ids"),
        (lambda: group_relative_advantages(TWO, torch.tensor(IDS), mask=[True, True]), "mask"),
        (lambda: rloo_advantages(np.array(REWARDS), torch.tensor(IDS)), "rewards"),
        (lambda: remax_advantages(TWO, REWARDS), "greedy_rewards"),
        (lambda: reinforce_plus_plus_advantages(REWARDS), "rewards"),
        (lambda: reinforce_plus_plus_advantages(TWO, IDS), "group_ids"),
        (lambda: gdpo_advantages([[1.0, 0.0]], torch.tensor([0])), "rewards"),
        (lambda: gdpo_advantages(torch.zeros(2, 1), IDS), "group_ids"),
        (lambda: groups_with_spread(REWARDS, torch.tensor(IDS)), "rewards"),
        (lambda: reward_metrics(TWO, np.array(IDS)), "group_ids"),
        (lambda: rescale_rewards(REWARDS, source=(0, 1), target=(0, 2)), "rewards"),
        (lambda: soft_overlong_penalty([3], max_tokens=4, buffer_tokens=2), "lengths"),
        (lambda: keep_sequences(MASK, [True], torch.tensor([0, 2])), "keep"),
        (lambda: keep_sequences(MASK, MASK[:1], [0, 2]), "cu_seqlens"),
        (lambda: token_rewards([1.0], MASK, torch.tensor([0, 2])), "rewards"),
        (lambda: token_rewards(TWO[:1], MASK, [0, 2]), "cu_seqlens"),
        (lambda: length_adaptive_lambda([3]), "lengths"),
        (lambda: to_tokens([1.0], torch.tensor([0, 2])), "values"),
        (lambda: sequence_sums(TWO, [0, 2]), "cu_seqlens"),
        (lambda: bradley_terry_loss([1.0, 0.0], make_batch()), "scores"),
        (lambda: count({"pair_ids": [0, 0]}), "pair_ids"),
        (lambda: logprobs_from_logits(np.zeros((3, 7)), LABELS), "logits"),
        (lambda: logprobs_from_logits(torch.zeros(3, 7), [0, 0, 0]), "labels"),
        (lambda: logprobs_from_hidden(STATES, HEAD, [0, 0, 0]), "labels"),
        (lambda: logprobs_from_hidden(STATES, HEAD, LABELS, mask=[True] * 3), "mask"),
        (lambda: topk_logprobs_from_logits([[0.0]], 1), "logits"),
        (lambda: gather_context_parallel(TWO, [0, 1], None), "order"),
        (lambda: divergence_from_hidden(STATES, HEAD, STATES, HEAD, [True] * 3), "token_mask"),
    ],
)
def test_lists_and_arrays_are_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be a tensor .*got (list|ndarray); torch"):
        call()


@pytest.mark.parametrize("ids", [["a", "b", "a"], np.array(["a", "b", "a"])])
def test_ids_that_are_strings_become_numbers_as_the_error_says(ids: Any) -> None:
    with pytest.raises(ValueError, match="group_ids must be a tensor") as error:
        group_relative_advantages(torch.zeros(3), ids)
    index_code, tensor_code = str(error.value).split("number the strings: ")[1].split("; ")
    names: dict[str, Any] = {"group_ids": ids, "torch": torch}
    exec(index_code, names)
    assert eval(tensor_code.removesuffix("."), names).tolist() == [0, 1, 0]


@pytest.mark.parametrize("ids", [torch.tensor([0.0, 0.0]), MASK])
def test_ids_are_integers(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="group_ids must be integers, got torch"):
        group_relative_advantages(TWO, ids)


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0.0, 6.0], "cu_seqlens must be integers, got torch.float32"),
        ([[0, 6]], r"cu_seqlens must be \[N\+1\], got \(1, 2\)"),
        ([0, 5], r"end at the number of tokens, 6, got \[0, 5\]"),
        ([2, 4], r"end at the number of tokens, 6, got \[2, 4\]"),  # lengths
        ([], r"end at the number of tokens, 6, got \[\]"),
        ([0, 4, 2, 6], r"must never fall, got \[0, 4, 2, 6\]"),
    ],
)
def test_boundaries_are_met_with_their_cure(cu_seqlens: list[int], message: str) -> None:
    boundaries = torch.tensor(cu_seqlens)
    if not cu_seqlens:
        boundaries = boundaries.int()
    mask = torch.ones(6, dtype=torch.bool)
    calls: list[Callable[[], Any]] = [
        lambda: sequence_sums(SIX, boundaries),
        lambda: count({"token_mask": mask, "cu_seqlens": boundaries}),
        lambda: sequence_mean(SIX, {"token_mask": mask, "cu_seqlens": boundaries}),
        lambda: token_rewards(torch.zeros(1), mask, boundaries),
        lambda: gae(SIX, SIX, mask, boundaries),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message) as error:
            call()
        cured = boundaries.is_floating_point() or r"cat([0, lengths.cumsum(0)])" in str(error.value)
        assert cured


def test_values_of_sequences_go_to_their_tokens() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    at_tokens = to_tokens(values, CU_SEQLENS)
    assert at_tokens.tolist() == [1, 1, 2, 2, 2, 2, 4, 4, 4]
    at_tokens.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 4, 0, 3]
    assert to_tokens(MASK, torch.tensor([0, 1, 1])).tolist() == [True]
    assert to_tokens(values[:0], torch.tensor([0])).shape == (0,)
    with pytest.raises(ValueError, match=r"values must be \[N\] = \[4\].*got \(9,\)"):
        to_tokens(torch.zeros(9), CU_SEQLENS)
    with pytest.raises(ValueError, match="must start at 0 and end at the number of tokens, got"):
        to_tokens(values, CU_SEQLENS + 1)
    with pytest.raises(ValueError, match="must never fall"):
        to_tokens(values[:3], torch.tensor([0, 4, 2, 6]))


def test_a_column_of_sequences_in_the_place_of_one_of_tokens_says_how_to_spread_it() -> None:
    batch = make_batch()
    logprobs = batch["old_logprobs"]
    batch["advantages"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"values.repeat_interleave\(cu_seqlens.diff\(\)\)"):
        grpo_loss(logprobs, batch)
    batch["advantages"] = to_tokens(batch["advantages"], CU_SEQLENS)
    grpo_loss(logprobs, batch)
    with pytest.raises(ValueError, match=r"desirable must have the shape \(4,\)") as error:
        kto_loss(logprobs, batch | {"desirable": batch["token_mask"]}, kl_baseline=0.0)
    assert "repeat_interleave" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("old_logprobs", "old_log_probs"),
        ("old_logprobs", "old_log_prob"),
        ("old_logprobs", "old_per_token_logps"),
        ("old_logprobs", "oldlogprobs"),
        ("reference_logprobs", "ref_logprobs"),
        ("reference_logprobs", "ref_log_prob"),
        ("reference_logprobs", "reference_log_probs"),
        ("sampled_logprobs", "sample_logprobs"),
        ("entropies", "entropie"),
    ],
)
def test_an_optional_column_that_is_misspelt_is_not_left_out(name: str, wrong: str) -> None:
    batch = make_batch()
    logprobs = batch["old_logprobs"]
    grpo_loss(logprobs, batch | {wrong: batch[name]})  # the right one is there as well
    batch[wrong] = batch.pop(name)
    with pytest.raises(ValueError, match=rf"column {name} must be named so, got '{wrong}'"):
        grpo_loss(logprobs, batch)


def test_other_columns_are_left_alone() -> None:
    batch = make_batch()
    logprobs = batch.pop("old_logprobs")
    del batch["reference_logprobs"], batch["sampled_logprobs"], batch["entropies"]
    others = "logprobs new_logprobs teacher_logprobs values labels policy_logprobs logits hidden"
    others += " input_ids attention_mask rewards mean_advantages entropy_bonus log_probs ratio"
    with_others = grpo_loss(logprobs, batch | dict.fromkeys(others.split(), logprobs))
    alone = grpo_loss(logprobs, batch)
    assert torch.equal(with_others.terms[0].sum, alone.terms[0].sum)
    assert with_others.metrics.keys() == alone.metrics.keys()


def test_margins_that_are_misspelt_are_not_left_out() -> None:
    batch = {"pair_ids": torch.tensor([0, 0]), "chosen": torch.tensor([True, False])}
    with pytest.raises(ValueError, match="column margins must be named so, got 'margin'"):
        bradley_terry_loss(TWO, batch | {"margin": TWO})


@pytest.mark.parametrize(
    ("loss_fn", "own"),
    [
        (grpo_loss, token_mean),
        (dapo_loss, token_mean),
        (gspo_loss, sequence_mean),
        (cispo_loss, token_mean),
        (sapo_loss, sequence_mean),
        (rloo_loss, sequence_sum),
        (reinforce_plus_plus_loss, token_mean),
        (ppo_loss, token_mean),
    ],
)
def test_every_objective_takes_the_mean_to_be_used(loss_fn: Any, own: Any) -> None:
    batch = make_batch()
    logprobs = batch["old_logprobs"].flip(0)

    def loss(**settings: Any) -> float:
        return total(loss_fn(logprobs, batch, **settings).terms, count(batch)).item()

    assert loss() == loss(aggregate=own)
    means = [loss(aggregate=mean) for mean in (token_mean, sequence_mean, constant_length(5))]
    assert len({round(mean, 6) for mean in means}) == 3


@pytest.mark.parametrize("loss_fn", [cpo_loss, orpo_loss])
def test_the_sft_term_can_be_left_out_as_the_error_says(loss_fn: Any) -> None:
    batch = make_batch()
    del batch["nll_mask"]
    with pytest.raises(ValueError, match=r"nll_mask for nll_coefficient=1.0.*nll_coefficient=0\."):
        loss_fn(batch["old_logprobs"], batch)
    loss_fn(batch["old_logprobs"], batch, nll_coefficient=0)


@pytest.mark.parametrize("bad", [-100, 7])
def test_labels_outside_the_vocabulary_are_named_on_a_cpu(bad: int) -> None:
    labels = torch.tensor([2, bad, 3])
    logits = torch.zeros(3, 7)
    for call in (
        lambda mask: logprobs_from_logits(logits, labels, mask=mask),
        lambda mask: logprobs_from_hidden(STATES, HEAD, labels, mask=mask),
    ):
        with pytest.raises(ValueError, match=r"in \[0, 7\).*mask=labels != -100"):
            call(None)
        assert call(labels != bad)[1] == 0
    with pytest.raises(ValueError, match=r"labels must be int64, got torch.int32"):
        logprobs_from_logits(logits, labels.int())


def test_a_layer_in_the_place_of_its_weight() -> None:
    linear = nn.Linear(4, 7)
    message = "weight must be a tensor .*, got Linear; pass its weight, such as linear.weight"
    mask = torch.ones(3, dtype=torch.bool)
    calls: list[Callable[[Any], Any]] = [
        lambda head: logprobs_from_hidden(STATES, head, LABELS),
        lambda head: topk_logprobs_from_hidden(STATES, head, 1),
        lambda head: divergence_from_hidden(STATES, head, STATES, HEAD, mask),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(linear)
        call(linear.weight)


def test_diagnostics_refuse_what_would_be_spread_by_broadcasting() -> None:
    batch = make_batch()
    mask, nine, one = batch["token_mask"], batch["old_logprobs"], torch.zeros(1)
    calls: list[Callable[[], Any]] = [
        lambda: logprob_mismatch(nine, one, batch),
        lambda: logprob_mismatch(nine, torch.zeros(()), batch),
        lambda: weight_moments("w", one, mask),
        lambda: clip_fractions(nine, one, mask, clip_low=0.1, clip_high=0.1),
        lambda: clip_fractions(one, nine, mask, clip_low=0.1, clip_high=0.1),
        lambda: weight_clip_fractions(one, nine, mask, clip_low=0.1, clip_high=0.1),
        lambda: masked_sum(one, mask),
        lambda: masked_sum(nine, mask[:1]),
        lambda: masked_max(one, mask),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must (all )?be \[T\]"):
            call()
    with pytest.raises(ValueError, match="mask must be bool"):
        weight_moments("w", nine, nine)


def test_token_rewards_say_which_reward_is_broken() -> None:
    mask, ends = torch.ones(5, dtype=torch.bool), torch.arange(6)
    rewards = torch.tensor([1.0, 0.0, -torch.inf, 0.0, torch.nan])
    with pytest.raises(ValueError, match="got -inf at index 2, the first of 2; set token_mask"):
        token_rewards(rewards, mask, ends)
    with pytest.raises(ValueError, match=r"rewards must be \[N\] = \[5\].*got \(4,\)"):
        token_rewards(rewards[:4], mask, ends)
    kept = keep_sequences(mask, rewards.isfinite(), ends)
    assert token_rewards(rewards, kept, ends).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
