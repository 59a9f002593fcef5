"""Encoded rows as Arrow columns, and as a folder that `datasets` loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

# Columns that a row may lack; `_placed` says where they stand.
_OPTIONAL = ("token_weights", "margin")
_SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def as_batch(encoded: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """The columns of rows: arrays [T] become lists, numbers and text stay, mappings become structs.

    Beside every `token_ids` stand `length` (int32, its tokens) and `truncated` (bool, False where
    the row does not say). If some rows have `token_weights`, the others get them from `token_mask`;
    if some have `margin`, which stands last, it is null for the others.

    Raises:
        ValueError: rows with different columns, columns of different lengths, or of a kind that
            Arrow lists do not hold.
    """
    return pa.RecordBatch.from_struct_array(_structs(encoded, ""))


def union(old: pa.Schema, new: pa.Schema) -> pa.Schema:
    """The schema that both fit (see `conform`): either may have weights, or margins, that the other
    lacks.

    Raises:
        ValueError: they differ in more than that.
    """
    joined = _union(pa.struct(list(old)), pa.struct(list(new)), "")
    return pa.schema(list(joined))


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with what else a schema from `union` has.

    That is weights, 1.0 where the mask is True, else 0.0; and margins, which are null.
    """
    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_struct_array(
        _conform(batch.to_struct_array(), pa.struct(list(schema)))
    )


