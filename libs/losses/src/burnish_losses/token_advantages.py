"""Rewards at tokens and generalised advantage estimation over packed sequences, in float64.

Untrained tokens in between, such as a tool's output, are no steps: from one trained token to the
next there is one discount, and neither their values nor their rewards are looked at. So the first
token after a tool's output is what the last one before it leads to. Each sequence ends in a
terminal state, of value 0.

Shape legend: T packed tokens, N sequences, M trained tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish_losses._columns import check_mask, check_tensors, check_tokens
from burnish_losses._groups import TINY
from burnish_losses._settings import check_coefficient, check_positive
from burnish_losses.reduce import sequence_lengths


class Estimates(NamedTuple):
    """[T] each, float64, 0 at untrained tokens."""

    advantages: Tensor
    returns: Tensor


def token_rewards(
    rewards: Tensor,
    token_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """The sequence's reward at its last trained token, less `kl_coefficient * kl` at each.

    The reward of PPO in InstructGPT (Ouyang et al. 2022) and of REINFORCE++ (Hu et al. 2025).

    Args:
        rewards: [N], finite for every sequence with a trained token: filter others beforehand, by
            `rewards.keep_sequences`.
        token_mask: [T] bool. A sequence without a trained token gets no reward.
        cu_seqlens: [N+1], int32 or int64, from 0 to T.
        kl: [T], estimates at each token, such as `kl_k1(old_logprobs, reference_logprobs)`; needed
            if `kl_coefficient` is not 0.
        kl_coefficient: >= 0.

    Returns:
        [T], float64, 0 at untrained tokens.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool, a reward that is not finite,
            a coefficient that is negative or lacks `kl`.
    """
    lengths = sequence_lengths(token_mask, cu_seqlens)
    scored = lengths > 0
    check_tensors("[N]", rewards=rewards)
    if rewards.shape != lengths.shape:
        raise ValueError(
            f"rewards must be [N] = [{len(lengths)}], one a sequence of cu_seqlens, got "
            f"{tuple(rewards.shape)}; give each rollout one reward."
        )
    broken = (scored & ~rewards.isfinite()).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"rewards must be finite where a token is trained, got {float(rewards[broken[0]])} at "
            f"index {broken[0]}, the first of {len(broken)}; set token_mask to False in sequences "
            "without a reward, by keep_sequences."
        )
    check_coefficient(kl_coefficient=kl_coefficient)
    if kl_coefficient and kl is None:
        raise ValueError(f"kl must be given for a kl_coefficient of {kl_coefficient}, got None.")
    result = torch.zeros_like(token_mask, dtype=torch.float64)
    if kl is not None and kl_coefficient:
        check_tokens(kl=kl, token_mask=token_mask)
        result = torch.where(token_mask, -kl_coefficient * kl.detach().double(), 0.0)
    last = token_mask.nonzero().squeeze(-1)[lengths.cumsum(0)[scored] - 1]
    return result.index_add(0, last, rewards[scored].double())


def gae(
    rewards: Tensor,
    values: Tensor,
    token_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
) -> Estimates:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    With t + 1 the next trained token of the sequence, and V = 0 after the last one,
    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}. Returns are A + V.
    With values of 0, `gamma=1` and `lam=1`, A_t is the sum of the rewards from t on.

    For VAPO (Yue et al. 2025) take the advantages with `lam=length_adaptive_lambda(lengths)` and
    the returns of a second call with `lam=1.0`. To whiten, apply `whiten` to the advantages of the
    whole batch.

    Args:
        rewards: [T], as from `token_rewards`.
        values: [T], of the critic at each token before it is drawn; detached here.
        token_mask: [T] bool. What rewards and values hold elsewhere, NaN included, does not matter.
        cu_seqlens: [N+1], int32 or int64, from 0 to T.
        gamma: in [0, 1].
        lam: in [0, 1], a number or [N], one of each sequence.

    Returns:
        advantages and returns.

    Raises:
        ValueError: shapes that do not match, a mask that is not bool, settings out of range.
    """
    check_tokens(rewards=rewards, values=values, token_mask=token_mask)
    lengths = sequence_lengths(token_mask, cu_seqlens)
    lams = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    if lams.shape not in ((), lengths.shape) or not ((lams >= 0) & (lams <= 1)).all():
        raise ValueError(f"lam must be in [0, 1], a number or [N] = [{len(lengths)}], got {lam}.")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}.")
    sequences = torch.repeat_interleave(lengths)  # [M], of each trained token
    trained_values = values.detach()[token_mask].double()
    ahead = _from_ahead(trained_values, 1, sequences)
    deltas = rewards.detach()[token_mask].double() + gamma * ahead - trained_values
    decays = (gamma * lams).expand_as(lengths)[sequences]
    advantages = _discounted_sums(deltas, decays, sequences, max(lengths.tolist(), default=0))
    zeros = torch.zeros_like(values, dtype=torch.float64)
    return Estimates(
        zeros.masked_scatter(token_mask, advantages),
        zeros.masked_scatter(token_mask, advantages + trained_values),
    )


