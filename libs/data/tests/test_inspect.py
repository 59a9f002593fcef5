"""What an inspection finds in rows, and the page that is made of it."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from burnish_data.encode import LeftOutError
from burnish_data.inspect import (
    Bin,
    Inspection,
    Piece,
    ShownRow,
    ShownText,
    inspect_rows,
    length_histogram,
    pieces_of,
    skipped_text,
    visible,
)
from burnish_data.inspect_html import inspection_html
from burnish_data.rows import BadRowError, ListRows, Skipped
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, its id the byte; <eos> is 256."""
    names = {byte: name for name, byte in _names_of_bytes()}
    backend = Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def _names_of_bytes() -> list[tuple[str, int]]:
    """How the byte-level scheme of GPT-2 writes each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [(chr(byte), byte) for byte in printable] + [
        (chr(256 + i), byte) for i, byte in enumerate(others)
    ]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a mark for the space before, as SentencePiece has them; the first loses its."""
    vocabulary = {"<unk>": 0, "\u2581one": 1, "\u2581two": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def encode(rows: Sequence[str]) -> list[dict[str, Any] | BadRowError]:
    """Text as bytes and EOS, trained after a colon; "?" is bad, more than 9 bytes are cut."""
    encoded: list[dict[str, Any] | BadRowError] = []
    for text in rows:
        if text == "?":
            encoded.append(BadRowError("an answer", text, column="text", reason="no answer"))
            continue
        if text == "long":
            encoded.append(LeftOutError("at most 3 tokens", 4, reason="too long"))
            continue
        ids = [*text.encode(), EOS]
        prompt = text.index(":") + 1
        row: dict[str, Any] = {
            "token_ids": np.array(ids[:9], np.int32),
            "token_mask": (np.arange(len(ids)) >= prompt)[:9],
        }
        encoded.append(row | ({"truncated": True} if len(ids) > 9 else {}))
    return encoded


def inspect(texts: Sequence[str], **options: Any) -> Inspection:
    rows = ListRows(texts, "a.jsonl")
    return inspect_rows(rows, encode, byte_tokenizer(), **options)


def test_lengths_trained_tokens_and_what_was_left_out():
    found = inspect(["a:bc", "?", "ab:cdefghij", "long", ":x"], max_length=9, name="a.jsonl")
    assert found.num_rows == 5
    assert found.lengths.tolist() == [5, 9, 3]
    assert found.trained.tolist() == [3, 6, 2]
    assert found.lengths.dtype == found.trained.dtype == np.int64
    assert found.num_truncated == 1
    assert found.skipped.counts == {"no answer": 1, "too long": 1}
    assert found.skipped.examples["no answer"] == [
        "a.jsonl, row 2, column 'text': expected an answer, got '?'."
    ]
    assert (found.name, found.max_length) == ("a.jsonl", 9)


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 100])
def test_batches_change_nothing(batch_rows: int):
    texts = ["a:bc", "?", "ab:cdefghij", "?", ":x", "c:d"]
    found = inspect(texts, batch_rows=batch_rows, num_shown=2)
    assert found.lengths.tolist() == [5, 9, 3, 4]
    assert [row.where for row in found.shown] == ["a.jsonl, row 1", "a.jsonl, row 3"]
    assert found.skipped.examples["no answer"][1].startswith("a.jsonl, row 4")


def test_a_shown_row_in_full():
    (row,) = inspect(["a:b\u00e9"], num_shown=1).shown
    pieces = (Piece("a", 1, 0), Piece(":", 1, 0), Piece("b", 1, 1), Piece("é", 2, 1))
    assert row == ShownRow(
        "a.jsonl, row 1",
        (ShownText("", (*pieces, Piece("<eos>", 1, 1)), 6, 4, False),),
    )


def test_a_row_that_cannot_be_made_is_skipped_with_its_place():
    def parse(text: str) -> str:
        if ":" not in text:
            raise BadRowError("a colon", text, column="text", reason="no colon")
        return text

    rows = ListRows(["a:b", "ab", "c:d"], "a.jsonl").map(parse)
    found = inspect_rows(rows, encode, byte_tokenizer())
    assert found.lengths.tolist() == [4, 4]
    assert [row.where for row in found.shown] == ["a.jsonl, row 1", "a.jsonl, row 3"]
    assert found.skipped.examples == {
        "no colon": ["a.jsonl, row 2, column 'text': expected a colon, got 'ab'."]
    }


def test_a_bad_row_can_be_an_error_but_not_one_left_out():
    with pytest.raises(BadRowError, match=r"^a\.jsonl, row 3, column 'text': expected an answer"):
        inspect(["a:b", "long", "?"], on_bad_row="error")
    assert inspect(["a:b", "long"], on_bad_row="error").skipped.counts == {"too long": 1}


