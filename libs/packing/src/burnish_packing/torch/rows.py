"""The rows of a data set become a PackedBatch: a `collate_fn` for torch's DataLoader."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from burnish_packing._checks import check_positive
from burnish_packing.layout import round_up
from burnish_packing.microbatches import MicroBatch
from burnish_packing.torch.batch import PackedBatch
from burnish_packing.torch.collate import empty_batch, lay_out, pack_sequences, pad_sequences

Item = TypeVar("Item")
Row = Mapping[str, Any]

IGNORED_LABEL = -100  # Hugging Face's mark for a token that is not trained


class PlannedList(list[Item]):
    """The indices, or the rows, of one micro-batch of a plan, which they bring along."""

    def __init__(self, items: Iterable[Item], micro_batch: MicroBatch) -> None:
        super().__init__(items)
        self.micro_batch = micro_batch


@dataclass(frozen=True, kw_only=True)
class PackingCollator:
    """Rows in, PackedBatch out; picklable, for `DataLoader(collate_fn=...)` with any workers.

    A row is a mapping of equally long columns (lists, arrays or tensors), of one sequence without
    padding; columns that nothing asks for are ignored. Two forms, the same for all rows of a batch:

    - `token_ids` and, if some tokens are not trained, `token_mask`: True (or 1) where one is.
    - `input_ids` and, if some tokens are not trained, `labels` as Hugging Face models take them:
      labels[t] is -100, or token t itself where it is trained. The first token of a sequence has
      nothing before it and is never trained, whatever its label.

    Which shape the rows are laid out in is said once. With `mode=None` the plan says it: the rows
    come from `PlannedDataset` under a `TokenBudgetBatchSampler` and bring their micro-batch along.
    With a mode, the multiples given here do, and rows that bring a plan are refused. An empty list
    of rows is the empty slot of a plan: a batch that counts nothing.

    Args:
        mode: None, or `packed` into one row or `padded` to rows of their own.
        columns: other columns with one number per token, by name, and the dtype of each.
        sequence_columns: columns with one number per row (a reward, an id), likewise.
        shared_prefixes: rows have a `prefix_id` (-1: none) and a `prefix_length`, the tokens that
            rows of one id begin with; with mode `packed`. A plan brings its own.
        pad_multiple: packs or rows are filled up to a multiple of this; with a mode only.
        sequence_multiple: of every sequence in a pack (context parallelism); with mode `packed`.
        pad_token_id: what padding holds.

    Raises:
        ValueError: at a call, with the row and the column: one is missing, of another length or
            kind, or empty; the rows are not those of the plan. At once: arguments that do not go
            together.
    """

    mode: Literal["packed", "padded"] | None = None
    columns: Mapping[str, torch.dtype] = field(default_factory=dict)
    sequence_columns: Mapping[str, torch.dtype] = field(default_factory=dict)
    shared_prefixes: bool = False
    pad_multiple: int = 1
    sequence_multiple: int = 1
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for name, dtypes in (
            ("columns", self.columns),
            ("sequence_columns", self.sequence_columns),
        ):
            if not isinstance(dtypes, Mapping):
                raise ValueError(
                    f"{name} must map names to dtypes, got {type(dtypes).__name__}; pass "
                    f"{{'advantages': torch.float32}}, say"
                )
        if self.mode not in (None, "packed", "padded"):
            raise ValueError(f"mode must be packed, padded or None, got {self.mode!r}; choose one")
        check_positive(self.pad_multiple, "pad_multiple")
        check_positive(self.sequence_multiple, "sequence_multiple")
        if self.mode is None and self.pad_multiple > 1:
            raise ValueError(
                f"pad_multiple must come with a mode, got {self.pad_multiple} with mode None; the "
                f"plan has its own: pass pad_multiple to the sampler, or choose a mode"
            )
        if self.mode != "packed" and (self.sequence_multiple > 1 or self.shared_prefixes):
            raise ValueError(
                f"sequence_multiple and shared_prefixes must come with mode packed, got mode "
                f"{self.mode}; leave them out (a plan has its own), or choose packed"
            )

    def __call__(self, rows: Sequence[Row]) -> PackedBatch:
        """Lay out the rows of one micro-batch."""
        micro_batch: MicroBatch | None = getattr(rows, "micro_batch", None)
        self._check_source(micro_batch)
        form = _token_columns(rows)
        token_ids = [_token_ids(row, form, i) for i, row in enumerate(rows)]
        masks = [_token_mask(row, form, i, token_ids[i]) for i, row in enumerate(rows)]
        batch = self._lay_out(
            micro_batch,
            rows,
            [len(row) for row in token_ids],
            _joined(token_ids, torch.int64),
            token_mask=_joined(masks, torch.bool),
            columns={
                name: _joined(
                    [_column(row, name, i, token_ids[i]) for i, row in enumerate(rows)], dtype, name
                )
                for name, dtype in self.columns.items()
            },
            pad_token_id=self.pad_token_id,
        )
        sequence_columns = {
            name: _scalars(rows, name, dtype) for name, dtype in self.sequence_columns.items()
        }
        return replace(batch, sequence_columns=sequence_columns)

    def _lay_out(
        self,
        micro_batch: MicroBatch | None,
        rows: Sequence[Row],
        lengths: list[int],
        token_ids: Tensor,
        **arguments: Any,
    ) -> PackedBatch:
        if micro_batch is not None:
            _check_planned(micro_batch, lengths)
            return lay_out(micro_batch, token_ids, **arguments)
        if not rows:
            size = round_up(round_up(1, self.sequence_multiple), self.pad_multiple)
            del arguments["token_mask"]
            return empty_batch(shape=(1, size), packed=self.mode == "packed", **arguments)
        arguments["pad_multiple"] = self.pad_multiple
        if self.mode == "padded":
            return pad_sequences(token_ids, lengths, **arguments)
        if self.shared_prefixes:
            arguments["prefix_ids"] = _scalars(rows, "prefix_id", torch.int64)
            arguments["prefix_lengths"] = _scalars(rows, "prefix_length", torch.int64)
        return pack_sequences(
            token_ids, lengths, sequence_multiple=self.sequence_multiple, **arguments
        )

    def _check_source(self, micro_batch: MicroBatch | None) -> None:
        """ValueError unless either the plan or this collator says the shape."""
        if micro_batch is None and self.mode is None:
            raise ValueError(
                "rows must bring their micro-batch with mode None, got rows without one; load "
                "them through PlannedDataset and TokenBudgetBatchSampler (in a Hugging Face "
                "Trainer with remove_unused_columns=False), or choose a mode"
            )
        if micro_batch is not None and self.mode is not None:
            raise ValueError(
                f"the shape must be said once, got rows that bring their plan and mode "
                f"{self.mode!r}; leave out mode and multiples"
            )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceCollator:
    """Rows in, the keyword arguments of a Hugging Face model out, with `labels` for its loss.

    For the Hugging Face `Trainer` and loops like its own. `labels` [B, L] are aligned to tokens and
    IGNORED_LABEL at every sequence's first token and in padding, since the model shifts them.

    Args:
        collator: lays the rows out. Packs must be without shared prefixes, which no labels that
            are shifted by one describe.
        attn_implementation: of the model; it decides which arguments keep sequences apart
            (`model_kwargs`). A name from `register_attention` must be registered in the workers of
            a loader as well: forked ones have it, spawned ones only by a module they import.
    """

    collator: PackingCollator
    attn_implementation: str

    def __post_init__(self) -> None:
        from burnish_packing.torch.hugging_face import attention_of

        attention_of(self.attn_implementation)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        from burnish_packing.torch.hugging_face import model_kwargs

        batch = self.collator(rows)
        labels = batch.aligned_labels(IGNORED_LABEL)
        return {**model_kwargs(batch, self.attn_implementation), "labels": labels}


def _token_columns(rows: Sequence[Row]) -> tuple[str, str | None]:
    """The columns of tokens and of what is trained (None: all) that every row has."""
    forms = []
    if isinstance(rows, Mapping):
        raise ValueError("rows must be a list of mappings, got one mapping; pass [row]")
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"rows must be mappings of columns, got {type(row).__name__} for row {i}; make it "
                f"a dict with token_ids"
            )
        tokens = [name for name in ("token_ids", "input_ids") if name in row]
        trained = [name for name in ("token_mask", "labels") if row.get(name) is not None]
        if len(tokens) != 1 or len(trained) > 1:
            raise ValueError(
                f"a row must have one of token_ids and input_ids, and at most one of token_mask "
                f"and labels, got row {i} with columns {sorted(row)}; rename or drop some"
            )
        forms.append((tokens[0], trained[0] if trained else None))
        if forms[i] != forms[0]:
            raise ValueError(
                f"all rows must have the same columns, got {forms[0]} in row 0 and {forms[i]} in "
                f"row {i}; bring them to one form"
            )
    return forms[0] if forms else ("token_ids", None)


def _token_ids(row: Row, form: tuple[str, str | None], index: int) -> Tensor:
    """int64 [n] of one row, n >= 1."""
    values = _tensor(row[form[0]], form[0], index)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"column {form[0]!r} must be one list of at least one token, got shape "
            f"{tuple(values.shape)} in row {index}; drop an empty row, unpack a batch of rows"
        )
    if not _is_integer(values):
        raise ValueError(
            f"column {form[0]!r} must be integers, got {values.dtype} in row {index}; convert it"
        )
    padding = row.get("attention_mask")
    if padding is not None and not _tensor(padding, "attention_mask", index).all():
        raise ValueError(
            f"rows must come without padding, got zeros in attention_mask of row {index}; do not "
            f"pad when you tokenize"
        )
    return values.to(torch.int64)


def _token_mask(row: Row, form: tuple[str, str | None], index: int, token_ids: Tensor) -> Tensor:
    """bool [n]: the tokens of one row that are trained."""
    name = form[1]
    if name is None:
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        mask[0] = False
        return mask
    values = _column(row, name, index, token_ids)
    if name == "labels":
        mask = values != IGNORED_LABEL
        if (values != token_ids)[mask].any():
            t = int((mask & (values != token_ids)).nonzero()[0])
            raise ValueError(
                f"column 'labels' must be {IGNORED_LABEL} or the token at the same index, got "
                f"{values[t]} for token {token_ids[t]} at {t} of row {index}; do not shift labels, "
                f"the model's output is"
            )
        mask[0] = False
        return mask
    if values.dtype != torch.bool and not (_is_integer(values) and ((values | 1) == 1).all()):
        raise ValueError(
            f"column {name!r} must be booleans, or 0 and 1, got {values.dtype} in row {index}; "
            f"make it one flag per token"
        )
    if values[0]:
        raise ValueError(
            f"column {name!r} must be False at a row's first token, which nothing scores, got True "
            f"in row {index}; mask it or put a start token before it"
        )
    return values.to(torch.bool)


def _column(row: Row, name: str, index: int, token_ids: Tensor) -> Tensor:
    """[n] of one row, in the dtype it has."""
    values = _value(row, name, index)
    if values.shape != token_ids.shape:
        raise ValueError(
            f"column {name!r} must have one number for each of {len(token_ids)} tokens, got shape "
            f"{tuple(values.shape)} in row {index}; align it to the tokens"
        )
    return values


def _scalars(rows: Sequence[Row], name: str, dtype: torch.dtype) -> Tensor:
    """[N]: one number from every row."""
    values = [_value(row, name, i) for i, row in enumerate(rows)]
    for i, value in enumerate(values):
        if value.ndim:
            raise ValueError(
                f"column {name!r} must be one number per row, got shape {tuple(value.shape)} in "
                f"row {i}; name it in columns if it has one per token"
            )
    return _joined([value[None] for value in values], dtype, name)


def _value(row: Row, name: str, index: int) -> Tensor:
    if row.get(name) is None:
        raise ValueError(
            f"every row must have the column {name!r}, got row {index} with columns {sorted(row)}; "
            f"add it, or do not name it in the collator"
        )
    return _tensor(row[name], name, index)


def _tensor(values: Any, name: str, index: int) -> Tensor:
    """What a row holds as a tensor; arrays are copied, since torch warns of read-only ones."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"column {name!r} must hold numbers, got {str(values)[:60]!r} in row {index}; convert "
            f"it, or do not name it in the collator"
        ) from error


