"""Sharding by plain index lists: a plan made elsewhere says which rank gets which sequences."""

from __future__ import annotations

from collections.abc import Sequence

from burnish_distributed.batch import RaggedBatch

MicroBatches = tuple[tuple[int, ...], ...]


def shard_batch(
    batch: RaggedBatch, ranks: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[RaggedBatch, MicroBatches]]:
    """Cut a global batch into one part per rank.

    Args:
        batch: the global batch.
        ranks: ``ranks[r][slot]`` lists the sequences (indices into ``batch``) of rank r's
            micro-batch ``slot``; ``()`` is an explicit empty slot.

    Returns:
        For every rank its own sequences, and its micro-batches re-indexed into them.

    Raises:
        ValueError: if ranks differ in their number of micro-batches, or a sequence is missing or
            planned twice (either would change the gradient silently).
    """
    if len({len(slots) for slots in ranks}) != 1:
        raise ValueError(
            "every rank must have the same number of micro-batches (collectives wait for each "
            f"other), got {[len(slots) for slots in ranks]}; fill up with empty slots"
        )
    planned = sorted(i for slots in ranks for slot in slots for i in slot)
    if planned != list(range(batch.num_sequences)):
        raise ValueError(
            f"a plan must name each of the {batch.num_sequences} sequences exactly once, got "
            f"{len(planned)} entries for {len(set(planned))} sequences; make the plan from this "
            "batch's lengths"
        )
    shards = []
    for slots in ranks:
        own = [i for slot in slots for i in slot]
        starts = [sum(len(slot) for slot in slots[:k]) for k in range(len(slots))]
        local = tuple(
            tuple(range(start, start + len(slot)))
            for start, slot in zip(starts, slots, strict=True)
        )
        shards.append((batch.select(own), local))
    return shards
