"""Chats with images as token ids, trained tokens and pixels, for Hugging Face's VLM processors.

Needs `burnish-data[images]`: pillow, and a transformers that tells where a processor put an image's
tokens (`return_text_replacement_offsets`, 5.10 or later).
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from burnish_data._tokens import tokenise
from burnish_data.encode import (
    RenderedChat,
    Span,
    TooLong,
    TrainOn,
    _check_arguments,
    _encoded,
    render_chat,
)
from burnish_data.messages import ChatRow, Message, validate_messages
from burnish_data.rows import BadRowError

if TYPE_CHECKING:
    from PIL.Image import Image

# Columns of a processor that have one number per token, as `token_ids` has.
_TOKEN_COLUMNS = ("mm_token_type_ids", "token_type_ids")
# What a processor gives and a row has no use for: known otherwise, or made when rows are batched.
_DROPPED = ("input_ids", "attention_mask", "text_replacement_offsets")


def encode_images(
    row: ChatRow,
    processor: Any,
    *,
    train_on: TrainOn = "assistant",
    max_length: int | None = None,
    too_long: TooLong = "error",
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    image_folder: str | Path | None = None,
    images_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A chat with images (or without) as the columns that a vision-language model is trained on.

    The ids are those of `processor(text=text, images=images, add_special_tokens=False)`, where text
    is the whole conversation as the template renders it; the processor puts an image's many tokens
    in the place of its one. What is trained is as `encode_chats` has it, moved along; what stands
    in the place of an image is never trained, in no mode.

    Args:
        row: a chat whose content may hold image parts.
        processor: of Hugging Face, with a fast tokenizer, an `image_token`, and an image processor.
        train_on: see `encode_chats`.
        max_length: in tokens, images' included; None is no limit.
        too_long: see `encode_chats`; an image is never cut: where "truncate" would, it is an error.
        chat_template: see `encode_chats`; by default the processor's, else its tokenizer's.
        chat_template_kwargs: see `encode_chats`.
        image_folder: where relative paths of images begin; by default the working directory.
        images_kwargs: for the image processor (`size`, say).

    Returns:
        `token_ids`, `token_mask`, `token_weights` and `truncated` as `encode_chats` has them, the
        processor's columns with one number per token as int32 [T] (`mm_token_type_ids`), and its
        other columns as it gives them, NumPy arrays without a dimension for rows where it adds none
        (for Qwen2-VL `pixel_values` float32 [patches, channels * 2 * 14 * 14] and `image_grid_thw`
        int64 [images, 3]). No such column is there for a chat without images.

    Raises:
        BadRowError: the row cannot be used; an image is missing or broken, say.
        ValueError: the processor or the template cannot be used.
        ImportError: pillow is missing.
    """
    tokenizer = _checked_tokenizer(processor)
    _check_arguments(tokenizer, train_on, max_length, too_long)
    source = _template(processor, chat_template)
    messages, places = _taken_out(validate_messages(row.get("messages")))
    chat = render_chat(
        cast(ChatRow, {**row, "messages": messages}),
        tokenizer,
        train_on=train_on,
        chat_template=source,
        chat_template_kwargs=chat_template_kwargs,
        allow_images=True,
    )
    _check_placeholders(chat.text, processor.image_token, places)
    folder = None if image_folder is None else Path(image_folder)
    images = [load_image(image, folder=folder, column=column) for column, image in places]
    made = _process(processor, chat.text, images, places, images_kwargs)
    chat, image_spans = _expanded(chat, made.get("text_replacement_offsets", [[]])[0])
    ((token_ids, token_at),) = tokenise(tokenizer, [chat.text])
    _check_same(token_ids, made["input_ids"][0])
    encoded = _encoded(chat, token_ids, token_at, max_length, too_long)
    if isinstance(encoded, BadRowError):
        raise encoded
    length = len(encoded["token_ids"])
    last = max((token_at(span.end) for span in image_spans), default=0)
    if last > length:
        raise BadRowError(
            f"at most {max_length} tokens up to the end of the last image, as no image can be cut",
            last,
            column="messages",
            reason="too long",
        )
    return {**encoded, **_other_columns(made, length)}


def has_images(row: Mapping[str, Any]) -> bool:
    """Whether a chat row's messages hold image parts."""
    return any(
        isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
        for message in row.get("messages") or ()
        if isinstance(message, Mapping) and not isinstance(message.get("content"), str)
        for part in message.get("content") or ()
    )


def load_image(image: object, *, folder: Path | None = None, column: str = "image") -> Image:
    """An image as a model sees it: turned upright, in RGB, wholly decoded.

    Args:
        image: a path (relative to `folder`), the bytes of a file, a PIL image, or as `datasets`
            keeps them, a mapping with `bytes` or `path`. Nothing is fetched from a network.
        folder: by default the working directory.
        column: for error messages.

    Raises:
        BadRowError: there is no such file, or it is broken, or no image.
        ImportError: pillow is missing.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(
            'Images must have pillow, which is not installed; pip install "burnish-data[images]".'
        ) from error
    opened = image if isinstance(image, Image.Image) else _open(image, folder, column)
    try:
        return ImageOps.exif_transpose(opened).convert("RGB")
    # Broken files make pillow raise what its decoders happen to; SyntaxError is PNG's.
    except (OSError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError) as error:
        raise BadRowError(
            f"an image that can be decoded ({error})",
            _name_of(image),
            column=column,
            reason="broken image",
        ) from error


def _open(image: object, folder: Path | None, column: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    content = _bytes_of(image, folder, column)
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:
        expected = "an image in a format that pillow knows"
        failure: Exception = error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        expected = f"an image that can be opened ({error})"
        failure = error
    raise BadRowError(expected, _name_of(image), column=column, reason="broken image") from failure


def _bytes_of(image: object, folder: Path | None, column: str) -> bytes:
    """The image's file, read whole: a broken one is not left open by a decoder that gives up."""
    source = image
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    expected = "a path, the bytes of a file or a PIL image (nothing is fetched)"
    failure: Exception | None = None
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str | Path) and "://" not in str(source):
        try:
            return ((folder or Path()) / Path(source).expanduser()).read_bytes()
        except (OSError, ValueError) as error:
            expected, failure = f"an image's file that can be read ({error})", error
    raise BadRowError(expected, _name_of(image), column=column, reason="missing image") from failure