def _joined(values: list[Tensor], dtype: torch.dtype, name: str = "") -> Tensor:
    """One tensor of `dtype`; ValueError where that would cut values, as floats to integers."""
    for i, value in enumerate(values):
        if not torch.can_cast(value.dtype, dtype):
            raise ValueError(
                f"column {name!r} must be {dtype} as the collator was told, got {value.dtype} in "
                f"row {i}; convert it, or name another dtype"
            )
        converted = value.to(dtype)
        if dtype.is_floating_point:
            lost = value.isfinite() & ~converted.isfinite()
        else:
            lost = converted != value
        if lost.any():
            raise ValueError(
                f"column {name!r} must fit {dtype} as the collator was told, got "
                f"{value[lost].flatten()[0]} in row {i}; name a wider dtype"
            )
    if not values:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([value.to(dtype) for value in values])


def _is_integer(values: Tensor) -> bool:
    kind = values.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _check_planned(micro_batch: MicroBatch, lengths: list[int]) -> None:
    """ValueError unless the plan was made for rows of these lengths."""
    if len(lengths) != len(micro_batch.lengths):
        raise ValueError(
            f"the micro-batch must have all its rows, {len(micro_batch.lengths)}, got "
            f"{len(lengths)}; the data set must give one row for every index"
        )
    for row, planned, length in zip(micro_batch.indices, micro_batch.lengths, lengths, strict=True):
        if planned != length:
            raise ValueError(
                f"the plan must be made for the rows that come, got {length} tokens for index "
                f"{row}, which was planned with {planned}; pass the sampler the lengths after "
                f"tokenizing and truncation"
            )
