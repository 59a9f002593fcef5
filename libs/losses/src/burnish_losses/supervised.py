"""Supervised fine-tuning: the negative log-likelihood of the trained tokens.

Shape legend: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from burnish_losses._columns import select
from burnish_losses.aggregate import Aggregate, token_mean
from burnish_losses.reduce import LossOutput, Metric, masked_sum


def nll_loss(
    logprobs: Tensor, batch: Mapping[str, Tensor], *, aggregate: Aggregate = token_mean
) -> LossOutput:
    """-log pi(token), over the trained tokens.

    Args:
        logprobs: [T], of the policy.
        batch: token_mask [T] bool, and cu_seqlens [N+1] if `aggregate` is over sequences;
            token_weights [T], optional: a token's loss counts so often (what it is divided by stays
            the number of tokens).
        aggregate: which mean, of the module `aggregate`. By tokens, long answers weigh more; by
            `sequence_mean`, all weigh alike.

    Returns:
        A term in the unit of `aggregate`, and the metric nll: the mean over tokens in nats,
        whatever `aggregate` and the weights are. Its exp, taken after `finalize`, is the
        perplexity.

    Raises:
        ValueError: a missing column, one of another shape, a mask that is not bool.
    """
    mask, logprobs, columns = select(logprobs, batch, optional=["token_weights"])
    metrics = {"nll": Metric(masked_sum(-logprobs.detach(), mask), "tokens", "mean")}
    losses = -logprobs * columns["token_weights"] if columns else -logprobs
    return LossOutput((aggregate(losses, batch),), metrics)
