"""Losses and gradients equal those of TRL's own trainers, on one small model of Hugging Face's.

TRL's methods run as they are, on trainers whose `__init__` was not called: only the attributes that
the loss reads are set. TRL gets right-padded rows, chosen then rejected; this library one sequence
after another, the rejected first. TRL's log-probs are float32, hence the tolerances.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish_losses import (
    LossOutput,
    PairLoss,
    apo_down_pair_loss,
    apo_zero_pair_loss,
    bradley_terry_loss,
    count,
    cpo_loss,
    dpo_loss,
    finalize,
    hinge_pair_loss,
    ipo_pair_loss,
    kto_baseline,
    kto_log_ratio_sum,
    kto_loss,
    logprobs_from_logits,
    nll_loss,
    orpo_loss,
    robust_pair_loss,
    sigmoid_pair_loss,
    simpo_loss,
    total,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer.utils import add_fused_lm_head

pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")

Columns = dict[str, Tensor]
# Prompt, chosen, rejected; 0 is the padding.
PAIRS = [
    ([1, 2, 3], [4, 5, 6, 7], [8, 9]),
    ([3, 1], [2], [5, 11, 12, 4, 6]),
    ([9, 8, 7, 6], [10, 12], [3, 3, 1]),
]
NUM_PAIRS = len(PAIRS)
ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
)
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def make_model(seed: int, cls: type = LlamaForCausalLM) -> Any:
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.4,
        pad_token_id=0,
        num_labels=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).train()
    if cls is LlamaForCausalLM:
        add_fused_lm_head(model, outputs=FIELDS)
    return model


@pytest.fixture
def policy() -> Any:
    return make_model(0)


@pytest.fixture
def reference() -> Any:
    return make_model(1).requires_grad_(False)


def trainer_of(cls: type, **attributes: Any) -> Any:
    """A trainer of that class with these attributes and no more."""
    trainer = object.__new__(cls)
    common = {
        "accelerator": ACCELERATOR,
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "precompute_ref_logps": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (common | attributes).items():
        setattr(trainer, name, value)
    return trainer


def metrics_of_trl(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def padded(rows: list[list[int]], filler: int = 0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def rows_of(sequences: list[tuple[list[int], list[int]]], prefix: str = "") -> Columns:
    """What TRL's collators make of (prompt, completion)s."""
    return {
        f"{prefix}input_ids": padded([p + c for p, c in sequences]),
        f"{prefix}attention_mask": padded([[1] * len(p + c) for p, c in sequences]),
        f"{prefix}completion_mask": padded([[0] * len(p) + [1] * len(c) for p, c in sequences]),
    }


def logprobs_of(model: Any, sequences: list[tuple[list[int], list[int]]]) -> Tensor:
    """[T], about each token; NaN at the first of a sequence, that nothing predicts."""
    parts = []
    for prompt, completion in sequences:
        ids = torch.tensor(prompt + completion)
        logits = model(input_ids=ids.unsqueeze(0)).logits[0]
        parts += [torch.full((1,), torch.nan), logprobs_from_logits(logits[:-1], ids[1:])]
    return torch.cat(parts)


def packed(sequences: list[tuple[list[int], list[int]]]) -> Columns:
    lengths = torch.tensor([0] + [len(p + c) for p, c in sequences])
    mask = torch.tensor([i >= len(p) for p, c in sequences for i in range(len(p + c))])
    return {"token_mask": mask, "cu_seqlens": lengths.cumsum(0).int()}


CHOSEN = [(prompt, chosen) for prompt, chosen, _ in PAIRS]
REJECTED = [(prompt, rejected) for prompt, _, rejected in PAIRS]


def pairs_of(policy: Any, reference: Any = None) -> tuple[Tensor, Columns]:
    sequences = REJECTED + CHOSEN
    batch = packed(sequences)
    is_chosen = torch.arange(2 * NUM_PAIRS) >= NUM_PAIRS
    of_token = is_chosen.repeat_interleave(batch["cu_seqlens"].diff())
    batch |= {
        "pair_ids": torch.arange(NUM_PAIRS).repeat(2),
        "chosen": is_chosen,
        "nll_mask": batch["token_mask"] & of_token,
    }
    if reference is not None:
        batch["reference_logprobs"] = logprobs_of(reference, sequences)
    return logprobs_of(policy, sequences), batch