def test_a_function_that_raises_for_one_of_the_rows():
    def encode_each(rows: Sequence[str]) -> list[dict[str, Any]]:
        made = []
        for result in encode(rows):
            if isinstance(result, BadRowError):
                raise result
            made.append(result)
        return made

    found = inspect_rows(ListRows(["a:b", "?", "c:d"], "a.jsonl"), encode_each, byte_tokenizer())
    assert found.lengths.tolist() == [4, 4]
    assert found.skipped.examples["no answer"][0].startswith("a.jsonl, row 2")


def test_a_function_that_gives_too_few_results():
    def encode_good(rows: Sequence[str]) -> list[Any]:
        return [result for result in encode(rows) if not isinstance(result, BadRowError)]

    with pytest.raises(ValueError, match="one result for each row, got 1 for 2 rows"):
        inspect_rows(ListRows(["a:b", "?"]), encode_good, byte_tokenizer())


@pytest.mark.parametrize("options", [{"num_shown": -1}, {"batch_rows": 0}, {"on_bad_row": "stop"}])
def test_options_that_cannot_be(options: dict[str, Any]):
    with pytest.raises(ValueError, match="must be"):
        inspect(["a:b"], **options)


def test_rows_of_several_sequences():
    def encode_pair(rows: Sequence[str]) -> list[dict[str, Any]]:
        side = {"token_ids": np.array([97, 98]), "token_mask": np.array([False, True])}
        longer = {"token_ids": np.array([97, 98, 99]), "token_mask": np.array([False, True, True])}
        return [{"chosen": side, "completions": [side, longer], "margin": 0.5} for _ in rows]

    found = inspect_rows(ListRows(["x"]), encode_pair, byte_tokenizer())
    assert found.lengths.tolist() == [2, 2, 3]
    assert found.trained.tolist() == [1, 1, 2]
    assert [text.name for text in found.shown[0].texts] == [
        "chosen",
        "completions 1",
        "completions 2",
    ]


def test_no_rows_at_all():
    found = inspect([])
    assert (found.num_rows, found.lengths.tolist(), found.shown) == (0, [], ())


def test_weights_are_kept():
    def weighted(rows: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "token_ids": np.array([97, 98, 99], np.int32),
                "token_mask": np.array([False, True, True]),
                "token_weights": np.array([0.0, 0.5, 1.0], np.float32),
            }
        ]

    (row,) = inspect_rows(ListRows(["abc"]), weighted, byte_tokenizer()).shown
    assert [piece.weight for piece in row.texts[0].pieces] == [0.0, 0.5, 1.0]


def test_pieces_of_characters_cut_into_bytes():
    ids = [*"aé€😀".encode(), EOS]
    assert pieces_of(ids, [1.0] * len(ids), byte_tokenizer()) == [
        Piece("a", 1, 1),
        Piece("é", 2, 1),
        Piece("€", 3, 1),
        Piece("😀", 4, 1),
        Piece("<eos>", 1, 1),
    ]


def test_a_character_that_is_cut_off_or_trained_in_part():
    tokenizer = byte_tokenizer()
    euro = [*"€".encode()]
    assert pieces_of([97, *euro[:2]], [0.0, 1.0, 1.0], tokenizer) == [
        Piece("a", 1, 0),
        Piece("\ufffd", 2, 1),
    ]
    assert pieces_of([*euro, 98], [0.0, 1.0, 1.0, 1.0], tokenizer) == [
        Piece("\ufffd", 1, 0),
        Piece("\ufffd\ufffdb", 3, 1),
    ]


def test_pieces_keep_the_spaces_between_words():
    pieces = pieces_of([1, 2, 1], [0.0, 0.0, 0.0], word_tokenizer())
    assert [piece.text for piece in pieces] == ["one", " two", " one"]


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([], []),
        ([7], [(7, 7, 1)]),
        ([0, 1, 1, 3], [(0, 0, 1), (1, 1, 2), (2, 2, 0), (3, 3, 1)]),
        ([3, 5, 12], [(0, 4, 1), (5, 9, 1), (10, 14, 1)]),
        ([250, 999, 100], [(0, 499, 2), (500, 999, 1)]),
        ([1_000_000, 1_000_003], [(i, i, int(i % 3 == 1)) for i in range(10**6, 10**6 + 4)]),
    ],
)
def test_histogram(lengths: list[int], bins: list[tuple[int, int, int]]):
    assert length_histogram(lengths, max_bins=4) == [Bin(*each) for each in bins]


def test_histogram_has_every_length_in_one_bin():
    lengths = np.random.default_rng(0).integers(1, 5000, 1000)
    bins = length_histogram(lengths)
    assert sum(each.count for each in bins) == 1000
    assert len(bins) <= 16
    for each in bins:
        assert each.count == np.count_nonzero((lengths >= each.low) & (lengths <= each.high))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n\tlines, é😀 and a joiner\u200d", "two\n\tlines, é😀 and a joiner\u200d"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\r\nb", "a\\r\nb"),
        ("\x00\x7f\x85", r"\x00\x7f\x85"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\ud83d alone", r"\ud83d alone"),
        ("\ufeffmark", r"\ufeffmark"),
        ("\u061cturned", r"\u061cturned"),
        ("a\u200bb\u2060c\u200cd\xade", r"a\u200bb\u2060c\u200cd\xade"),
        ("tag \U000e0041", r"tag \U000e0041"),
    ],
)
def test_what_a_screen_would_obey_is_written_out(text: str, shown: str):
    assert visible(text) == shown


