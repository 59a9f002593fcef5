"""Ragged batches and how they are cut: nothing lost, nothing doubled, nothing misaligned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from burnish_distributed import RaggedBatch, shard_batch
from hypothesis import given
from hypothesis import strategies as st


def three_sequences() -> RaggedBatch:
    return RaggedBatch.from_rows(
        [
            {"token_ids": [10, 11], "token_mask": [False, True]},
            {"token_ids": [20], "token_mask": [False]},
            {"token_ids": [30, 31, 32], "token_mask": [False, True, False]},
        ],
        {"reward": [0.5, -1.0, 2.0]},
    )


def test_rows_become_flat_columns() -> None:
    batch = three_sequences()
    assert batch.lengths.tolist() == [2, 1, 3]
    assert batch.lengths.dtype == np.int64
    assert batch.offsets.tolist() == [0, 2, 3, 6]
    assert (batch.num_sequences, batch.num_tokens) == (3, 6)
    assert batch.token_columns["token_ids"].tolist() == [10, 11, 20, 30, 31, 32]
    assert batch.token_columns["token_mask"].tolist() == [False, True, False, False, True, False]
    assert batch.token_columns["token_mask"].dtype == bool
    assert batch.sequence_columns["reward"].tolist() == [0.5, -1.0, 2.0]


def test_sequences_are_cut_at_their_borders() -> None:
    parts = three_sequences().sequences("token_ids")
    assert [part.tolist() for part in parts] == [[10, 11], [20], [30, 31, 32]]


def test_select_keeps_the_order_asked_for() -> None:
    batch = three_sequences().select([2, 0])
    assert batch.lengths.tolist() == [3, 2]
    assert batch.token_columns["token_ids"].tolist() == [30, 31, 32, 10, 11]
    assert batch.token_columns["token_mask"].tolist() == [False, True, False, False, True]
    assert batch.sequence_columns["reward"].tolist() == [2.0, 0.5]


def test_select_of_nothing_keeps_columns_and_dtypes() -> None:
    batch = three_sequences().select([])
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)
    assert batch.token_columns["token_mask"].dtype == bool
    assert batch.sequence_columns["reward"].dtype == np.float64
    assert batch.sequences("token_ids") == []


def test_select_copies() -> None:
    batch = three_sequences()
    batch.select([0]).token_columns["token_ids"][0] = 99
    assert batch.token_columns["token_ids"][0] == 10


def test_sequences_without_tokens_are_kept() -> None:
    batch = RaggedBatch.from_rows([{"token_ids": []}, {"token_ids": [7]}, {"token_ids": []}])
    assert batch.lengths.tolist() == [0, 1, 0]
    assert [part.tolist() for part in batch.sequences("token_ids")] == [[], [7], []]
    assert batch.select([2, 1]).lengths.tolist() == [0, 1]


def test_a_sequence_without_tokens_leaves_whole_numbers_whole() -> None:
    batch = RaggedBatch.from_rows([{"token_ids": [5]}, {"token_ids": []}])
    assert batch.token_columns["token_ids"].dtype.kind == "i"


def test_with_token_column_adds_one_and_leaves_the_batch_alone() -> None:
    batch = three_sequences()
    more = batch.with_token_column("logprobs", np.arange(6.0))
    assert more.token_columns["logprobs"].tolist() == [0, 1, 2, 3, 4, 5]
    assert "logprobs" not in batch.token_columns
    assert more.sequence_columns["reward"].tolist() == [0.5, -1.0, 2.0]
    with pytest.raises(ValueError, match=r"'logprobs' must have 6 values .* got shape \(5,\)"):
        batch.with_token_column("logprobs", np.arange(5.0))


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        RaggedBatch.from_rows([])


@pytest.mark.parametrize(
    "bad",
    [
        {"token_ids": [1, 2], "token_mask": [True]},
        {"token_ids": [1, 2]},
        {"token_ids": [1], "token_mask": [True], "advantages": [1.0]},
    ],
    ids=["unequal", "missing", "more"],
)
def test_a_row_whose_columns_do_not_fit_is_named(bad: dict[str, list[Any]]) -> None:
    good = {"token_ids": [1], "token_mask": [True]}
    with pytest.raises(ValueError, match=r"columns \['token_ids', 'token_mask'\].* in row 1"):
        RaggedBatch.from_rows([good, bad])


def test_the_order_of_a_rows_columns_does_not_matter() -> None:
    batch = RaggedBatch.from_rows([{"a": [1], "b": [2]}, {"b": [4, 6], "a": [3, 5]}])
    assert batch.token_columns["a"].tolist() == [1, 3, 5]
    assert batch.token_columns["b"].tolist() == [2, 4, 6]


def test_rows_without_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="row 0"):
        RaggedBatch.from_rows([{}])


@pytest.mark.parametrize("lengths", [[2, -1], [[1], [2]]], ids=["negative", "two dimensions"])
def test_bad_lengths_are_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match="lengths must be a one-dimensional"):
        RaggedBatch(np.array(lengths), {})


def test_columns_of_another_size_are_refused() -> None:
    lengths = np.array([2, 1])
    with pytest.raises(ValueError, match=r"token column 'x' must have 3 values \(sum of lengths\)"):
        RaggedBatch(lengths, {"x": np.zeros(2)})
    with pytest.raises(ValueError, match=r"sequence column 'r' must have 2 .*number of sequences"):
        RaggedBatch(lengths, {"x": np.zeros(3)}, {"r": np.zeros(3)})


@st.composite
def planned_batches(draw: st.DrawFn) -> tuple[RaggedBatch, list[list[tuple[int, ...]]]]:
    """A batch whose token ids tell their sequence, and a plan of some ranks and slots."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    num_ranks, num_slots = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(len(lengths))))
    places = st.integers(0, num_ranks * num_slots - 1)
    place = draw(st.lists(places, min_size=len(lengths), max_size=len(lengths)))
    slots = [
        tuple(i for i, p in zip(order, place, strict=True) if p == number)
        for number in range(num_ranks * num_slots)
    ]
    ranks = [slots[r * num_slots : (r + 1) * num_slots] for r in range(num_ranks)]
    rows = [{"token_ids": [100 * i + t for t in range(n)]} for i, n in enumerate(lengths)]
    return RaggedBatch.from_rows(rows, {"index": np.arange(len(lengths))}), ranks


