"""What the preference losses share: which sequences are pairs, values of sequences, rewards.

Shape legend: T packed tokens, N sequences, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from burnish_losses._columns import check_integers, check_mask, column
from burnish_losses.reduce import Metric, sums_and_lengths


def pair_positions(batch: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """Where the chosen and the rejected sequence of each pair are, pairs in the order of their ids.

    Args:
        batch: pair_ids [N] integers, both sequences of a pair share one >= 0, -1 is in no pair;
            chosen [N] bool, not looked at where there is no pair.
        like: [N], what is aligned to sequences.

    Returns:
        [P] int64 of the chosen, [P] of the rejected.

    Raises:
        ValueError: a missing column, one of another shape or dtype, or a pair that is not one
            chosen and one rejected sequence.
    """
    pair_ids, chosen = column(batch, "pair_ids", like), column(batch, "chosen", like)
    check_integers("[N]", pair_ids=pair_ids)
    check_mask(chosen, "chosen")
    order = (~chosen).int().argsort(stable=True)  # chosen first, also within each pair
    order = order[pair_ids[order].argsort(stable=True)]
    order = order[pair_ids[order] >= 0]
    if len(order) % 2 == 0:
        first, second = order[::2], order[1::2]
        whole = (pair_ids[first] == pair_ids[second]) & chosen[first] & ~chosen[second]
        if bool(whole.all()):
            return first, second
    raise ValueError(_broken_pair(pair_ids, chosen))


def sequence_values(
    values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, length_average: bool
) -> Tensor:
    """Sums [N] over the trained tokens of each sequence, or their means; 0 without any.

    Args:
        values: [T].
        mask: [T] bool.
        cu_seqlens: [N+1].
        length_average: divide by the sequence's own number of trained tokens.
    """
    sums, lengths = sums_and_lengths(values, mask, cu_seqlens)
    return sums / lengths.clamp(min=1) if length_average else sums


def pair_metrics(chosen_rewards: Tensor, rejected_rewards: Tensor) -> dict[str, Metric]:
    """Means over pairs, of rewards [P]; an equal pair is half right, as a coin would have it.

    Returns:
        rewards/chosen, rewards/rejected, rewards/margin (their difference) and rewards/accuracy
        (how often the chosen one is higher).
    """
    chosen, rejected = chosen_rewards.detach(), rejected_rewards.detach()
    margins = chosen - rejected
    correct = (margins > 0).to(margins.dtype) + (margins == 0).to(margins.dtype) / 2
    return {
        "rewards/chosen": Metric(chosen.sum(), "pairs", "mean"),
        "rewards/rejected": Metric(rejected.sum(), "pairs", "mean"),
        "rewards/margin": Metric(margins.sum(), "pairs", "mean"),
        "rewards/accuracy": Metric(correct.sum(), "pairs", "mean"),
    }


def _broken_pair(pair_ids: Tensor, chosen: Tensor) -> str:
    for pair_id in pair_ids[pair_ids >= 0].unique().tolist():
        of_pair = chosen[pair_ids == pair_id]
        num_chosen, num_rejected = int(of_pair.sum()), int((~of_pair).sum())
        if (num_chosen, num_rejected) != (1, 1):
            break
    return (
        f"Each pair must be one chosen and one rejected sequence of the same micro-batch, got "
        f"{num_chosen} chosen and {num_rejected} rejected with pair id {pair_id}; keep pairs whole "
        "when cutting batches, and give -1 to sequences in no pair."
    )
