"""Rows of data sets, other people's included, to batches: forms, columns, clear errors."""

import pickle

import numpy as np
import pytest
import torch
from burnish_packing import plan_micro_batches
from burnish_packing.torch import Span
from burnish_packing.torch.rows import PackingCollator, PlannedList

ROWS = [
    {"token_ids": [11, 12, 13], "token_mask": [0, 0, 1], "advantages": [0, 0, 2], "reward": 1},
    {
        "token_ids": np.array([21, 22], np.uint16),
        "token_mask": np.array([False, True]),
        "advantages": np.array([0.0, 0.5]),
        "reward": np.float64(0.25),
    },
    {
        "token_ids": torch.tensor([31], dtype=torch.int32),
        "token_mask": torch.tensor([False]),
        "advantages": torch.tensor([1.5], dtype=torch.bfloat16),
        "reward": torch.tensor(-1),
    },
]
COLUMNS = {
    "columns": {"advantages": torch.float32},
    "sequence_columns": {"reward": torch.float32},
}


def test_lists_arrays_and_tensors_by_hand() -> None:
    for row in ROWS:
        if isinstance(row["token_ids"], np.ndarray):
            row[
                "token_ids"
            ].flags.writeable = False  # as data sets on disk are; torch must not warn
    collate = PackingCollator(mode="packed", pad_multiple=8, pad_token_id=9, **COLUMNS)
    batch = collate(ROWS)
    assert batch.token_ids.tolist() == [[11, 12, 13, 21, 22, 31, 9, 9]]
    assert batch.token_ids.dtype == torch.int64
    assert batch.spans == (Span(0, 3), Span(3, 5), Span(5, 6), Span(6, 8))
    assert batch.labels.tolist() == [13, 22]
    assert batch.target_positions.tolist() == [2, 4]
    assert batch.columns["advantages"].tolist() == [[0, 0, 2, 0, 0.5, 1.5, 0, 0]]
    assert batch.columns["advantages"].dtype == torch.float32
    assert batch.sequence_columns["reward"].tolist() == [1, 0.25, -1]

    padded = PackingCollator(mode="padded", pad_multiple=4, **COLUMNS)(ROWS)
    assert padded.token_ids.tolist() == [[11, 12, 13, 0], [21, 22, 0, 0], [31, 0, 0, 0]]
    assert padded.columns["advantages"][:, :3].tolist() == [[0, 0, 2], [0, 0.5, 0], [1.5, 0, 0]]
    assert padded.labels.tolist() == [13, 22]


def test_the_form_of_hugging_face_means_the_same_tokens() -> None:
    rows = [
        {"input_ids": [11, 12, 13], "labels": [-100, -100, 13], "attention_mask": [1, 1, 1]},
        {"input_ids": [21, 22], "labels": [21, 22], "attention_mask": [1, 1]},
    ]
    batch = PackingCollator(mode="packed")(rows)
    # A first token has a label, but nothing before it; the model shifts it away as well.
    assert batch.labels.tolist() == [13, 22]
    assert batch.target_positions.tolist() == [2, 4]
    untouched = [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}]
    assert PackingCollator(mode="packed")(untouched).labels.tolist() == [12, 13, 22]


def test_sequences_are_padded_one_by_one() -> None:
    batch = PackingCollator(mode="packed", sequence_multiple=4, pad_multiple=16)(ROWS)
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6, 8, 9, 12, 16]


def test_a_shared_prefix_is_stored_once() -> None:
    prompt = {"token_mask": [0, 0, 1], "prefix_id": 5, "prefix_length": 2}
    rows = [{"token_ids": [1, 2, 3], **prompt}, {"token_ids": [1, 2, 4], **prompt}]
    batch = PackingCollator(mode="packed", shared_prefixes=True)(rows)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4]]
    del rows[1]["prefix_id"]
    with pytest.raises(ValueError, match=r"column 'prefix_id', got row 1"):
        PackingCollator(mode="packed", shared_prefixes=True)(rows)


@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_no_rows_are_an_empty_batch_with_the_same_columns(mode) -> None:
    batch = PackingCollator(mode=mode, pad_multiple=8, pad_token_id=9, **COLUMNS)([])
    assert batch.token_ids.tolist() == [[9] * 8]
    assert batch.lengths == ()
    assert batch.columns["advantages"].tolist() == [[0] * 8]
    assert batch.columns["advantages"].dtype == torch.float32
    assert batch.sequence_columns["reward"].shape == (0,)
    assert (batch.spans is None) == (mode == "padded")


def test_a_collator_travels_to_workers() -> None:
    collate = pickle.loads(pickle.dumps(PackingCollator(mode="packed", **COLUMNS)))
    assert torch.equal(collate(ROWS).token_ids, PackingCollator(mode="packed")(ROWS).token_ids)


def test_a_planned_list_brings_its_micro_batch_through_pickle() -> None:
    (micro_batch,) = plan_micro_batches([3, 2, 1], max_tokens=6).micro_batches(0)
    planned = pickle.loads(pickle.dumps(PlannedList([4, 5], micro_batch)))
    assert planned == [4, 5]
    assert planned.micro_batch == micro_batch


