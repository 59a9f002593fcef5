"""Preference losses on pairs of completions: DPO and its relatives, SimPO, CPO, ORPO.

The batch is a mapping of columns:

- token_mask [T] bool, True where the completion's token counts. What other columns hold elsewhere,
  NaN included, does not matter;
- reference_logprobs [T], of the reference, for `dpo_loss`;
- cu_seqlens [N+1];
- pair_ids [N] integers: both sequences of a pair share one >= 0, -1 is in no pair. Pairs are whole
  within a micro-batch, in any order;
- chosen [N] bool;
- nll_mask [T] bool, where the SFT term acts, if it has a weight: the chosen completions, for ORPO
  their prompts as well. It need not lie within token_mask.

Every loss has one term in pairs and, with `nll_coefficient`, one in nll_tokens. Metrics, means over
pairs: loss/preference; rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy (ties
count half); logps/chosen and logps/rejected, summed or averaged as the loss does it. Over
nll_tokens: loss/nll, before its weight.

Shape legend: T packed tokens, N sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from burnish_losses._columns import check_mask, column, select
from burnish_losses._pairs import pair_metrics, pair_positions, sequence_values
from burnish_losses._settings import check_coefficient, check_positive
from burnish_losses.pair_losses import PairLoss, sigmoid_pair_loss
from burnish_losses.reduce import LossOutput, Metric, Term, masked_sum

# Mean log-probs above this, p > 0.999999, have their log-odds continued as a straight line: 10
# times the rounding of float32, below which log(1 - p) is noise and its derivative without bound.
LOG_ODDS_LIMIT = -1e-6


def dpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    beta: float = 0.1,
    pair_loss: PairLoss = sigmoid_pair_loss,
    length_average: bool = False,
    nll_coefficient: float = 0.0,
) -> LossOutput:
    """`pair_loss` of the two completions' log-ratios to the reference.

    DPO (Rafailov et al. 2023, eq. 7). The other pair losses are in the module `pair_losses`.
    `nll_coefficient` adds the SFT term on the chosen completions (Pang et al. 2024, "Iterative
    Reasoning Preference Optimization", there averaged over each completion; here over all tokens).

    Args:
        logprobs: [T], of the policy.
        batch: the columns of the module's docstring.
        beta: > 0, strength of the pull to the reference.
        pair_loss: (chosen_logratios [P], rejected_logratios [P], beta) -> [P].
        length_average: log-ratios are means over the sequence's own trained tokens, not sums.
            Rewards are beta times what `pair_loss` gets.
        nll_coefficient: >= 0.

    Returns:
        Terms and metrics of the module's docstring. At policy == reference margins are exactly 0.

    Raises:
        ValueError: a missing column, one of another shape or dtype, a pair that is not one chosen
            and one rejected sequence, a setting out of range.
    """
    check_positive(beta=beta)
    mask, selected, columns = select(logprobs, batch, "reference_logprobs")
    log_ratios = selected - columns["reference_logprobs"]
    chosen, rejected = _of_pairs(log_ratios, mask, batch, length_average)
    logps = _of_pairs(selected.detach(), mask, batch, length_average)
    losses = pair_loss(chosen, rejected, beta)
    rewards = (beta * chosen, beta * rejected)
    return _output(losses, rewards, logps, logprobs, batch, nll_coefficient)


def cpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    beta: float = 0.1,
    pair_loss: PairLoss = sigmoid_pair_loss,
    length_average: bool = False,
    nll_coefficient: float = 1.0,
) -> LossOutput:
    """-log sigmoid(beta (log pi(y_w) - log pi(y_l))), and the SFT term: DPO without a reference.

    CPO (Xu et al. 2024, "Contrastive Preference Optimization"). Arguments, returns, errors: as
    those of `dpo_loss`, without reference_logprobs; log-probs take the place of log-ratios. The
    SFT term needs nll_mask, unless `nll_coefficient=0`.
    """
    check_positive(beta=beta)
    mask, selected, _ = select(logprobs, batch)
    chosen, rejected = _of_pairs(selected, mask, batch, length_average)
    losses = pair_loss(chosen, rejected, beta)
    rewards = (beta * chosen, beta * rejected)
    return _output(losses, rewards, (chosen, rejected), logprobs, batch, nll_coefficient)


def simpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll_coefficient: float = 0.0,
) -> LossOutput:
    """-log sigmoid(beta (mean log pi(y_w) - mean log pi(y_l)) - gamma), means over tokens.

    SimPO (Meng et al. 2024, eq. 6). Gamma is the margin of the rewards, after beta; the paper also
    speaks of the ratio gamma / beta.

    Args:
        logprobs: [T], of the policy.
        batch: the columns of the module's docstring; no reference.
        beta: > 0, of mean log-probs, so larger than DPO's.
        gamma: >= 0.
        label_smoothing: in [0, 0.5), as in `sigmoid_pair_loss`.
        nll_coefficient: >= 0.

    Returns, errors: as those of `dpo_loss`.
    """
    check_coefficient(gamma=gamma)

    def with_margin(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
        return sigmoid_pair_loss(
            chosen - gamma / beta, rejected, beta, label_smoothing=label_smoothing
        )

    return cpo_loss(
        logprobs,
        batch,
        beta=beta,
        pair_loss=with_margin,
        length_average=True,
        nll_coefficient=nll_coefficient,
    )


def orpo_loss(
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    beta: float = 0.1,
    nll_coefficient: float = 1.0,
) -> LossOutput:
    """NLL - beta log sigmoid(log odds(y_w) - log odds(y_l)), odds(y) = p / (1 - p).

    ORPO (Hong et al. 2024, eqs. 6 and 7, beta its lambda), p the geometric mean over the
    completion's tokens. Below 1 - p = 1e-6 the log-odds go on as a straight line, so that values
    and gradients stay finite; a completion without trained tokens has p = 1.

    Args:
        logprobs: [T], of the policy.
        batch: the columns of the module's docstring; no reference.
        beta: > 0, weight of the odds-ratio loss.
        nll_coefficient: >= 0, of the SFT term, which needs nll_mask unless this is 0.

    Returns:
        Terms and metrics of the module's docstring. Rewards are beta times mean log-probs;
        loss/preference is before beta. More: preference/log_odds, of chosen against rejected.

    Raises:
        ValueError: as in `dpo_loss`.
    """
    check_positive(beta=beta)
    mask, selected, _ = select(logprobs, batch)
    chosen, rejected = _of_pairs(selected, mask, batch, length_average=True)
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    losses = -logsigmoid(log_odds)
    rewards = (beta * chosen, beta * rejected)
    output = _output(losses, rewards, (chosen, rejected), logprobs, batch, nll_coefficient, beta)
    metric = Metric(log_odds.detach().sum(), "pairs", "mean")
    return LossOutput(output.terms, output.metrics | {"preference/log_odds": metric})


def _of_pairs(
    values: Tensor, mask: Tensor, batch: Mapping[str, Tensor], length_average: bool
) -> tuple[Tensor, Tensor]:
    """Values [T] over the chosen sequence [P] and the rejected one [P] of each pair."""
    cu_seqlens = column(batch, "cu_seqlens")
    of_sequences = sequence_values(values, mask, cu_seqlens, length_average=length_average)
    chosen, rejected = pair_positions(batch, like=of_sequences)
    return of_sequences[chosen], of_sequences[rejected]


def _output(
    losses: Tensor,
    rewards: tuple[Tensor, Tensor],
    logps: tuple[Tensor, Tensor],
    logprobs: Tensor,
    batch: Mapping[str, Tensor],
    nll_coefficient: float,
    weight: float = 1.0,
) -> LossOutput:
    """Losses [P] and the SFT term; rewards and logps are of chosen and rejected, [P] each."""
    check_coefficient(nll_coefficient=nll_coefficient)
    terms = [Term(losses.sum(), "pairs", weight)]
    metrics = {
        "loss/preference": Metric(losses.detach().sum(), "pairs", "mean"),
        **pair_metrics(*rewards),
        "logps/chosen": Metric(logps[0].detach().sum(), "pairs", "mean"),
        "logps/rejected": Metric(logps[1].detach().sum(), "pairs", "mean"),
    }
    if nll_coefficient > 0:
        if "nll_mask" not in batch:
            raise ValueError(
                f"The batch must have the column nll_mask for nll_coefficient={nll_coefficient}, "
                f"got {sorted(batch)}; add it, or pass nll_coefficient=0."
            )
        nll_mask = column(batch, "nll_mask", like=logprobs)
        check_mask(nll_mask, "nll_mask")
        nll = masked_sum(-logprobs, nll_mask)
        terms.append(Term(nll, "nll_tokens", nll_coefficient))
        metrics["loss/nll"] = Metric(nll.detach(), "nll_tokens", "mean")
    return LossOutput(tuple(terms), metrics)


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p [P]; linear above LOG_ODDS_LIMIT, where it is the tangent."""
    below = logprobs.clamp(max=LOG_ODDS_LIMIT)
    slope = -1 / torch.expm1(below.new_tensor(LOG_ODDS_LIMIT))  # d/dx = 1 / (1 - exp(x))
    # relu: its derivative is 0 below the limit, where a difference of slopes would be rounding.
    return below - torch.log(-torch.expm1(below)) + slope * relu(logprobs - LOG_ODDS_LIMIT)