class ArrowFolder:
    """A folder being written, batch by batch, for `datasets.load_from_disk`.

    Weights may come late (`union`): a new file begins then, and `finish` brings the earlier ones to
    its schema, so that memory holds one batch at any time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._schemas: list[pa.Schema] = []  # of each file
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._digest = hashlib.blake2b(digest_size=8)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch; ValueError where its columns are not those of the batches before."""
        self._digest.update(batch.serialize())
        schema = union(self._schemas[-1], batch.schema) if self._schemas else batch.schema
        if not self._schemas or not schema.equals(self._schemas[-1]):
            self.close()
            self._schemas.append(schema)
            self._writer = pa.ipc.new_stream(str(self._part(len(self._schemas) - 1)), schema)
        assert self._writer is not None
        self._writer.write_batch(conform(batch, schema))

    def close(self) -> None:
        """Let go of the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def finish(self) -> None:
        """What makes the folder complete."""
        from datasets import DatasetInfo, Features  # here, since its import takes a second

        self.close()
        schema, names = self._schemas[-1], []
        for index, own in enumerate(self._schemas):
            name = f"data-{index:05d}-of-{len(self._schemas):05d}.arrow"
            if own.equals(schema):
                self._part(index).rename(self._folder / name)
            else:
                _rewrite(self._part(index), self._folder / name, schema)
                self._part(index).unlink()
            names.append(name)
        DatasetInfo(features=Features.from_arrow_schema(schema)).write_to_directory(
            str(self._folder)
        )
        # The layout of Dataset.save_to_disk, which would write all of it once more.
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": self._digest.hexdigest(),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (self._folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.arrow"


def _rewrite(source: Path, target: Path, schema: pa.Schema) -> None:
    with pa.ipc.open_stream(str(source)) as reader, pa.ipc.new_stream(str(target), schema) as out:
        for batch in reader:
            out.write_batch(conform(batch, schema))


def _structs(rows: Sequence[Mapping[str, Any]], path: str) -> pa.StructArray:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "truncated"))
    has_tokens = "token_ids" in names
    if not names:
        raise ValueError("encode must give every row columns, got none; give token_ids, say.")
    if has_tokens and "length" in names:
        raise ValueError(
            f"encode must leave the column length to encode_rows, got {path}length beside "
            f"{path}token_ids; rename it."
        )
    if "margin" in names and all(row.get("margin") is None for row in rows):
        names.remove("margin")
    names = _placed([name for name in names if name not in _OPTIONAL], names)
    columns = {
        name: _column([_value(row, name, path) for row in rows], path + name) for name in names
    }
    if has_tokens:
        lengths = columns["token_ids"].value_lengths().cast(pa.int32())
        for name in ("token_mask", "token_weights"):
            if name in columns and not columns[name].value_lengths().equals(lengths):
                raise ValueError(
                    f"{path}{name} must have one value for each of token_ids, got other lengths; "
                    f"align it to the tokens in encode."
                )
        columns["length"] = lengths
        columns["truncated"] = pa.array([bool(row.get("truncated")) for row in rows], pa.bool_())
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def _value(row: Mapping[str, Any], name: str, path: str) -> Any:
    if name in row:
        return row[name]
    if name == "token_weights" and "token_mask" in row:
        return row["token_mask"].astype(np.float32)
    if name == "margin":
        return None
    raise ValueError(
        f"encode must give every row the same columns, got one with {path}{name} and one with "
        f"{sorted(row)}; give both, or neither."
    )


def _column(values: list[Any], path: str) -> pa.Array:
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    first = values[0]
    if path.rpartition(".")[2] == "margin":
        first = next(value for value in values if value is not None)
        if type(first) in _SCALARS and all(
            value is None or type(value) is type(first) for value in values
        ):
            return pa.array(values, _SCALARS[type(first)])
    if isinstance(first, Mapping) and all(isinstance(value, Mapping) for value in values):
        return _structs(values, f"{path}.")
    if all(isinstance(value, np.ndarray) and value.ndim == 1 for value in values):
        if all(value.dtype == first.dtype for value in values):
            offsets = np.zeros(len(values) + 1, np.int32)
            np.cumsum([len(value) for value in values], out=offsets[1:])
            return pa.ListArray.from_arrays(offsets, np.concatenate(values))
    elif all(isinstance(value, list) for value in values) and any(values):
        offsets = np.zeros(len(values) + 1, np.int32)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        inner = _column([item for value in values for item in value], f"{path}[]")
        return pa.ListArray.from_arrays(offsets, inner)
    elif type(first) in _SCALARS and all(type(value) is type(first) for value in values):
        return pa.array(values, _SCALARS[type(first)])
    kinds = sorted({_kind(value) for value in values})
    raise ValueError(
        f"encode must give column {path!r} of one kind in all rows: arrays with one dimension and "
        f"one dtype, numbers, text, or mappings or lists of these, got {', '.join(kinds)}; convert "
        f"them."
    )


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array with {value.ndim} dimensions"
    return type(value).__name__


def _union(old: pa.DataType, new: pa.DataType, path: str) -> pa.DataType:
    if old.equals(new):
        return old
    if pa.types.is_list(old) and pa.types.is_list(new):
        return pa.list_(_union(old.value_type, new.value_type, path))
    if not (pa.types.is_struct(old) and pa.types.is_struct(new)):
        raise ValueError(
            f"encode must give column {path.rstrip('.')!r} of one kind in all rows, got {old} and "
            f"{new}; convert one."
        )
    olds, news = ({field.name: field for field in struct} for struct in (old, new))
    needed, other = ([name for name in names if name not in _OPTIONAL] for names in (olds, news))
    if needed != other or ("token_weights" in {*olds, *news} and "token_mask" not in needed):
        raise ValueError(
            f"encode must give every row the same columns, got {[path + name for name in olds]} "
            f"and {[path + name for name in news]}; give the same from all."
        )
    return pa.struct(
        [
            pa.field(
                name,
                _union(
                    (olds if name in olds else news)[name].type,
                    (news if name in news else olds)[name].type,
                    f"{path}{name}.",
                ),
            )
            for name in _placed(needed, [*olds, *news])
        ]
    )


def _placed(needed: list[str], there: Sequence[str]) -> list[str]:
    """The names with the optional ones that are there, in the one place that each has."""
    names = list(needed)
    if "token_weights" in there:
        # Without a mask they are a column like others, and come last.
        place = names.index("token_mask") + 1 if "token_mask" in names else len(names)
        names.insert(place, "token_weights")
    if "margin" in there:
        made = [name for name in ("length", "truncated") if name in names]  # after all others
        names.insert(names.index(made[0]) if made else len(names), "margin")
    return names


def _conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type.equals(kind):
        return array
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, _conform(array.values, kind.value_type))
    have = {field.name for field in array.type}
    columns = []
    for field in kind:
        if field.name in have:
            columns.append(_conform(array.field(field.name), field.type))
            continue
        if field.name == "margin":
            columns.append(pa.nulls(len(array), field.type))
            continue
        mask = array.field("token_mask")  # for token_weights: `union` admits nothing else
        columns.append(pa.ListArray.from_arrays(mask.offsets, mask.values.cast(pa.float32())))
    return pa.StructArray.from_arrays(columns, [field.name for field in kind])
