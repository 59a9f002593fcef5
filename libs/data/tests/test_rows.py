import pickle

import pytest
from burnish_data import BadRowError, ListRows, Skipped, check_rows
from burnish_data.rows import ConcatenatedRows


def even(value: int) -> int:
    if value % 2:
        raise BadRowError("an even number", value, column="value", reason="odd")
    return value // 2


def broken(value: int) -> int:
    return [10][value]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (BadRowError("a list", 7), "expected a list, got 7."),
        (BadRowError("a list", 7, column="a.b"), "column 'a.b': expected a list, got 7."),
        (BadRowError("a list", 7, where="f, line 3"), "f, line 3: expected a list, got 7."),
        (
            BadRowError("a list", "x" * 200, column="a").at("f, line 3"),
            f"f, line 3, column 'a': expected a list, got '{'x' * 119}... (202 characters).",
        ),
        (BadRowError("a list", 7, where="first").at("second"), "first: expected a list, got 7."),
    ],
)
def test_a_bad_rows_error_says_where_what_and_what_was_got(error, text):
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (BadRowError, text, error.__dict__)


def test_an_errors_place_does_not_change_the_error_itself():
    error = BadRowError("a list", 7)
    assert str(error.at("f, line 3")) == "f, line 3: expected a list, got 7."
    assert (error.where, str(error)) == (None, "expected a list, got 7.")


def test_rows_are_a_sequence():
    rows = ListRows([3, 1, 4, 1, 5], name="digits")
    assert (len(rows), rows[0], rows[-1], list(rows)) == (5, 3, 5, [3, 1, 4, 1, 5])
    assert list(rows[1:4]) == [1, 4, 1]
    assert list(rows[::-2]) == [5, 4, 3]
    assert rows[::-2].where(1) == "digits, row 3"
    assert rows.count(1) == 2
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"row {index} of 5"):
            rows[index]


def test_select_keeps_places_and_refuses_other_indices():
    rows = ListRows([3, 1, 4]).select([2, 2, 0])
    assert (list(rows), rows.where(0), rows.where(2)) == ([4, 4, 3], "rows, row 3", "rows, row 1")
    assert list(ListRows([3]).select([])) == []
    for indices in ([3], [-1], [0, 3]):
        with pytest.raises(IndexError, match=r"indices must be in \[0, 3\)"):
            ListRows([3, 1, 4]).select(indices)


def test_rows_one_after_the_other():
    rows = ConcatenatedRows([ListRows([1, 2], "a"), ListRows([], "b"), ListRows([3], "c")])
    assert list(rows) == [1, 2, 3]
    assert [rows.where(index) for index in range(3)] == ["a, row 1", "a, row 2", "c, row 1"]
    assert len(ConcatenatedRows([])) == 0
    assert pickle.loads(pickle.dumps(rows))[-1] == 3


def test_a_map_is_made_when_asked_for_and_its_errors_have_a_place():
    rows = ListRows([2, 3, 4]).map(even)
    assert (rows[0], rows[2]) == (1, 2)
    with pytest.raises(BadRowError, match=r"^rows, row 2, column 'value': expected an even number"):
        rows[1]
    # The place is that of the source through any number of steps.
    with pytest.raises(BadRowError, match=r"^rows, row 2, column"):
        rows.map(str)[1:].row(0)


def test_other_errors_of_a_map_get_the_place_as_a_note():
    with pytest.raises(IndexError) as caught:
        ListRows([0, 1]).map(broken)[1]
    assert caught.value.__notes__ == ["rows, row 2: this row was being made"]


def test_an_index_error_of_a_function_does_not_end_the_rows():
    with pytest.raises(IndexError, match="list index out of range"):
        list(ListRows([0, 1, 0]).map(broken))


def test_checking_raises_the_first_error_or_skips_and_counts():
    rows = ListRows([2, 3, 4, 5, 6]).map(even)
    with pytest.raises(BadRowError, match=r"^rows, row 2, column 'value'"):
        check_rows(rows)
    good, skipped = check_rows(rows, on_bad_row="skip")
    assert list(good) == [1, 2, 3]
    assert good.where(1) == "rows, row 3"
    assert (skipped.total, skipped.counts) == (2, {"odd": 2})
    assert str(skipped) == (
        "2 skipped (2 odd), for example:\n"
        "  rows, row 2, column 'value': expected an even number, got 3."
    )


def test_checking_good_rows_returns_them():
    rows = ListRows([2, 4])
    assert check_rows(rows) == (rows, Skipped())
    assert str(Skipped()) == "no row skipped"
    assert len(check_rows(ListRows([]))[0]) == 0


def test_checking_refuses_rows_of_which_none_is_good():
    with pytest.raises(ValueError, match=r"At least one row must be good, got none of 2: 2 skipp"):
        check_rows(ListRows([1, 3]).map(even), on_bad_row="skip")
    with pytest.raises(ValueError, match=r'on_bad_row must be "error" or "skip", got \'ignore\'\.'):
        check_rows(ListRows([2]), on_bad_row="ignore")


def test_counts_add_up_and_examples_are_few():
    one, other = Skipped(), Skipped()
    for index in range(7):
        one.add(BadRowError("x", index, reason="odd"))
    other.add(BadRowError("x", 99, reason="odd"))
    other.add(BadRowError("y", 7, reason="long"))
    both = one + other
    assert both.counts == {"odd": 8, "long": 1}
    assert both.examples["odd"] == [f"expected x, got {index}." for index in range(5)]
    assert both.examples["long"] == ["expected y, got 7."]
    assert str(both).startswith("9 skipped (8 odd, 1 long), for example:\n  expected y, got 7.\n")
    assert one.total == 7
