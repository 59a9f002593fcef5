"""Losses and gradients equal those of TRL's GRPOTrainer and RLOOTrainer on one small model.

TRL's methods run as they are, on trainers whose `__init__` was not called: only the attributes that
the loss reads are set. TRL gets rows, prompts padded on the left and completions on the right; this
library one sequence after another. TRL's log-probs are float32, hence the tolerances.
"""

import inspect
import math
import textwrap
import warnings
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from burnish_losses import (
    LossOutput,
    cispo_loss,
    count,
    dapo_loss,
    dr_grpo_loss,
    finalize,
    grpo_loss,
    gspo_loss,
    kl_k3,
    logprobs_from_logits,
    masked_importance,
    policy_gradient_loss,
    ppo_loss,
    rloo_loss,
    sapo_loss,
    sequence_mean,
    sequence_product,
    sequence_ratio,
    sequence_sum,
    token_ratio,
    total,
    truncated_importance,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

with warnings.catch_warnings():  # theirs: TRL also imports vLLM where it is installed
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer, RLOOTrainer
    from trl.trainer.utils import add_fused_lm_head

# Prompt and completion; 0 is the padding.
SEQUENCES = [
    ([1, 2, 3], [4, 5, 6, 7]),
    ([1, 2, 3], [8, 9]),
    ([9, 8, 7, 6], [10, 12, 1, 4, 2]),
    ([9, 8, 7, 6], [3]),
]
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.5])
LENGTHS = [len(completion) for _, completion in SEQUENCES]
NUM_TOKENS, MAX_LENGTH = sum(LENGTHS), max(LENGTHS)
TEMPERATURE = 0.7
Columns = dict[str, Tensor]


def make_model(seed: int) -> Any:
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.4,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).train()
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model


@pytest.fixture
def policy() -> Any:
    return make_model(0)


