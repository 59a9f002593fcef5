"""Policy-gradient losses, built from a ratio, a surrogate and what is added to it.

The batch is a mapping of columns aligned to tokens, index t about token t:

- token_mask [T] bool, True where the token is trained. What other columns hold elsewhere, NaN
  included, does not matter;
- advantages [T], of the sequence, at each of its tokens, or of the tokens themselves;
- old_logprobs [T], of the trainer's policy that drew the tokens, which the ratio is taken against:
  scored once before the first update. Optional: without it the current ones, detached, take its
  place, so that every ratio is 1 and nothing is clipped; exact for one update per batch, and wrong
  from the second on;
- reference_logprobs [T], of the reference, needed for a KL penalty;
- sampled_logprobs [T], of the engine, needed for importance weights, else for metrics only;
- entropies [T], of the policy's distributions, differentiable, needed for an entropy bonus;
- nll_mask [T] bool, tokens of right answers, needed for the NLL term; wherever it is True the
  log-probs must be there;
- cu_seqlens [N+1], of the sequences.

A trained token that the policy itself rules out, with a log-prob of -inf, is 0 in every term but
the NLL and counts all the same; `mismatch/*` and `policy/*` show it. Where only old_logprobs rule
it out, no ratio is right and the loss need not be finite.

The log-probs of all of them are of the same, processed distributions: at temperature 0.7 in the
engine, log softmax(logits / 0.7) everywhere.

The metrics are, where there are the columns:

- loss/policy, loss/kl, loss/entropy, loss/nll: the terms as they enter the loss;
- policy/approximate_kl: KL(old || current), and policy/kl_reference: KL(current || reference), both
  by the estimate k3; policy/ratio_max; policy/entropy;
- policy/clip_fraction and others of `diagnostics.clip_fractions`;
- `importance/*`, of `diagnostics.weight_moments`; `mismatch/*`, of `diagnostics.logprob_mismatch`
  between the old policy and the engine: how far an update went is not in it.

Shape legend: T packed tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from burnish_losses._columns import check_mask, column, select
from burnish_losses._settings import check_coefficient
from burnish_losses.aggregate import (
    Aggregate,
    constant_length,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from burnish_losses.diagnostics import (
    clip_fractions,
    logprob_mismatch,
    token_mean_metric,
    weight_clip_fractions,
    weight_moments,
)
from burnish_losses.importance import Importance
from burnish_losses.kl import Kl, kl_k2, kl_k3, kl_k3_off_policy
from burnish_losses.ratios import Ratio, sequence_ratio, token_ratio
from burnish_losses.reduce import LossOutput, Metric, Term, masked_max, masked_sum
from burnish_losses.surrogates import (
    Surrogate,
    cispo_surrogate,
    clipped_surrogate,
    reinforce_surrogate,
    sapo_surrogate,
)

# (ratio, advantages, token_mask), all [T] and without gradient -> metrics.
Measure = Callable[[Tensor, Tensor, Tensor], dict[str, Metric]]


class Parts(TypedDict, total=False):
    """What every named objective takes besides its own settings; see `policy_gradient_loss`.

    Every one but `dr_grpo_loss`, which has its constant, takes `aggregate` as well: which mean, of
    the module `aggregate`. Its default is the objective's own and stands in the signature.
    """

    importance: Importance | None
    kl: Kl
    kl_coefficient: float
    entropy_coefficient: float
    nll_coefficient: float


def policy_gradient_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    ratio: Ratio = token_ratio,
    surrogate: Surrogate = clipped_surrogate,
    importance: Importance | None = None,
    kl: Kl = kl_k3_off_policy,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    nll_coefficient: float = 0.0,
    aggregate: Aggregate = token_mean,
    measure: Measure | None = None,
) -> LossOutput:
    """surrogate * importance + kl_coefficient KL - entropy_coefficient H, and an NLL term.

    Args:
        logprobs: [T], of the policy.
        batch: the columns of the module's docstring.
        ratio: of the module `ratios`; surrogate: of the module `surrogates`.
        importance: of the module `importance`, the correction between engine and trainer. It
            weighs the surrogate; the penalty pulls also at tokens that it drops.
        kl: of the module `kl`, which says what each form minimises.
        kl_coefficient, entropy_coefficient: >= 0, weights of penalty and bonus per token.
        nll_coefficient: >= 0, weight of the mean NLL over nll_mask (VAPO, Yue et al. 2025,
            "Positive Example LM Loss").
        aggregate: which mean, of the module `aggregate`, of all but the NLL.
        measure: further metrics, such as `clip_fractions` with the surrogate's bounds.

    Returns:
        Terms in the unit of `aggregate`, and the NLL's in nll_tokens; metrics.

    Raises:
        ValueError: a missing column, one that is optional and misspelt, one of another shape, a
            mask that is not bool, a setting out of range.
    """
    check_coefficient(
        kl_coefficient=kl_coefficient,
        entropy_coefficient=entropy_coefficient,
        nll_coefficient=nll_coefficient,
    )
    needed = {
        "advantages": True,
        "reference_logprobs": kl_coefficient,
        "entropies": entropy_coefficient,
        "sampled_logprobs": importance is not None,
    }
    required = [name for name, used in needed.items() if used]
    mask, current, columns = select(logprobs, batch, *required, optional=("old_logprobs", *needed))
    old = columns.get("old_logprobs", current).detach()

    metrics = _common_metrics(current.detach(), old, columns, batch)
    if importance is not None:
        weights = importance(old - columns["sampled_logprobs"], batch)
        metrics |= weight_moments("importance", weights, mask)
    possible = current != -torch.inf
    current, old = torch.where(possible, current, 0.0), torch.where(possible, old, 0.0)
    columns = {name: torch.where(possible, values, 0.0) for name, values in columns.items()}

    ratios = ratio(current, old, batch)
    losses = surrogate(ratios, columns["advantages"], current)
    metrics["policy/ratio_max"] = Metric(masked_max(ratios.detach(), mask), None, "max")
    if measure is not None:
        metrics |= measure(ratios.detach(), columns["advantages"], mask)
    if importance is not None:
        losses = losses * torch.where(possible, weights, 0.0)
    terms = {"policy": aggregate(losses, batch)}
    if kl_coefficient:
        penalty = aggregate(kl(current, columns["reference_logprobs"], old), batch)
        terms["kl"] = _weighted(penalty, kl_coefficient)
    if entropy_coefficient:
        terms["entropy"] = _weighted(aggregate(-columns["entropies"], batch), entropy_coefficient)
    if nll_coefficient:
        terms["nll"] = _weighted(positive_nll(logprobs, batch), nll_coefficient)
    for name, term in terms.items():
        value = term.weight * term.sum.detach()
        metrics[f"loss/{name}"] = Metric(value, term.unit, "mean")
    return LossOutput(tuple(terms.values()), metrics)


def grpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: Aggregate = token_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """GRPO: the clipped surrogate, with group-relative advantages.

    Shao et al. 2024, "DeepSeekMath", eq. 3. That paper's mean is `aggregate=sequence_mean`, where
    a sequence without a trained token counts in neither (see `reduce.count`), and its penalty
    `kl=kl_k3`.

    Args:
        clip_low, clip_high: >= 0, the ratio is clipped to [1 - clip_low, 1 + clip_high].
        aggregate: which mean, of the module `aggregate`.
        logprobs, batch, parts: as in `policy_gradient_loss`, as what is returned and raised.
    """
    return _clipped_loss(logprobs, batch, clip_low, clip_high, aggregate=aggregate, **parts)


def dr_grpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    num_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **parts: Unpack[Parts],
) -> LossOutput:
    """Dr. GRPO: sums over tokens, over a constant `num_tokens`, the budget of a completion.

    Liu et al. 2025, "Understanding R1-Zero-Like Training"; advantages not divided by the group's
    standard deviation.
    """
    return _clipped_loss(
        logprobs, batch, clip_low, clip_high, aggregate=constant_length(num_tokens), **parts
    )


def dapo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    aggregate: Aggregate = token_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """DAPO: a higher upper bound, and the mean over all tokens (Yu et al. 2025, eq. 8)."""
    return _clipped_loss(logprobs, batch, clip_low, clip_high, aggregate=aggregate, **parts)


def gspo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio: Ratio = sequence_ratio,
    aggregate: Aggregate = sequence_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """GSPO: one ratio per sequence, clipped as one (Zheng et al. 2025).

    The bounds are the paper's; a mean over tokens moves less than a token. GSPO-token is
    `ratio=sequence_token_ratio`.
    """
    return _clipped_loss(
        logprobs, batch, clip_low, clip_high, ratio=ratio, aggregate=aggregate, **parts
    )


def cispo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    aggregate: Aggregate = token_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """CISPO: clipped weights on REINFORCE, mean over all tokens (MiniMax 2025, "MiniMax-M1")."""
    surrogate = partial(cispo_surrogate, clip_low=clip_low, clip_high=clip_high)
    measure = partial(weight_clip_fractions, clip_low=clip_low, clip_high=clip_high)
    return policy_gradient_loss(
        logprobs, batch, surrogate=surrogate, measure=measure, aggregate=aggregate, **parts
    )


def sapo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    aggregate: Aggregate = sequence_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """SAPO: a smooth gate in the place of clipping, mean over sequences (Gao et al. 2025)."""
    surrogate = partial(
        sapo_surrogate,
        temperature_positive=temperature_positive,
        temperature_negative=temperature_negative,
    )
    return policy_gradient_loss(logprobs, batch, surrogate=surrogate, aggregate=aggregate, **parts)


def rloo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    aggregate: Aggregate = sequence_sum,
    **parts: Unpack[Parts],
) -> LossOutput:
    """RLOO: REINFORCE on whole sequences, with leave-one-out advantages (Ahmadian et al. 2024).

    -A log pi(sequence), mean over sequences. For one update per batch: there is no ratio.
    """
    return policy_gradient_loss(
        logprobs, batch, surrogate=reinforce_surrogate, aggregate=aggregate, **parts
    )


def reinforce_plus_plus_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: Aggregate = token_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """REINFORCE++: PPO's surrogate without a critic (Hu 2025).

    The advantages are normalised over the global batch, not here, and have the KL penalty in them;
    the variant with a baseline has it in the loss, as k2.
    """
    parts.setdefault("kl", kl_k2)
    return _clipped_loss(logprobs, batch, clip_low, clip_high, aggregate=aggregate, **parts)


def ppo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregate: Aggregate = token_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """PPO's policy part (Schulman et al. 2017, eq. 7); the critic's is `value_loss`.

    The advantages are of tokens, by GAE. VAPO (Yue et al. 2025) adds `nll_coefficient=0.1` and
    a `clip_high` of 0.28.
    """
    return _clipped_loss(
        logprobs, batch, clip_low, clip_high, dual_clip=dual_clip, aggregate=aggregate, **parts
    )


def positive_nll(logprobs: Tensor, batch: Mapping[str, Tensor]) -> Term:
    """-log pi summed over nll_mask [T], in nll_tokens; VAPO's imitation of right answers."""
    mask = column(batch, "nll_mask", like=logprobs)
    check_mask(mask, "nll_mask")
    return Term(-masked_sum(logprobs, mask), "nll_tokens")