def gradients(loss: Tensor, model: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def assert_equal(output: LossOutput, batch: Columns, trl_loss: Tensor, model: Any) -> None:
    loss = total(output.terms, count(batch))
    torch.testing.assert_close(loss, trl_loss, rtol=1e-5, atol=1e-6)
    expected = gradients(trl_loss, model)
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-3
    torch.testing.assert_close(gradients(loss, model), expected, rtol=1e-4, atol=1e-6)


def trl_dpo(policy: Any, reference: Any, **attributes: Any) -> tuple[Tensor, dict[str, float]]:
    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
        "loss_weights": [1.0] * len(attributes["loss_types"]),
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
    }
    trainer = trainer_of(DPOTrainer, model=policy, ref_model=reference, **(defaults | attributes))
    loss = trainer._compute_loss(policy, rows_of(CHOSEN + REJECTED), return_outputs=False)
    return loss, metrics_of_trl(trainer)


@pytest.mark.parametrize(
    ("loss_type", "pair_loss", "length_average"),
    [
        ("sigmoid", sigmoid_pair_loss, False),
        ("sigmoid_norm", sigmoid_pair_loss, True),
        ("robust", partial(robust_pair_loss, label_smoothing=0.2), False),
        ("hinge", hinge_pair_loss, False),
        ("ipo", ipo_pair_loss, True),
        ("apo_zero", apo_zero_pair_loss, False),
        ("apo_down", apo_down_pair_loss, False),
    ],
)
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo(
    loss_type: str,
    pair_loss: PairLoss,
    length_average: bool,
    beta: float,
    policy: Any,
    reference: Any,
) -> None:
    trl_loss, trl_metrics = trl_dpo(
        policy, reference, loss_types=[loss_type], beta=beta, label_smoothing=0.2
    )
    logprobs, batch = pairs_of(policy, reference)
    output = dpo_loss(
        logprobs, batch, beta=beta, pair_loss=pair_loss, length_average=length_average
    )
    assert_equal(output, batch, trl_loss, policy)
    if not length_average:  # TRL's rewards are of sums throughout
        assert_same_metrics(finalize(output.metrics, count(batch)), trl_metrics)


def assert_same_metrics(ours: dict[str, float], theirs: dict[str, float]) -> None:
    for name, trl_name in (
        ("rewards/chosen", "rewards/chosen"),
        ("rewards/rejected", "rewards/rejected"),
        ("rewards/margin", "rewards/margins"),
        ("rewards/accuracy", "rewards/accuracies"),
        ("logps/chosen", "logps/chosen"),
        ("logps/rejected", "logps/rejected"),
    ):
        assert ours[name] == pytest.approx(theirs[trl_name], rel=1e-4), name


def test_dpo_with_the_sft_term(policy: Any, reference: Any) -> None:
    trl_loss, _ = trl_dpo(policy, reference, loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.3])
    logprobs, batch = pairs_of(policy, reference)
    output = dpo_loss(logprobs, batch, nll_coefficient=0.3)
    assert_equal(output, batch, trl_loss, policy)


def test_the_sft_term_alone_is_nll(policy: Any, reference: Any) -> None:
    trl_loss, _ = trl_dpo(policy, reference, loss_types=["sft"])
    batch = packed(CHOSEN)
    assert_equal(nll_loss(logprobs_of(policy, CHOSEN), batch), batch, trl_loss, policy)


def test_trl_has_no_label_smoothing_in_its_sigmoid_dpo(policy: Any, reference: Any) -> None:
    """A difference: TRL's "sigmoid" leaves the setting out; here it is conservative DPO."""
    plain, _ = trl_dpo(policy, reference, loss_types=["sigmoid"])
    smoothed, _ = trl_dpo(policy, reference, loss_types=["sigmoid"], label_smoothing=0.2)
    assert plain.item() == smoothed.item()


