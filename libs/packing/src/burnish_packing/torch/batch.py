"""What one model call takes, and the way back from its outputs to the tokens of the sequences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from burnish_packing.layout import PackLayout, Span
from burnish_packing.microbatches import MicroBatch


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The sequences of one micro-batch, laid out for one model call of [B, L] positions.

    Packed, B is 1 and the layout says who sees whom; padded, every sequence has a row and there is
    no layout. All else is the same for both, so a training loop needs one path.

    "Flat" means the caller's order: sequences concatenated, T = sum(lengths) tokens, index t about
    token t. The score of flat token `target_positions[m]` is that of `labels[m]` under the output
    of the model at `score_positions[m]`, the position before it. Nothing else is scored: not the
    first token of a sequence, not masked tokens, not padding.
    """

    token_ids: Tensor  # int64 [B, L]
    position_ids: Tensor  # int64 [B, L]; restart at every sequence, continue after a shared prefix
    layout: PackLayout | None  # packed: where all lies; None: right-padded rows
    slots: Tensor  # int64 [T], position of every flat token in the flattened [B * L]
    score_positions: Tensor  # int64 [M], into the flattened [B * L]
    labels: Tensor  # int64 [M]
    target_positions: Tensor  # int64 [M], into the flat tokens, ascending
    lengths: tuple[int, ...]  # tokens of each sequence, padding left out
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # others, [B, L, ...]; 0 in padding
    sequence_columns: Mapping[str, Tensor] = field(default_factory=dict)  # [N], one a sequence
    micro_batch: MicroBatch | None = None  # of the plan it was laid out by, if any

    @property
    def spans(self) -> tuple[Span, ...] | None:
        """Who sees whom in a pack: they tile [0, L) in order. None for right-padded rows."""
        return None if self.layout is None else self.layout.spans

    @property
    def cu_seqlens(self) -> Tensor:
        """Cumulative lengths of the spans, int32 [number of spans + 1] on the CPU.

        Padding and fill are spans of their own, so these tile [0, L). ValueError for padded rows
        and for spans behind a shared prefix, which no cumulative lengths describe.
        """
        if self.spans is None or any(span.prefix_end > span.prefix_start for span in self.spans):
            raise ValueError(
                "cu_seqlens must describe a pack without shared prefixes, got padded rows or spans "
                "with a prefix; use spans"
            )
        return torch.tensor([0, *(span.end for span in self.spans)], dtype=torch.int32)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest span (packed) or row (padded)."""
        if self.spans is None:
            return self.token_ids.shape[1]
        return max(span.end - span.start for span in self.spans)

    def shifted_labels(self, ignore_index: int = -100) -> Tensor:
        """int64 [B, L]: at each position the token its output scores, elsewhere `ignore_index`.

        The labels of a cross-entropy over all outputs. ValueError where one output scores several
        tokens, the first ones of completions behind a shared prefix.
        """
        if len(self.score_positions.unique()) != len(self.score_positions):
            raise ValueError(
                "shifted_labels must have one token per output, got several completions that "
                "begin after one shared prefix; use score_positions and labels"
            )
        labels = torch.full_like(self.token_ids, ignore_index)
        labels.view(-1)[self.score_positions] = self.labels
        return labels

    def aligned_labels(self, ignore_index: int = -100) -> Tensor:
        """int64 [B, L]: each scored token at its own position, elsewhere `ignore_index`.

        The labels that Hugging Face models take, which shift them themselves: every sequence
        begins with `ignore_index`, so that none is scored by the one before it. ValueError where
        the position before a scored token is not the one that scores it, behind a shared prefix.
        """
        targets = self.slots[self.target_positions]
        if not torch.equal(targets - 1, self.score_positions):
            raise ValueError(
                "aligned_labels must have every scored token right after the one that scores it, "
                "got completions behind a shared prefix; use score_positions and labels"
            )
        labels = torch.full_like(self.token_ids, ignore_index)
        labels.view(-1)[targets] = self.labels
        return labels

    def unpack(self, values: Tensor) -> Tensor:
        """Values of all positions [B, L, ...] to those of the flat tokens [T, ...]; differentiable.

        The tokens of a shared prefix come once for every sequence behind it.
        """
        if values.shape[:2] != self.token_ids.shape:
            raise ValueError(
                f"values must begin with the shape of token_ids, {tuple(self.token_ids.shape)}, "
                f"got {tuple(values.shape)}; pass the model's output for this batch"
            )
        return values.flatten(0, 1).index_select(0, self.slots)

    def unpack_rows(self, values: Tensor, padding: float = 0.0) -> Tensor:
        """Values [B, L, ...] to one row per sequence, [N, longest, ...]; differentiable.

        An empty batch has no rows, [0, 0, ...].
        """
        flat = self.unpack(values)
        if not self.lengths:
            return flat.unsqueeze(0)[:0]
        return pad_sequence(
            list(flat.split(list(self.lengths))), batch_first=True, padding_value=padding
        )

    def scatter(self, scored: Tensor) -> Tensor:
        """Put scores [M, ...] back at their tokens: [T, ...], 0 elsewhere; differentiable."""
        if scored.shape[:1] != self.labels.shape:
            raise ValueError(
                f"scored must have a row for each of labels, {tuple(self.labels.shape)}, "
                f"got {tuple(scored.shape)}; score the hidden states at score_positions"
            )
        zeros = scored.new_zeros(sum(self.lengths), *scored.shape[1:])
        return zeros.index_copy(0, self.target_positions, scored)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedBatch":
        """The same batch with its tensors on `device`; `non_blocking` as in `Tensor.to`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """The same batch in pinned memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PackedBatch":
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, Mapping):
                changed[name] = {key: change(column) for key, column in value.items()}
        return replace(self, **changed)
