"""Losses of reward models: one score a sequence, learnt from pairs.

Shape legend: N sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import logsigmoid

from burnish_losses._columns import check_spelling, check_tensors, column, widened
from burnish_losses._pairs import pair_metrics, pair_positions
from burnish_losses._settings import check_coefficient
from burnish_losses.reduce import LossOutput, Metric, Term


def bradley_terry_loss(
    scores: Tensor, batch: Mapping[str, Tensor], *, center_coefficient: float = 0.0
) -> LossOutput:
    """-log sigmoid(s_chosen - s_rejected - margin), and a pull of the scores towards 0.

    Bradley-Terry as in InstructGPT (Ouyang et al. 2022, eq. 1); the margin, how much better the
    chosen one is said to be, as in Llama 2 (Touvron et al. 2023, eq. 2). Only differences of scores
    matter to it, so `center_coefficient (s_chosen + s_rejected)^2` can fix their level (Eisenstein
    et al. 2023, "Helping or Herding?").

    Args:
        scores: [N], one a sequence: the reward head on the hidden state of the sequence's own last
            token, `head(hidden[cu_seqlens[1:] - 1]).squeeze(-1)` of a pack without padding. Nothing
            is shifted here, unlike for log-probs: that state has seen the whole sequence. What
            stands at sequences in no pair, NaN included, does not matter.
        batch: pair_ids [N], both sequences of a pair share one >= 0, -1 is in no pair; chosen [N]
            bool; margins [N], optional, read at the chosen sequence of a pair and nowhere else.
            For the counts these are enough: pairs are counted from pair_ids.
        center_coefficient: >= 0; 0.01 is usual.

    Returns:
        Terms in pairs. Metrics, means over pairs: loss/preference, rewards/chosen,
        rewards/rejected, rewards/margin (of the scores alone), rewards/accuracy (ties count half).

    Raises:
        ValueError: a missing or misspelt column, one of another shape or dtype, a pair that is not
            one chosen and one rejected sequence, a setting out of range.
    """
    check_coefficient(center_coefficient=center_coefficient)
    check_tensors("[N]", scores=scores)
    if scores.dim() != 1:
        raise ValueError(f"scores must be [N], got {tuple(scores.shape)}; squeeze the last axis.")
    check_spelling(batch, ["margins"])
    scores = widened(scores)
    first, second = pair_positions(batch, like=scores)
    chosen, rejected = scores[first], scores[second]
    gaps = chosen - rejected
    if "margins" in batch:
        gaps = gaps - column(batch, "margins", like=scores)[first].detach().to(scores.dtype)
    losses = -logsigmoid(gaps)
    terms = [Term(losses.sum(), "pairs")]
    if center_coefficient > 0:
        terms.append(Term((chosen + rejected).square().sum(), "pairs", center_coefficient))
    metrics = {"loss/preference": Metric(losses.sum().detach(), "pairs", "mean")}
    return LossOutput(tuple(terms), metrics | pair_metrics(chosen, rejected))
