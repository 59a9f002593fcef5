"""Losses of a pair: what a preference loss does with two log-ratios.

Each is a function (chosen_logratios [P], rejected_logratios [P], beta) -> [P], to be given as
`pair_loss=` to `dpo_loss` or `cpo_loss`. Options are bound with `functools.partial`. A log-ratio is
log pi(y|x) - log pi_ref(y|x) of the completion, summed over its tokens or averaged as the caller of
the loss says; without a reference it is log pi(y|x). The margin is chosen minus rejected.

Shape legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid, relu

# (chosen_logratios [P], rejected_logratios [P], beta) -> losses [P].
PairLoss = Callable[[Tensor, Tensor, float], Tensor]


def sigmoid_pair_loss(
    chosen_logratios: Tensor,
    rejected_logratios: Tensor,
    beta: float,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-(1 - e) log sigmoid(beta margin) - e log sigmoid(-beta margin), e the label smoothing.

    DPO (Rafailov et al. 2023, eq. 7); with e > 0, the share of labels held to be wrong,
    conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences").

    Raises:
        ValueError: label_smoothing not in [0, 0.5).
    """
    _check_label_smoothing(label_smoothing)
    scaled = beta * (chosen_logratios - rejected_logratios)
    loss = -(1 - label_smoothing) * logsigmoid(scaled)
    return loss - label_smoothing * logsigmoid(-scaled) if label_smoothing else loss


def robust_pair_loss(
    chosen_logratios: Tensor,
    rejected_logratios: Tensor,
    beta: float,
    *,
    label_smoothing: float,
) -> Tensor:
    """((1 - e) l(margin) - e l(-margin)) / (1 - 2 e), l(m) = -log sigmoid(beta m).

    An unbiased estimate of DPO's loss on clean labels when a share e = label_smoothing of them was
    flipped (Chowdhury et al. 2024, "Provably Robust DPO"). It is not bounded below.

    Raises:
        ValueError: label_smoothing not in [0, 0.5).
    """
    _check_label_smoothing(label_smoothing)
    scaled = beta * (chosen_logratios - rejected_logratios)
    clean, flipped = -logsigmoid(scaled), -logsigmoid(-scaled)
    weighted = (1 - label_smoothing) * clean - label_smoothing * flipped
    return weighted / (1 - 2 * label_smoothing)


def hinge_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta margin).

    SLiC (Zhao et al. 2023) as normalised by the reference in RSO (Liu et al. 2023, "Statistical
    Rejection Sampling").
    """
    return relu(1 - beta * (chosen_logratios - rejected_logratios))


def ipo_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, beta: float) -> Tensor:
    """(margin - 1 / (2 beta))^2, beta the paper's tau.

    IPO (Azar et al. 2023, eq. 17). The paper writes whole-sequence probabilities, so sums over
    tokens: `length_average=False`. Then the aim 1 / (2 beta) is for the sum whatever its length.
    TRL averages, "confirmed with the authors" for their experiments: `length_average=True`, where
    each sequence's own number of trained tokens divides. A beta of the one is not one of the other.
    """
    return (chosen_logratios - rejected_logratios - 1 / (2 * beta)).square()


def apo_zero_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, beta: float) -> Tensor:
    """(1 - sigmoid(beta chosen)) + sigmoid(beta rejected): chosen up, rejected down.

    APO-zero (D'Oosterlinck et al. 2024), for chosen completions better than the model's own; a
    constant apart, so that the best is 0.
    """
    return (-beta * chosen_logratios).sigmoid() + (beta * rejected_logratios).sigmoid()


def apo_down_pair_loss(chosen_logratios: Tensor, rejected_logratios: Tensor, beta: float) -> Tensor:
    """sigmoid(beta chosen) + (1 - sigmoid(beta margin)): both down, rejected more.

    APO-down (D'Oosterlinck et al. 2024), for chosen completions worse than the model's own; a
    constant apart, so that the best is 0.
    """
    margins = chosen_logratios - rejected_logratios
    return (beta * chosen_logratios).sigmoid() + (-beta * margins).sigmoid()


def _check_label_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must be in [0, 0.5), got {label_smoothing}; from one half on, the "
            "labels say nothing or the opposite."
        )