HOSTILE = "</pre><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;\x1b\ud800"


class Tags(html.parser.HTMLParser):
    """All tags with their attributes, and all text, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_inspection() -> Inspection:
    """The same hostile text in every place that a file can fill."""
    skipped = Skipped()
    skipped.add(BadRowError(HOSTILE, HOSTILE, column=HOSTILE, where=HOSTILE, reason=HOSTILE))
    pieces = (Piece(HOSTILE, 1, 0), Piece(HOSTILE, 1, 1), Piece(HOSTILE, 1, 0.5))
    return Inspection(
        name=HOSTILE,
        num_rows=2,
        shown=(ShownRow(HOSTILE, (ShownText(HOSTILE, pieces, 3, 2, True),)),),
        lengths=np.array([3]),
        trained=np.array([2]),
        num_truncated=1,
        skipped=skipped,
        max_length=3,
    )


def test_the_page_escapes_everything():
    page = inspection_html(hostile_inspection())
    page.encode()  # no half of a surrogate pair is left
    found = Tags(page)
    names = {tag for tag, _ in found.tags}
    assert names.isdisjoint({"script", "img", "link", "iframe", "a", "object", "base"})
    handlers = [key for _, attributes in found.tags for key in attributes if key.startswith("on")]
    assert handlers == []
    # In the title, the heading, the place, the caption, three pieces, the reason, and twice in the
    # example, as place and expectation (column and what was got are shown by their repr).
    assert found.text.count("</pre><script>alert(1)</script><img src=x onerror='alert(2)'>") == 10
    assert r'"&amp;\x1b\ud800' in found.text


def test_the_page_needs_no_network():
    page = inspection_html(hostile_inspection())
    found = Tags(page)
    assert not [a for _, a in found.tags if "src" in a or "href" in a]
    assert "url(" not in page
    assert "@import" not in page
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": policy}) in found.tags


def test_trained_tokens_are_marked():
    page = inspection_html(inspect(["a:bc", "?"], name="a.jsonl", max_length=9))
    (shown,) = re.findall(r"<pre>\n(.*?)</pre>", page)
    assert shown == "<i>a</i><i>:</i><mark><i>b</i><i>c</i><i>&lt;eos&gt;</i></mark>"
    assert '<p class="note">5 tokens, 3 trained</p>' in page
    assert '<th>truncated at 9 tokens</th><td class="number">0</td>' in page
    assert '<th>trained tokens</th><td class="number">3 (60.0%)</td>' in page
    assert "<h3>no answer: 1</h3>" in page
    assert "a.jsonl, row 2, column &#x27;text&#x27;: expected an answer" in page
    assert '<td class="number">5 to 5</td><td class="number">1</td>' in page


def test_weights_are_marked_apart():
    page = inspection_html(hostile_inspection())
    assert page.count('<mark class="weighted" title="weight 0.5">') == 1


def test_many_equal_tokens_are_counted():
    pieces = (*[Piece("<image>", 1, 0)] * 256, Piece("a", 1, 0), *[Piece("!", 1, 0)] * 4)
    row = ShownRow("row 1", (ShownText("", pieces, 261, 0, False),))
    one = np.array([261])
    page = inspection_html(Inspection("images", 1, (row,), one, one * 0, 0, Skipped()))
    (shown,) = re.findall(r"<pre>\n(.*?)</pre>", page)
    image = '<i>&lt;image&gt;</i><span class="note"> &times; 256</span>'
    assert shown == f"{image}<i>a</i>{'<i>!</i>' * 4}"


def test_a_page_of_nothing():
    page = inspection_html(inspect([], name="empty.jsonl"))
    assert '<th>rows read</th><td class="number">0</td>' in page
    assert "<pre>" not in page
    assert "Lengths" not in page


def test_much_that_was_skipped_is_warned_of():
    def found(num_rows: int, num_skipped: int) -> Inspection:
        skipped = Skipped()
        for _ in range(num_skipped):
            skipped.add(BadRowError("another", "row"))
        none = np.zeros(0, np.int64)
        return Inspection("a", num_rows, (), none, none, 0, skipped, form="sharegpt <b>")

    much = found(300, 191)
    assert skipped_text(much) == "191 of 300 (63.7%)"
    assert much.warning.startswith("WARNING: 63.7% of the rows cannot be used")
    assert '<p class="warning">WARNING: 63.7% of the rows' in inspection_html(much)
    assert '<p class="note">form: sharegpt &lt;b&gt;</p>' in inspection_html(much)
    assert found(10, 1).warning == ""
    assert 'class="warning"' not in inspection_html(found(10, 1))
    assert (skipped_text(found(0, 0)), found(0, 0).warning) == ("0", "")