def _clipped_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    clip_low: float,
    clip_high: float,
    *,
    dual_clip: float | None = None,
    ratio: Ratio = token_ratio,
    aggregate: Aggregate = token_mean,
    **parts: Unpack[Parts],
) -> LossOutput:
    """The clipped surrogate with its clip fractions."""
    surrogate = partial(
        clipped_surrogate, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    measure = partial(clip_fractions, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return policy_gradient_loss(
        logprobs,
        batch,
        ratio=ratio,
        surrogate=surrogate,
        measure=measure,
        aggregate=aggregate,
        **parts,
    )


def _common_metrics(
    logprobs: Tensor, old: Tensor, columns: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> dict[str, Metric]:
    """How far from the old policy, the reference and the engine; the entropy; all without grad."""
    mask = batch["token_mask"]
    metrics = token_mean_metric("policy/approximate_kl", kl_k3(old, logprobs), mask)
    if "reference_logprobs" in columns:
        kl = kl_k3(logprobs, columns["reference_logprobs"])
        metrics |= token_mean_metric("policy/kl_reference", kl, mask)
    if "entropies" in columns:
        metrics |= token_mean_metric("policy/entropy", columns["entropies"], mask)
    if "sampled_logprobs" in columns:
        metrics |= logprob_mismatch(old, columns["sampled_logprobs"], batch)
    return metrics


def _weighted(term: Term, coefficient: float) -> Term:
    return replace(term, weight=coefficient * term.weight)