@given(planned_batches())
def test_the_shards_together_are_the_batch(
    case: tuple[RaggedBatch, list[list[tuple[int, ...]]]],
) -> None:
    batch, ranks = case
    whole = [part.tolist() for part in batch.sequences("token_ids")]
    shards = shard_batch(batch, ranks)
    assert len(shards) == len(ranks)
    for (shard, local), slots in zip(shards, ranks, strict=True):
        parts = [part.tolist() for part in shard.sequences("token_ids")]
        indices = shard.sequence_columns["index"].tolist()
        # Slot by slot the very sequences that were planned, in the planned order.
        assert [[indices[i] for i in slot] for slot in local] == [list(slot) for slot in slots]
        assert [[parts[i] for i in s] for s in local] == [[whole[i] for i in s] for s in slots]
    assert sum(shard.num_sequences for shard, _ in shards) == batch.num_sequences
    assert sum(shard.num_tokens for shard, _ in shards) == batch.num_tokens


def test_empty_slots_stay_where_they_are() -> None:
    (first, slots0), (second, slots1) = shard_batch(
        three_sequences(), [[(2,), (), (0,)], [(), (1,), ()]]
    )
    assert first.token_columns["token_ids"].tolist() == [30, 31, 32, 10, 11]
    assert slots0 == ((0,), (), (1,))
    assert second.token_columns["token_ids"].tolist() == [20]
    assert slots1 == ((), (0,), ())


def test_a_rank_with_nothing_to_do_gets_an_empty_batch() -> None:
    _, (nothing, slots) = shard_batch(three_sequences(), [[(0, 1, 2)], [()]])
    assert (nothing.num_sequences, slots) == (0, ((),))


@pytest.mark.parametrize(
    "ranks",
    [
        [[(0, 1)], [()]],
        [[(0, 1)], [(1, 2)]],
        [[(0, 0)], [(1, 2)]],
        [[(0, 1)], [(2, 3)]],
        [[(-1, 0)], [(1, 2)]],
    ],
    ids=["missing", "twice", "twice for one missing", "too many", "negative"],
)
def test_a_plan_of_another_batch_is_refused(ranks: list[list[tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError, match="each of the 3 sequences exactly once"):
        shard_batch(three_sequences(), ranks)


@pytest.mark.parametrize("ranks", [[[(0,), (1,)], [(2,)]], []], ids=["unequal", "no ranks"])
def test_ranks_with_unequal_slots_are_refused(ranks: list[list[tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError, match="same number of micro-batches"):
        shard_batch(three_sequences(), ranks)


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "[8 9] ((0,),)\n[3]\n"


@pytest.mark.parametrize(
    "indices", [[-2], [3], np.array([True, False, False]), [0.9], np.array([0.0])]
)
def test_select_takes_whole_numbers_in_range_only(indices: object) -> None:
    rows = [{"token_ids": [1, 2]}, {"token_ids": [3, 4]}, {"token_ids": [5, 6]}]
    batch = RaggedBatch.from_rows(rows, {"index": [10, 20, 30]})
    with pytest.raises(ValueError, match="whole numbers from 0 to 2"):
        batch.select(indices)  # type: ignore[arg-type]
    assert batch.select([]).num_sequences == 0


def test_lengths_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match="integer array of counts"):
        RaggedBatch(np.array([1.5, 1.5]), {"token_ids": np.arange(3)})  # type: ignore[arg-type]


@pytest.mark.parametrize("column", [[1, 2, 3], (1, 2, 3), None])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_columns_are_arrays(kind: str, column: object) -> None:
    columns: dict[str, Any] = {"x": column}
    lengths = np.array([1, 1, 1])
    with pytest.raises(ValueError, match=f"{kind} column 'x' must be a NumPy array, got a "):
        RaggedBatch(lengths, columns if kind == "token" else {}, columns if kind != "token" else {})