def scores_of(model: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of each completion's tokens."""
    logprobs, entropies = [], []
    for prompt, completion in SEQUENCES:
        ids = torch.tensor(prompt + completion)
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        logprobs.append(logprobs_from_logits(logits, ids[len(prompt) :], temperature=TEMPERATURE))
        scores = (logits / TEMPERATURE).log_softmax(-1)
        entropies.append(-(scores.exp() * scores).sum(-1))
    return logprobs, entropies


def recorded(policy: Any, spread: float, seed: int) -> list[Tensor]:
    """Log-probs of another policy, some way from this one's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        logprobs, _ = scores_of(policy)
    return [x + spread * torch.randn(len(x), generator=generator) for x in logprobs]


def padded(parts: list[Tensor], value: float = 0.0, left: bool = False) -> Tensor:
    longest = max(map(len, parts))
    rows = []
    for part in parts:
        more = torch.full((longest - len(part),), value, dtype=part.dtype)
        rows.append(torch.cat([more, part] if left else [part, more]))
    return torch.stack(rows)


def packed(parts: list[Tensor]) -> Tensor:
    """[T], NaN at the prompts."""
    filled = [
        torch.cat([torch.full((len(prompt),), torch.nan), part])
        for (prompt, _), part in zip(SEQUENCES, parts, strict=True)
    ]
    return torch.cat(filled)


def batch_of(policy: Any, **columns: list[Tensor]) -> tuple[Tensor, Columns]:
    logprobs, entropies = scores_of(policy)
    lengths = torch.tensor([0] + [len(p + c) for p, c in SEQUENCES])
    ones = [torch.ones(length) for length in LENGTHS]
    batch = {
        "token_mask": packed(ones) == 1,
        "advantages": packed([a * one for a, one in zip(ADVANTAGES, ones, strict=True)]),
        "cu_seqlens": lengths.cumsum(0).int(),
        "entropies": packed(entropies),
    }
    batch |= {name: packed(parts) for name, parts in columns.items()}
    return packed(logprobs), batch


def rows_of(**columns: list[Tensor]) -> dict[str, Tensor]:
    prompts = [torch.tensor(prompt) for prompt, _ in SEQUENCES]
    completions = [torch.tensor(completion) for _, completion in SEQUENCES]
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([torch.ones_like(x) for x in prompts], left=True),
        "completion_ids": padded(completions),
        "completion_mask": padded([torch.ones_like(x) for x in completions]),
        "advantages": ADVANTAGES,
        "num_items_in_batch": torch.tensor(NUM_TOKENS),
        **{name: padded(parts) for name, parts in columns.items()},
    }


def trainer_of(cls: type, model: Any, **attributes: Any) -> Any:
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=True,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
        report_to=[],
    )
    trainer = cls.__new__(cls)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=True,
        num_processes=1,
        sync_gradients=True,
        autocast=nullcontext,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
    )
    defaults = {
        "model": model,
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "max_completion_length": 10,
        "use_vllm": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "_entropy_bonus_enabled": bool(attributes.get("entropy_coef")),
        "current_gradient_accumulation_steps": 1,
        "_metrics": {"train": defaultdict(list)},
        "args": SimpleNamespace(**(vars(args) | attributes.pop("args", {}))),
    }
    vars(trainer).update(defaults | attributes)
    return trainer


def trl_loss(policy: Any, rows: dict[str, Tensor], **attributes: Any) -> tuple[Tensor, Any]:
    trainer = trainer_of(GRPOTrainer, policy, **attributes)
    return trainer._compute_loss(policy, rows), trainer._metrics["train"]


def assert_equal(output: LossOutput, batch: Columns, expected: Tensor, model: Any) -> None:
    loss = total(output.terms, count(batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    parameters = list(model.parameters())
    expected_gradients = torch.autograd.grad(expected, parameters)
    assert max(float(gradient.abs().max()) for gradient in expected_gradients) > 1e-3
    gradients = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


WIDE = {"clip_low": 0.2, "clip_high": 0.2}
LUSPO = partial(policy_gradient_loss, ratio=sequence_ratio, aggregate=sequence_sum)
# Name: TRL's attributes, the same here.
OBJECTIVES: dict[str, tuple[dict[str, Any], Any]] = {
    "grpo": ({}, partial(grpo_loss, aggregate=sequence_mean)),
    "bnpo": ({"loss_type": "bnpo"}, grpo_loss),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, dapo_loss),
    "dr_grpo": ({"loss_type": "dr_grpo"}, partial(dr_grpo_loss, num_tokens=10)),
    "gspo": ({"importance_sampling_level": "sequence"}, partial(gspo_loss, **WIDE)),
    # TRL's epsilon_high is the largest weight itself.
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, partial(cispo_loss, clip_high=0.2)),
    "sapo": ({"loss_type": "sapo"}, sapo_loss),
    "sapo, temperatures": (
        {
            "loss_type": "sapo",
            "args": {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 3.0},
        },
        partial(sapo_loss, temperature_positive=0.5, temperature_negative=3.0),
    ),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, LUSPO),
    "delta": ({"loss_type": "dapo", "args": {"delta": 1.3}}, partial(ppo_loss, dual_clip=1.3)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("with_old", [True, False])
def test_objectives_equal_trls(policy: Any, name: str, with_old: bool) -> None:
    attributes, objective = OBJECTIVES[name]
    old = recorded(policy, 0.5, seed=1) if with_old else None
    columns = {"old_logprobs": old} if with_old else {}
    logprobs, batch = batch_of(policy, **columns)
    rows = rows_of(**({"old_per_token_logps": old} if with_old else {}))
    expected, metrics = trl_loss(policy, rows, **attributes)
    output = objective(logprobs, batch)
    assert_equal(output, batch, expected, policy)
    ours = finalize(output.metrics, count(batch))
    assert ours["policy/entropy"] == pytest.approx(metrics["entropy"][0], rel=1e-5)
    if "clip_ratio/low_mean" in metrics and attributes.get("importance_sampling_level") is None:
        assert ours["policy/clip_fraction_low"] == pytest.approx(metrics["clip_ratio/low_mean"][0])
        high = ours["policy/clip_fraction_high"]
        assert high == pytest.approx(metrics["clip_ratio/high_mean"][0])
        assert not with_old or high > 0


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("name", ["grpo", "dapo", "sapo", "cispo"])
def test_kl_penalties_equal_trls(policy: Any, name: str, corrected: bool) -> None:
    attributes, objective = OBJECTIVES[name]
    old, reference = recorded(policy, 0.5, seed=1), recorded(policy, 0.5, seed=2)
    logprobs, batch = batch_of(policy, old_logprobs=old, reference_logprobs=reference)
    rows = rows_of(old_per_token_logps=old, ref_per_token_logps=reference)
    args = {"use_bias_correction_kl": corrected}
    expected, _ = trl_loss(policy, rows, **attributes, beta=0.3, args=args)
    kl = {} if corrected else {"kl": kl_k3}
    assert_equal(objective(logprobs, batch, kl_coefficient=0.3, **kl), batch, expected, policy)


def test_difference_trl_corrects_gspos_kl_by_the_sequences_ratio(policy: Any) -> None:
    """Here by the token's, which is what makes the gradient unbiased; TRL's can be passed."""
    old, reference = recorded(policy, 0.5, seed=1), recorded(policy, 1.5, seed=2)
    logprobs, batch = batch_of(policy, old_logprobs=old, reference_logprobs=reference)
    rows = rows_of(old_per_token_logps=old, ref_per_token_logps=reference)
    attributes, objective = OBJECTIVES["gspo"]
    expected, _ = trl_loss(policy, rows, **attributes, beta=0.3)

    def as_trl(logprobs: Tensor, reference_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
        return sequence_ratio(logprobs, old_logprobs, batch) * kl_k3(logprobs, reference_logprobs)

    assert_equal(objective(logprobs, batch, kl_coefficient=0.3, kl=as_trl), batch, expected, policy)
    ours = total(objective(logprobs, batch, kl_coefficient=0.3).terms, count(batch))
    assert abs(ours - expected) > 1e-3


@pytest.mark.parametrize("name", ["bnpo", "dapo", "cispo"])
def test_the_entropy_bonus_equals_trls(policy: Any, name: str) -> None:
    attributes, objective = OBJECTIVES[name]
    old = recorded(policy, 0.5, seed=1)
    logprobs, batch = batch_of(policy, old_logprobs=old)
    expected, _ = trl_loss(policy, rows_of(old_per_token_logps=old), **attributes, entropy_coef=0.4)
    assert_equal(objective(logprobs, batch, entropy_coefficient=0.4), batch, expected, policy)


def test_difference_trls_entropy_bonus_is_always_a_mean_of_tokens(policy: Any) -> None:
    """Here it has the mean of its objective: grpo's over sequences."""
    attributes, objective = OBJECTIVES["grpo"]
    logprobs, batch = batch_of(policy)
    without, _ = trl_loss(policy, rows_of(), **attributes)
    expected, _ = trl_loss(policy, rows_of(), **attributes, entropy_coef=0.4)
    _, entropies = scores_of(policy)
    torch.testing.assert_close(without - expected, 0.4 * torch.cat(entropies).mean())
    ours = objective(logprobs, batch, entropy_coefficient=0.4)
    per_sequence = torch.stack([x.mean() for x in entropies]).mean()
    loss = total(ours.terms, count(batch))
    torch.testing.assert_close(without - loss, 0.4 * per_sequence, rtol=1e-5, atol=1e-6)
    assert abs(loss - expected) > 1e-3


def test_difference_trl_counts_sequences_without_trained_tokens(policy: Any) -> None:
    logprobs, batch = batch_of(policy)
    start = int(batch["cu_seqlens"][-2])
    batch["token_mask"][start:] = False
    rows = rows_of()
    rows["completion_mask"][-1] = 0
    expected, _ = trl_loss(policy, rows, loss_type="grpo")
    ours = total(grpo_loss(logprobs, batch, aggregate=sequence_mean).terms, count(batch))
    torch.testing.assert_close(ours * 3 / 4, expected, rtol=1e-5, atol=1e-6)
    assert abs(expected) > 1e-2


def trl_importance(mode: str, low: float | None, high: float, **columns: list[Tensor]) -> Tensor:
    """The lines of TRL that make the weights, cut out of the method that also generates."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index("# Compute the importance sampling ratio when using vLLM")
    end = source.index("# Compute the per-token log probabilities for the reference", start)
    settings = {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }
    names = rows_of(**columns) | {
        "self": SimpleNamespace(**settings),
        "torch": torch,
        "math": math,
        "tool_mask": None,
    }
    names["old_per_token_logps"] = names["old_logprobs"]
    names["sampling_per_token_logps"] = names["sampled_logprobs"]
    lines = source[source.rindex("\n", 0, start) + 1 : end]
    exec(textwrap.dedent(lines), names)  # TRL's own lines
    return names["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo", "delta"])
@pytest.mark.parametrize(
    ("mode", "importance"),
    [
        ("token_truncate", truncated_importance),
        ("token_mask", masked_importance),
        ("sequence_truncate", partial(truncated_importance, level=sequence_product)),
        ("sequence_mask", partial(masked_importance, level=sequence_product)),
    ],
)
@pytest.mark.parametrize(("low", "high"), [(None, 1.4), (0.7, 1.5)])
def test_importance_weights_equal_trls(
    policy: Any, name: str, mode: str, importance: Any, low: float | None, high: float
) -> None:
    attributes, objective = OBJECTIVES[name]
    old, sampled = recorded(policy, 0.3, seed=1), recorded(policy, 0.3, seed=3)
    logprobs, batch = batch_of(policy, old_logprobs=old, sampled_logprobs=sampled)
    weights = trl_importance(mode, low, high, old_logprobs=old, sampled_logprobs=sampled)
    rows = rows_of(old_per_token_logps=old) | {"importance_sampling_ratio": weights}
    expected, _ = trl_loss(
        policy, rows, **attributes, use_vllm=True, vllm_importance_sampling_correction=True
    )
    bound = partial(importance, low=low or 0.0, high=high)
    assert_equal(objective(logprobs, batch, importance=bound), batch, expected, policy)


def trl_rloo(policy: Any, old: list[Tensor]) -> Tensor:
    trainer = trainer_of(RLOOTrainer, policy)
    rows = rows_of() | {"old_logps": torch.stack([x.sum() for x in old])}
    return trainer._compute_loss(policy, rows)


def test_rloo_equals_trls_on_policy(policy: Any) -> None:
    """In its gradient; the value of REINFORCE's loss means nothing, TRL's is that of a ratio."""
    logprobs, batch = batch_of(policy)
    with torch.no_grad():
        current, _ = scores_of(policy)
    parameters = list(policy.parameters())
    expected = torch.autograd.grad(trl_rloo(policy, current), parameters)
    loss = total(rloo_loss(logprobs, batch).terms, count(batch))
    gradients = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)


def test_trls_off_policy_rloo_is_a_composition(policy: Any) -> None:
    """It clips the ratio of the whole sequence."""
    old = recorded(policy, 0.1, seed=5)
    logprobs, batch = batch_of(policy, old_logprobs=old)

    def ratio(logprobs: Tensor, old_logprobs: Tensor, batch: Any) -> Tensor:
        product = sequence_product(logprobs - old_logprobs, batch)
        return token_ratio(product, torch.zeros_like(product))

    output = policy_gradient_loss(logprobs, batch, ratio=ratio, aggregate=sequence_mean)
    assert_equal(output, batch, trl_rloo(policy, old), policy)