def _name_of(image: object) -> object:
    """What to say of an image in an error message."""
    if isinstance(image, bytes | bytearray | memoryview):
        return f"{len(image):,} bytes"
    if isinstance(image, Mapping):
        return {key: _name_of(value) for key, value in image.items()}
    return image


def _checked_tokenizer(processor: Any) -> Any:
    lacks = [
        name
        for name in ("tokenizer", "image_processor", "image_token")
        if getattr(processor, name, None) is None
    ]
    if lacks:
        raise ValueError(
            "The processor must be one for images and text, with an image_token, got a "
            f"{type(processor).__name__} without {', '.join(lacks)}; pass another."
        )
    return processor.tokenizer


def _template(processor: Any, chat_template: str | Path | None) -> str | Path | None:
    own = getattr(processor, "chat_template", None)
    if isinstance(own, Mapping):
        return cast("str | Path | None", own.get(chat_template or "default", chat_template))
    return chat_template or own


def _taken_out(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, Any]]]:
    """Messages with the number of each image in its place; each image with its column.

    A template sees no image: one that writes out all it is given would write its bytes.
    """
    taken: list[Message] = []
    images: list[tuple[str, Any]] = []
    for number, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            parts: list[Any] = []
            for place, part in enumerate(content):
                if part["type"] == "image":
                    column = f"messages[{number}].content[{place}].image"
                    images.append((column, part["image"]))
                    part = {"type": "image", "image": f"image {len(images)}"}
                parts.append(part)
            message = cast(Message, {**message, "content": parts})
        taken.append(message)
    return taken, images


def _check_placeholders(text: str, image_token: str, images: Sequence[tuple[str, Any]]) -> None:
    """One in the text for each image, else the processor would put images in wrong places."""
    found = text.count(image_token)
    if found != len(images):
        raise BadRowError(
            f"{image_token} once for each of {len(images)} images in the whole text (the chat "
            "template must write it for an image, and no message may)",
            f"{found} of it",
            column="messages",
            reason="images not rendered once",
        )


def _process(
    processor: Any,
    text: str,
    images: Sequence[Image],
    places: Sequence[tuple[str, Any]],
    images_kwargs: Mapping[str, Any] | None,
) -> Mapping[str, Any]:
    try:
        made = processor(
            text=[text],
            images=list(images) or None,
            text_kwargs={"add_special_tokens": False, "return_text_replacement_offsets": True},
            images_kwargs=dict(images_kwargs or {}),
        )
    except ValueError as error:  # an image that is too flat, say
        raise BadRowError(
            f"images that the processor can use ({error})",
            [f"{image.width} x {image.height}" for image in images],
            column=", ".join(column for column, _ in places) or "messages",
            reason="refused by the processor",
        ) from error
    if images and len(made.get("text_replacement_offsets", [[]])[0]) != len(images):
        raise ValueError(
            "The processor must tell where it puts the tokens of images "
            "(return_text_replacement_offsets, in transformers 5.10 or later), got a "
            f"{type(processor).__name__} that does not; upgrade transformers or use another model."
        )
    return cast(Mapping[str, Any], made)


@dataclass(frozen=True)
class _Moves:
    """From places in a text to those in the text with images' tokens."""

    ends: list[int]  # of each placeholder, rising
    gained: list[int]  # characters gained up to there

    def __call__(self, place: int) -> int:
        passed = bisect.bisect_right(self.ends, place)
        return place + (self.gained[passed - 1] if passed else 0)


def _expanded(
    chat: RenderedChat, replacements: Sequence[Mapping[str, Any]]
) -> tuple[RenderedChat, list[Span]]:
    """The chat with what the processor puts in the place of each image, and where that stands."""
    parts: list[str] = []
    images: list[Span] = []
    moves = _Moves([], [])
    last = gained = 0
    for each in replacements:
        start, end = each["span"]
        parts += [chat.text[last:start], each["replacement"]]
        images.append(Span(start + gained, start + gained + len(each["replacement"]), 0.0))
        gained += len(each["replacement"]) - (end - start)
        moves.ends.append(end)
        moves.gained.append(gained)
        last = end
    text = "".join([*parts, chat.text[last:]])
    spans = [Span(moves(span.start), moves(span.end), span.weight) for span in chat.spans]
    return RenderedChat(text, [*spans, *images]), images


def _check_same(token_ids: Sequence[int], processors: Sequence[int]) -> None:
    if list(token_ids) != list(processors):
        raise ValueError(
            "The processor must tokenise the text as its tokenizer does, got "
            f"{len(processors)} tokens instead of {len(token_ids)}, or others; use another model."
        )


def _other_columns(made: Mapping[str, Any], length: int) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in made.items():
        if name in _TOKEN_COLUMNS:
            columns[name] = np.asarray(value[0], np.int32)[:length]
        elif name not in _DROPPED:
            columns[name] = _array(value)
    return columns


def _array(value: Any) -> Any:
    """A processor's column as an array; as a list of arrays where their shapes differ."""
    if not isinstance(value, list):
        return np.asarray(value)
    arrays = [np.asarray(each) for each in value]
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return arrays
