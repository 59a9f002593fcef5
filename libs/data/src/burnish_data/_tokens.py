"""A tokenizer's special tokens, and texts as tokens whose places in the text are known."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIAL_TEXTS: WeakKeyDictionary[Any, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokenizer's special tokens as text; kept, as to list them takes long."""
    size = len(tokenizer)
    known = _SPECIAL_TEXTS.get(tokenizer)
    if known is None or known[0] != size:
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        known = (size, tuple({*added, *tokenizer.all_special_tokens}))
        _SPECIAL_TEXTS[tokenizer] = known
    return known[1]


# Tokens of one text: their ids, and the first token that begins at or after a character.
TokenAt = Callable[[int], int]


def tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> Iterator[tuple[list[int], TokenAt]]:
    """Each text's ids, without special tokens that it has not itself, and its tokens' places."""
    if not texts:
        return
    if _trims_offsets(tokenizer):
        encodings = _untrimmed(tokenizer).encode_batch(texts, add_special_tokens=False)
    else:
        encodings = tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        ).encodings
    for encoding in encodings:
        yield encoding.ids, _token_at(encoding.offsets)  # made one by one: they take much memory


def _token_at(offsets: list[tuple[int, int]]) -> TokenAt:
    """From a character to the first token that begins there or later.

    Tokens begin one after the other, or in one place: several may share one character's bytes.
    """
    return lambda character: bisect_left(offsets, (character, -1))


def _trims_offsets(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether offsets leave out a token's white space, as those of Llama 3 do."""
    processor = tokenizer.backend_tokenizer.post_processor
    return processor is not None and b'"trim_offsets":true' in processor.__getstate__()


_UNTRIMMED: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The same tokenizer with offsets that hold white space; made once."""
    size = len(tokenizer)
    known = _UNTRIMMED.get(tokenizer)
    if known is None or known[0] != size:
        backend = tokenizer.backend_tokenizer
        settings = json.loads(backend.to_str())
        settings.update(post_processor=None, truncation=None, padding=None)
        copy = type(backend).from_str(json.dumps(settings))
        copy.encode_special_tokens = backend.encode_special_tokens
        known = (size, copy)
        _UNTRIMMED[tokenizer] = known
    return known[1]