def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05) -> Tensor:
    """1 - 1 / (alpha * length), at least 0: VAPO's length-adaptive GAE (Yue et al. 2025).

    Args:
        lengths: [N], trained tokens of each sequence.
        alpha: > 0.

    Returns:
        [N], float64, in [0, 1). Up to 1 / alpha tokens it is 0.

    Raises:
        ValueError: an alpha that is not positive.
    """
    check_positive(alpha=alpha)
    check_tensors("[N]", lengths=lengths)
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0.0)


def whiten(
    values: Tensor, token_mask: Tensor, *, shift_mean: bool = True, relative_floor: float = 1e-6
) -> Tensor:
    """Values at trained tokens less their mean, over their standard deviation.

    Mean and deviation are over all that is given: give the whole global batch, or the result
    depends on how it was cut. REINFORCE++ with a KL penalty at each token (Hu et al. 2025) is
    `whiten(gae(token_rewards(...), zeros, ..., lam=1.0).advantages, token_mask)`.

    Args:
        values: [T]. At untrained tokens anything, NaN included.
        token_mask: [T] bool.
        shift_mean: if False, the mean is added again after the division.
        relative_floor: > 0, the deviation is at least this part of the largest `|value|`.

    Returns:
        [T], float64, 0 at untrained tokens. The deviation is the sample's (n - 1).

    Raises:
        ValueError: shapes that do not match, a mask that is not bool, a floor not positive.
    """
    check_mask(token_mask)
    check_tokens(values=values, token_mask=token_mask)
    check_positive(relative_floor=relative_floor)
    trained = values.detach()[token_mask].double()
    num = max(len(trained), 1)
    mean = trained.sum() / num
    centred = trained - mean
    deviation = (centred.square().sum() / max(num - 1, 1)).sqrt()
    largest = torch.cat([trained.abs(), trained.new_zeros(1)]).amax()
    whitened = centred / torch.maximum(deviation, (relative_floor * largest).clamp(min=TINY))
    zeros = torch.zeros_like(values, dtype=torch.float64)
    return zeros.masked_scatter(token_mask, whitened if shift_mean else whitened + mean)


def _discounted_sums(values: Tensor, decays: Tensor, sequences: Tensor, longest: int) -> Tensor:
    """[M]: the sum over k >= 0 of decay^k values[t + k] within t's sequence.

    By doubling: with the sums of `step` values at hand, one addition gives those of `2 * step`, so
    that the longest sequence of L tokens takes log2(L) passes over all.
    """
    step = 1
    while step < longest:
        values = values + decays * _from_ahead(values, step, sequences)
        decays = decays.square()
        step *= 2
    return values


def _from_ahead(values: Tensor, step: int, sequences: Tensor) -> Tensor:
    """[M]: values[t + step], 0 where that is not in t's sequence."""
    same = sequences[step:] == sequences[:-step]
    return torch.cat([torch.where(same, values[step:], 0.0), torch.zeros_like(values[:step])])