def test_at_equal_policies_trl_counts_ties_as_wrong(policy: Any) -> None:
    """A difference: accuracy 0 there, one half here."""
    _, trl_metrics = trl_dpo(policy, policy, loss_types=["sigmoid"])
    assert trl_metrics["rewards/accuracies"] == 0.0
    logprobs, batch = pairs_of(policy, policy)
    output = dpo_loss(logprobs, batch)
    assert finalize(output.metrics, count(batch))["rewards/accuracy"] == 0.5


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("label", [[True, False] * 3, [False, True, True, True, True, True]])
@pytest.mark.parametrize("swap", [False, True])  # mean log-ratios above and below 0
def test_kto(loss_type: str, label: list[bool], swap: bool) -> None:
    policy, reference = make_model(int(swap)), make_model(int(not swap)).requires_grad_(False)
    sequences = CHOSEN + REJECTED
    mismatched = [(p, sequences[i - 1][1]) for i, (p, _) in enumerate(sequences)]
    trainer = trainer_of(
        KTOTrainer,
        model=policy,
        ref_model=reference,
        beta=0.3,
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        desirable_weight=1.3,
        undesirable_weight=0.7,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    inputs = rows_of(sequences) | rows_of(mismatched, "KL_") | {"label": torch.tensor(label)}
    trl_loss = trainer._compute_loss(policy, inputs, return_outputs=False)
    trl_metrics = metrics_of_trl(trainer)

    baseline = kl_baseline_of(policy, reference, mismatched)
    assert (baseline.item() > 0.1) != swap
    if loss_type == "kto":
        assert baseline.item() == pytest.approx(trl_metrics["kl"], rel=1e-4)
    batch = packed(sequences) | {
        "reference_logprobs": logprobs_of(reference, sequences),
        "desirable": torch.tensor(label),
    }
    output = kto_loss(
        logprobs_of(policy, sequences),
        batch,
        kl_baseline=baseline if loss_type == "kto" else 0.0,
        beta=0.3,
        desirable_weight=1.3,
        undesirable_weight=0.7,
    )
    assert_equal(output, batch, trl_loss, policy)
    ours = finalize(output.metrics, count(batch))
    for name, trl_name in (("desirable", "chosen"), ("undesirable", "rejected")):
        mean = ours[f"rewards/{name}_sum"] / ours[f"num_{name}"]
        assert mean == pytest.approx(trl_metrics[f"rewards/{trl_name}"], rel=1e-4)


def kl_baseline_of(
    policy: Any, reference: Any, mismatched: list[tuple[list[int], list[int]]]
) -> Tensor:
    batch = packed(mismatched) | {"reference_logprobs": logprobs_of(reference, mismatched)}
    log_ratio_sum = kto_log_ratio_sum(logprobs_of(policy, mismatched), batch)
    return kto_baseline(log_ratio_sum, count(batch)["sequences"])


def labelled(prefix: str, sequences: list[tuple[list[int], list[int]]]) -> Columns:
    """What the collator of TRL's CPO and ORPO makes."""
    return {
        f"{prefix}_input_ids": padded([p + c for p, c in sequences]),
        f"{prefix}_attention_mask": padded([[1] * len(p + c) for p, c in sequences]),
        f"{prefix}_labels": padded([[-100] * len(p) + c for p, c in sequences], filler=-100),
    }


@pytest.mark.parametrize(
    ("loss_type", "pair_loss", "length_average"),
    [
        ("sigmoid", partial(sigmoid_pair_loss, label_smoothing=0.2), False),
        ("hinge", hinge_pair_loss, False),
        ("ipo", ipo_pair_loss, True),
    ],
)
@pytest.mark.parametrize("cpo_alpha", [0.0, 0.6])
def test_cpo(
    loss_type: str, pair_loss: PairLoss, length_average: bool, cpo_alpha: float, policy: Any
) -> None:
    trl_loss, trl_metrics = trl_cpo(policy, loss_type=loss_type, cpo_alpha=cpo_alpha)
    logprobs, batch = pairs_of(policy)
    output = cpo_loss(
        logprobs,
        batch,
        beta=0.4,
        pair_loss=pair_loss,
        length_average=length_average,
        nll_coefficient=cpo_alpha,
    )
    assert_equal(output, batch, trl_loss, policy)
    assert_same_metrics(finalize(output.metrics, count(batch)), trl_metrics)


def trl_cpo(policy: Any, **attributes: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.experimental.cpo import CPOTrainer

    settings = {"beta": 0.4, "alpha": 0.0, "label_smoothing": 0.2, "pad_token_id": 0}
    trainer = trainer_of(CPOTrainer, **(settings | attributes))
    inputs = labelled("chosen", CHOSEN) | labelled("rejected", REJECTED)
    loss, metrics = trainer.get_batch_loss_metrics(policy, inputs)
    return loss, metrics


def test_simpo(policy: Any) -> None:
    trl_loss, trl_metrics = trl_cpo(policy, loss_type="simpo", simpo_gamma=0.3, cpo_alpha=0.0)
    logprobs, batch = pairs_of(policy)
    output = simpo_loss(logprobs, batch, beta=0.4, gamma=0.3, label_smoothing=0.2)
    assert_equal(output, batch, trl_loss, policy)
    assert_same_metrics(finalize(output.metrics, count(batch)), trl_metrics)


def test_orpo(policy: Any) -> None:
    from trl.experimental.orpo import ORPOTrainer

    trainer = trainer_of(ORPOTrainer, beta=0.4, padding_value=0)
    inputs = labelled("chosen", CHOSEN) | labelled("rejected", REJECTED)
    trl_loss, trl_metrics = trainer.get_batch_loss_metrics(policy, inputs)
    logprobs, batch = pairs_of(policy)
    # TRL's SFT term is over the prompt as well.
    batch["nll_mask"] = batch["chosen"].repeat_interleave(batch["cu_seqlens"].diff())
    batch["nll_mask"] &= ~logprobs.isnan()
    output = orpo_loss(logprobs, batch, beta=0.4)
    assert_equal(output, batch, trl_loss, policy)
    ours = finalize(output.metrics, count(batch))
    assert_same_metrics(ours, trl_metrics)
    assert ours["preference/log_odds"] == pytest.approx(trl_metrics["log_odds_chosen"], rel=1e-4)
    assert ours["loss/preference"] == pytest.approx(-trl_metrics["log_odds_ratio"], rel=1e-4)
    assert ours["loss/nll"] == pytest.approx(trl_metrics["nll_loss"], rel=1e-4)


@pytest.mark.parametrize("center_coefficient", [0.0, 0.1])
@pytest.mark.parametrize("margins", [None, [0.5, 0.0, 2.0]])
def test_reward_model(center_coefficient: float, margins: list[float] | None) -> None:
    model = make_model(2, LlamaForSequenceClassification)
    trainer = trainer_of(
        RewardTrainer,
        model=model,
        args=SimpleNamespace(center_rewards_coefficient=center_coefficient or None),
    )
    rows = rows_of(CHOSEN + REJECTED)
    inputs: dict[str, Any] = {name: rows[name] for name in ("input_ids", "attention_mask")}
    if margins is not None:
        # The model takes what it does not know; TRL's own batches have it there too.
        inputs["margin"] = torch.tensor(margins)
    trl_loss = trainer.compute_loss(model, inputs)
    trl_metrics = metrics_of_trl(trainer)

    sequences = REJECTED + CHOSEN
    scores = torch.cat([model(torch.tensor([p + c])).logits[:, 0] for p, c in sequences])
    _, batch = pairs_of(make_model(0))
    if margins is not None:
        batch["margins"] = torch.tensor([torch.nan] * NUM_PAIRS + margins)
    output = bradley_terry_loss(scores, batch, center_coefficient=center_coefficient)
    assert_equal(output, batch, trl_loss, model)
    ours = finalize(output.metrics, count(batch))
    assert ours["rewards/margin"] == pytest.approx(trl_metrics["margin"], rel=1e-4)
    assert ours["rewards/accuracy"] == pytest.approx(trl_metrics["accuracy"])
    mean = (ours["rewards/chosen"] + ours["rewards/rejected"]) / 2
    assert mean == pytest.approx(trl_metrics["mean_reward"], rel=1e-4)
