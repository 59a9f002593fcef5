"""Pairs of completions, a better and a worse one, as batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from burnish_distributed import RaggedBatch

from burnish_apps.supervised.batches import make_batch

SIDES = ("chosen", "rejected")


def pair_batch(rows: Sequence[Mapping[str, Any]]) -> RaggedBatch:
    """Encoded preferences as a batch, the chosen completion of each pair before the rejected one.

    Args:
        rows: of `burnish_data.encode_preferences`, P of them.

    Returns:
        N = 2 P sequences with ``token_ids`` and ``token_mask`` [T], ``pair_ids`` [N], ``chosen``
        [N] bool, ``row`` [N], and ``prefix_ids`` and ``prefix_lengths`` [N] of the prompt that both
        sides share; ``margins`` [N] if a row has one, 0 for those without; ``nll_mask`` [T], where
        a chosen completion is trained.
    """
    shared = np.array([shared_prefix(row) for row in rows])
    pair_ids = np.arange(len(rows))
    columns: dict[str, npt.NDArray[Any]] = {
        "pair_ids": np.repeat(pair_ids, 2),
        "chosen": np.tile([True, False], len(rows)),
        "row": np.repeat([int(row["row"]) for row in rows], 2),
        "prefix_ids": np.repeat(np.where(shared > 0, pair_ids, -1), 2),
        "prefix_lengths": np.repeat(shared, 2),
    }
    margins = [row.get("margin") for row in rows]
    if any(margin is not None for margin in margins):
        known = [0.0 if margin is None else float(margin) for margin in margins]
        columns["margins"] = np.repeat(np.nan_to_num(known).astype(np.float32), 2)
    batch = make_batch([row[side] for row in rows for side in SIDES], columns)
    is_chosen = np.repeat(columns["chosen"], batch.lengths)
    return batch.with_token_column("nll_mask", batch.token_columns["token_mask"] & is_chosen)


def shared_prefix(row: Mapping[str, Any]) -> int:
    """Tokens that both sides begin with, as far as neither is trained."""
    first, second = (np.asarray(row[side]["token_ids"]) for side in SIDES)
    limit = min(int(np.argmax(row[side]["token_mask"])) for side in SIDES)
    differ = np.flatnonzero(first[:limit] != second[:limit])
    return int(differ[0]) if len(differ) else limit