def test_the_plan_says_the_shape_and_nothing_else_does() -> None:
    (micro_batch,) = plan_micro_batches([3, 2, 1], max_tokens=32, pad_multiple=16).micro_batches(0)
    rows = PlannedList(ROWS, micro_batch)
    batch = PackingCollator(**COLUMNS)(rows)
    assert batch.token_ids.shape == (1, 16)
    assert batch.micro_batch is micro_batch
    assert batch.sequence_columns["reward"].tolist() == [1, 0.25, -1]
    with pytest.raises(ValueError, match=r"said once, got rows that bring their plan and mode 'pa"):
        PackingCollator(mode="packed", pad_multiple=8)(rows)
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        PackingCollator()(ROWS)
    with pytest.raises(ValueError, match="with mode None; the plan has its own"):
        PackingCollator(pad_multiple=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fixed"}, "packed, padded or None, got 'fixed'"),
        ({"mode": "packed", "pad_multiple": 0}, "pad_multiple must be an integer >= 1, got 0"),
        ({"mode": "padded", "sequence_multiple": 2}, "must come with mode packed, got mode padded"),
        ({"shared_prefixes": True}, "must come with mode packed, got mode None"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(**arguments)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2], r"mappings of columns, got list for row 1"),
        ({"text": "hello"}, r"one of token_ids and input_ids.* got row 1 with columns \['text'\]"),
        ({"token_ids": [1], "input_ids": [1]}, r"row 1 with columns \['input_ids', 'token_ids'\]"),
        ({"input_ids": [1]}, r"\('token_ids', 'token_mask'\) in row 0 and \('input_ids', None\)"),
        ({"token_ids": [1, 2]}, r"in row 0 and \('token_ids', None\) in row 1"),
    ],
)
def test_rows_of_no_form_or_of_two(row, message) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(mode="packed")([ROWS[0], row])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [1, 2]}, "at most one of token_mask and labels, got row 1"),
        ({"token_ids": []}, r"'token_ids' must be one list of at least one token, .* in row 1"),
        ({"token_ids": [[1, 2]]}, r"got shape \(1, 2\) in row 1; .* unpack a batch"),
        ({"token_ids": [1.0, 2.0]}, r"'token_ids' must be integers, got torch.float64 in row 1"),
        ({"token_ids": "ab"}, "column 'token_ids' must hold numbers, got 'ab' in row 1"),
        ({"token_mask": [0]}, r"'token_mask' must have one number for each of 2 tokens, .* row 1"),
        ({"token_mask": [0, 2]}, r"'token_mask' must be booleans, or 0 and 1, .*int64 in row 1"),
        ({"token_mask": [0.0, 1.0]}, r"'token_mask' must be booleans, .* torch.float64 in row 1"),
        ({"token_mask": [1, 1]}, r"'token_mask' must be False at a row's first token.* row 1"),
        ({"advantages": None}, "must have the column 'advantages', got row 1"),
        ({"advantages": [1.0]}, r"'advantages' must have one number for each .* \(1,\) in row 1"),
        ({"advantages": [[1.0], 2]}, r"column 'advantages' must hold numbers, .* in row 1"),
        ({"advantages": [None, 2]}, r"column 'advantages' must hold numbers, .* in row 1"),
        ({"advantages": [1j, 2]}, r"'advantages' must be torch.float32 .*complex128 in row 1"),
        ({"reward": [1.0]}, r"'reward' must be one number per row, got shape \(1,\) in row 1"),
        ({"attention_mask": [1, 0]}, "without padding, got zeros in attention_mask of row 1"),
    ],
)
def test_errors_name_the_row_and_the_column(changes, message) -> None:
    row = {"token_ids": [21, 22], "token_mask": [0, 1], "advantages": [0, 1], "reward": 1}
    with pytest.raises(ValueError, match=message):
        PackingCollator(mode="packed", **COLUMNS)([ROWS[0], {**row, **changes}])


def test_numbers_are_not_cut_to_the_dtype_of_a_column() -> None:
    rows = [{"token_ids": [1, 2], "step": [0, 1]}, {"token_ids": [1, 2], "step": [0, 1.5]}]
    collate = PackingCollator(mode="packed", columns={"step": torch.int64})
    assert collate(rows[:1]).columns["step"].tolist() == [[0, 1]]
    with pytest.raises(ValueError, match=r"'step' must be torch.int64 .*float64 in row 1"):
        collate(rows)


def test_labels_that_are_shifted_are_refused() -> None:
    rows = [
        {"input_ids": [5, 5], "labels": [5, 5]},
        {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
    ]
    with pytest.raises(ValueError, match="got 2 for token 1 at 0 of row 1; do not shift labels"):
        PackingCollator(mode="packed")(rows)


def test_rows_that_are_not_those_of_the_plan_are_refused() -> None:
    (micro_batch,) = plan_micro_batches([3, 2, 2], max_tokens=7).micro_batches(0)
    with pytest.raises(ValueError, match="got 1 tokens for index 2, which was planned with 2"):
        PackingCollator()(PlannedList(ROWS, micro_batch))
    with pytest.raises(ValueError, match="all its rows, 3, got 2"):
        PackingCollator()(PlannedList(ROWS[:2], micro_batch))
