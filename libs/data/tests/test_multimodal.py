"""Images in chats, with Qwen2-VL's own processor on images that are made here."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from burnish_data.encode import LeftOutError, encode_chat
from burnish_data.multimodal import encode_images, has_images, load_image
from burnish_data.rows import BadRowError
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import Gemma3Processor, PreTrainedTokenizerFast, Qwen2VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

# As Qwen2-VL-2B-Instruct has it (Apache-2.0), without videos.
QWEN2_VL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
IMAGE_PAD = 261
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


class QwenProcessor(Qwen2VLProcessor):
    """Qwen2-VL's, without its processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)


def make_tokenizer(special_tokens: list[str], *, trim_offsets: bool = False, **named: Any) -> Any:
    """A byte-level tokenizer; line ends alone are merged, up to three of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    if "merges" in named:
        merges = named.pop("merges")
        for left, right in merges:
            vocabulary[left + right] = len(vocabulary)
        backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if trim_offsets:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.add_special_tokens(special_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def make_processor(template: str = QWEN2_VL_TEMPLATE, **options: Any) -> QwenProcessor:
    tokenizer = make_tokenizer(
        SPECIAL_TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>", **options
    )
    return QwenProcessor(Qwen2VLImageProcessorPil(), tokenizer, None, chat_template=template)


# After SmolVLM's (Apache-2.0), which knows content as a list of parts alone.
PARTS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<|image_pad|>' }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# After LLaVA's, which first writes a message's images, then its texts.
FILTER_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<|image_pad|>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


@pytest.fixture(scope="module")
def processor() -> QwenProcessor:
    return make_processor()


def picture(width: int = 112, height: int = 56, seed: int = 0) -> Image.Image:
    """A picture of noise; 28 x 28 pixels are one token, so that 112 x 56 are 8."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def image_part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def ask(*parts: Any) -> dict[str, Any]:
    """A user's message of text, pictures and finished parts."""
    content = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        elif isinstance(part, Image.Image):
            part = image_part(part)
        content.append(part)
    return {"role": "user", "content": content}


def answer(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def trained_text(encoded: Mapping[str, Any], processor: Any) -> list[str]:
    """The texts of the stretches that are trained."""
    ids, mask = encoded["token_ids"], encoded["token_mask"]
    ends = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [
        processor.tokenizer.decode(ids[start:end].tolist())
        for start, end in ends.reshape(-1, 2).tolist()
    ]


def two_images() -> dict[str, Any]:
    """Images of 8 and of 4 tokens, in two turns of the user."""
    return {
        "messages": [
            ask(picture(), "What is 😀 this?"),
            answer("A café."),
            ask("And ", picture(56, 56, seed=1), " this?"),
            answer("Noise."),
        ]
    }


TWO_IMAGES = (
    SYSTEM
    + "<|im_start|>user\n<|vision_start|>"
    + "<|image_pad|>" * 8
    + "<|vision_end|>What is 😀 this?<|im_end|>\n"
    + "<|im_start|>assistant\nA café.<|im_end|>\n"
    + "<|im_start|>user\nAnd <|vision_start|>"
    + "<|image_pad|>" * 4
    + "<|vision_end|> this?<|im_end|>\n"
    + "<|im_start|>assistant\nNoise.<|im_end|>\n"
)


def test_two_images(processor: QwenProcessor):
    encoded = encode_images(two_images(), processor)
    assert processor.tokenizer.decode(encoded["token_ids"].tolist()) == TWO_IMAGES
    assert trained_text(encoded, processor) == ["A café.<|im_end|>", "Noise.<|im_end|>"]
    images = np.flatnonzero(encoded["token_ids"] == IMAGE_PAD)
    assert images.tolist() == [*range(45, 53), *range(106, 110)]
    assert encoded["mm_token_type_ids"].tolist() == (
        [0] * 45 + [1] * 8 + [0] * 53 + [1] * 4 + [0] * 28
    )
    assert encoded["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4]]
    assert encoded["pixel_values"].shape == (4 * 8 + 4 * 4, 3 * 2 * 14 * 14)
    dtypes = {name: str(column.dtype) for name, column in encoded.items()}
    assert dtypes == {
        "token_ids": "int32",
        "token_mask": "bool",
        "mm_token_type_ids": "int32",
        "pixel_values": "float32",
        "image_grid_thw": "int64",
    }


def test_qwens_own_vocabulary():
    """Qwen2-VL's tokens; the pruned tokenizer gives this text the ids of the full one."""
    path = Path(__file__).parent / "golden" / "qwen3.tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    image_processor = Qwen2VLImageProcessorPil()
    processor = QwenProcessor(image_processor, tokenizer, None, chat_template=QWEN2_VL_TEMPLATE)
    row = {
        "messages": [
            {"role": "system", "content": "Be brief. 请简短。"},
            ask(picture(56, 56), "Hi 🙂, what is 1 + 234?"),
            answer("235, voilà 👩‍🔬"),
        ]
    }
    encoded = encode_images(row, processor)
    system = [151644, 8948, 198, 3430, 9814, 13, 220, 14880, 98237, 99534, 1773, 151645, 198]
    image = [151652, 151655, 151655, 151655, 151655, 151653]
    question = [13048, 27484, 11, 1128, 374, 220, 16, 488, 220, 17, 18, 19, 30, 151645, 198]
    reply = [17, 18, 20, 11, 4069, 321, 6362, 61804, 102, 378, 235, 147948, 151645]
    header = [151644, 77091, 198]
    expected = [*system, 151644, 872, 198, *image, *question, *header, *reply, 198]
    assert encoded["token_ids"].tolist() == expected
    assert encoded["token_ids"][encoded["token_mask"]].tolist() == reply


def test_ids_and_pixels_are_the_processors(processor: QwenProcessor):
    row = two_images()
    encoded = encode_images(row, processor)
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    images = [picture(), picture(56, 56, seed=1)]
    expected = processor(text=[text], images=images, add_special_tokens=False)
    assert encoded["token_ids"].tolist() == expected["input_ids"][0]
    np.testing.assert_array_equal(encoded["pixel_values"], expected["pixel_values"])
    np.testing.assert_array_equal(encoded["image_grid_thw"], expected["image_grid_thw"])


def test_all_is_trained_but_images_and_the_first_token(processor: QwenProcessor):
    encoded = encode_images(two_images(), processor, train_on="all")
    not_trained = np.flatnonzero(~encoded["token_mask"])
    assert not_trained.tolist() == [0, *range(45, 53), *range(106, 110)]


def test_the_last_turn_alone(processor: QwenProcessor):
    encoded = encode_images(two_images(), processor, train_on="last")
    assert trained_text(encoded, processor) == ["Noise.<|im_end|>"]


def test_an_image_that_the_assistant_shows_is_not_trained(processor: QwenProcessor):
    shown = {**ask("See: ", picture(), " that."), "role": "assistant"}
    row = {"messages": [{"role": "user", "content": "Draw."}, shown]}
    encoded = encode_images(row, processor)
    assert trained_text(encoded, processor) == [
        "See: <|vision_start|>",
        "<|vision_end|> that.<|im_end|>",
    ]


def test_weights_move_with_their_tokens(processor: QwenProcessor):
    row = two_images()
    row["messages"][1]["weight"] = 0.5
    encoded = encode_images(row, processor)
    weights = encoded["token_weights"]
    half = processor.tokenizer.decode(encoded["token_ids"][weights == 0.5].tolist())
    assert half == "A café.<|im_end|>"
    assert weights[encoded["token_mask"]].sum() == 0.5 * 9 + 7  # é is two bytes
    row["messages"][1]["weight"] = 0
    assert trained_text(encode_images(row, processor), processor) == ["Noise.<|im_end|>"]


def test_a_chat_without_images(processor: QwenProcessor):
    row = {"messages": [{"role": "user", "content": "Hi"}, answer("Ho")]}
    encoded = encode_images(row, processor)
    assert sorted(encoded) == ["mm_token_type_ids", "token_ids", "token_mask"]
    alone = encode_chat(row, processor.tokenizer, chat_template=QWEN2_VL_TEMPLATE)
    np.testing.assert_array_equal(encoded["token_ids"], alone["token_ids"])
    np.testing.assert_array_equal(encoded["token_mask"], alone["token_mask"])


def test_offsets_without_white_space_change_nothing(processor: QwenProcessor):
    """Llama 3's tokenizer says that a token begins after its space."""
    row = {"messages": [ask(picture(), "What?"), answer(" A  cat. ")]}
    encoded = encode_images(row, make_processor(trim_offsets=True))
    assert trained_text(encoded, processor) == [" A  cat. <|im_end|>"]


def test_images_from_wherever_they_are(processor: QwenProcessor, tmp_path: Path):
    (tmp_path / "cat.png").write_bytes(file_of(picture()))
    forms: list[tuple[Any, Path | None]] = [
        (picture(), None),
        (file_of(picture()), None),
        (tmp_path / "cat.png", None),
        (str(tmp_path / "cat.png"), None),
        ("cat.png", tmp_path),
        ({"bytes": file_of(picture()), "path": None}, None),
        ({"bytes": None, "path": "cat.png"}, tmp_path),
    ]
    expected = encode_images({"messages": [ask(picture(), "?"), answer("A")]}, processor)
    for form, folder in forms:
        row = {"messages": [ask(image_part(form), "?"), answer("A")]}
        encoded = encode_images(row, processor, image_folder=folder)
        np.testing.assert_array_equal(encoded["pixel_values"], expected["pixel_values"])


def test_images_in_openais_form(processor: QwenProcessor, tmp_path: Path):
    path = tmp_path / "cat.png"
    path.write_bytes(file_of(picture()))
    part = {"type": "image_url", "image_url": {"url": str(path)}}
    row = {"messages": [{"role": "user", "content": [part]}, answer("A cat")]}
    assert has_images(row)
    assert encode_images(row, processor)["image_grid_thw"].tolist() == [[1, 4, 8]]


def test_an_image_stands_upright():
    tags = Image.Exif()
    tags[0x0112] = 6  # Orientation: to be turned clockwise
    turned = load_image(file_of(picture(112, 56), "JPEG", exif=tags))
    assert turned.size == (56, 112)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16"])
def test_an_image_is_rgb(mode: str):
    image = picture().convert("L" if mode == "I;16" else mode)
    made = load_image(image.convert("I;16") if mode == "I;16" else image)
    assert (made.mode, made.size) == ("RGB", (112, 56))


PNG = file_of(picture())
BROKEN = [
    ("nowhere.png", "missing image", "No such file"),
    (".", "missing image", "Is a directory"),
    ("https://example.org/cat.png", "missing image", "nothing is fetched"),
    (7, "missing image", "got 7"),
    ({"bytes": None, "path": None}, "missing image", "a path, the bytes of a file"),
    (b"", "broken image", "a format that pillow knows, got '0 bytes'"),
    (b"<svg></svg>", "broken image", "a format that pillow knows, got '11 bytes'"),
    (PNG[:200], "broken image", "can be decoded"),
    (PNG[:20], "broken image", "can be opened"),
    (PNG[:100] + b"\0" * 500 + PNG[600:], "broken image", "can be opened|can be decoded"),
    (file_of(picture(), "JPEG")[:400], "broken image", "can be opened|can be decoded"),
    (file_of(picture(), "GIF")[:60], "broken image", "a format that pillow knows|can be opened"),
    ("a\0b.png", "missing image", "null byte"),
]


@pytest.mark.parametrize(
    ("image", "reason", "message"), BROKEN, ids=[str(i) for i in range(len(BROKEN))]
)
def test_an_image_that_cannot_be_used(
    image: Any, reason: str, message: str, processor: QwenProcessor
):
    row = {"messages": [ask("Look: ", image_part(image)), answer("A cat.")]}
    with pytest.raises(BadRowError, match=message) as raised:
        encode_images(row, processor)
    assert raised.value.reason == reason
    assert raised.value.column == "messages[0].content[1].image"


def test_an_image_of_too_many_pixels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadRowError, match="decompression bomb"):
        load_image(PNG)


def test_an_image_that_the_processor_refuses(processor: QwenProcessor):
    row = {"messages": [ask(picture(600, 2)), answer("A line.")]}
    with pytest.raises(BadRowError, match=r"aspect ratio .*got \['600 x 2'\]") as raised:
        encode_images(row, processor)
    assert raised.value.reason == "refused by the processor"


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"messages": [ask(picture(), "<|image_pad|>"), answer("A")]}, "2 of it"),
        ({"messages": [ask("<|image_pad|>"), answer("A")]}, "1 of it"),
        ({"messages": [ask(picture()), answer("<|image_pad|>")]}, "2 of it"),
    ],
)
def test_an_image_token_in_the_text_is_refused(row: Any, found: str, processor: QwenProcessor):
    with pytest.raises(BadRowError, match=found) as raised:
        encode_images(row, processor)
    assert raised.value.reason == "images not rendered once"


def test_a_template_that_leaves_images_out_is_refused(processor: QwenProcessor):
    template = QWEN2_VL_TEMPLATE.replace("<|image_pad|>", "")
    with pytest.raises(BadRowError, match=r"once for each of 2 images .*got '0 of it'"):
        encode_images(two_images(), processor, chat_template=template)


def test_the_template_sees_no_bytes(processor: QwenProcessor):
    """One that knows text alone writes out what it is given."""
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with pytest.raises(BadRowError, match="got '0 of it'"):
        encode_images(two_images(), processor, chat_template=template)


@pytest.mark.parametrize(
    ("template", "text", "trained"),
    [
        (
            PARTS_TEMPLATE,
            "<|im_start|>User:{image}What?<|im_end|>\nAssistant: A cat.<|im_end|>\n"
            "User: And?<|im_end|>\nAssistant: A mat.<|im_end|>\n",
            [" A cat.<|im_end|>", " A mat.<|im_end|>"],
        ),
        (
            FILTER_TEMPLATE,
            "USER: {image}\nWhat? ASSISTANT: A cat. USER: And? ASSISTANT: A mat. ",
            [" A cat. ", " A mat. "],
        ),
    ],
    ids=["SmolVLM", "LLaVA"],
)
def test_templates_that_know_parts_alone(
    template: str, text: str, trained: list[str], processor: QwenProcessor
):
    """Text is not left out of them; a turn of text alone is given as its one part."""
    user = {"role": "user", "content": "And?"}
    messages = [ask(picture(), "What?"), answer("A cat."), user, answer("A mat.")]
    encoded = encode_images({"messages": messages}, processor, chat_template=template)
    decoded = processor.tokenizer.decode(encoded["token_ids"].tolist())
    assert decoded == text.format(image="<|image_pad|>" * 8)
    assert trained_text(encoded, processor) == trained
    # As transformers renders it where all content is lists.
    lists = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m["content"], str)
        else m
        for m in messages
    ]
    rendered = processor.apply_chat_template(lists, tokenize=False, chat_template=template)
    assert rendered == text.format(image="<|image_pad|>")


def test_the_tail_is_cut_after_the_last_image(processor: QwenProcessor):
    row = two_images()
    whole = encode_images(row, processor)
    assert len(whole["token_ids"]) == 138
    cut = encode_images(row, processor, max_length=133, too_long="truncate")
    assert cut["truncated"] is True
    assert trained_text(cut, processor) == ["A café.<|im_end|>", "Noi"]
    assert [len(cut[n]) for n in ("token_ids", "token_mask", "mm_token_type_ids")] == [133] * 3
    np.testing.assert_array_equal(cut["pixel_values"], whole["pixel_values"])


def test_no_image_is_cut(processor: QwenProcessor):
    """The second image ends at token 110."""
    for limit in (109, 106, 95):
        with pytest.raises(BadRowError, match=rf"at most {limit} tokens up to the end") as raised:
            encode_images(two_images(), processor, max_length=limit, too_long="truncate")
        assert raised.value.reason == "too long"
    cut = encode_images(two_images(), processor, max_length=110, too_long="truncate")
    assert trained_text(cut, processor) == ["A café.<|im_end|>"]


def test_what_is_too_long_counts_the_tokens_of_images(processor: QwenProcessor):
    with pytest.raises(BadRowError, match=r"at most 137 tokens, got 138"):
        encode_images(two_images(), processor, max_length=137)
    with pytest.raises(LeftOutError, match=r"at most 137 tokens, got 138"):
        encode_images(two_images(), processor, max_length=137, too_long="skip")
    assert len(encode_images(two_images(), processor, max_length=138)["token_ids"]) == 138


def test_settings_of_the_image_processor(processor: QwenProcessor):
    row = {"messages": [ask(picture(280, 280)), answer("A")]}
    size = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
    encoded = encode_images(row, processor, images_kwargs={"size": size})
    assert encoded["image_grid_thw"].tolist() == [[1, 6, 6]]
    assert np.count_nonzero(encoded["token_ids"] == IMAGE_PAD) == 9


def test_a_template_by_name(processor: QwenProcessor):
    named = make_processor()
    named.chat_template = {"default": "unused", "pictures": QWEN2_VL_TEMPLATE}
    encoded = encode_images(two_images(), named, chat_template="pictures")
    assert processor.tokenizer.decode(encoded["token_ids"].tolist()) == TWO_IMAGES


def test_what_is_no_processor_of_images(processor: QwenProcessor):
    with pytest.raises(ValueError, match="without tokenizer, image_processor, image_token"):
        encode_images(two_images(), processor.tokenizer)


def test_a_processor_that_does_not_say_where_images_are():
    class Silent(QwenProcessor):
        def __call__(self, *args: Any, text_kwargs: Any, **kwargs: Any) -> Any:
            del text_kwargs["return_text_replacement_offsets"]
            return super().__call__(*args, text_kwargs=text_kwargs, **kwargs)

    good = make_processor()
    silent = Silent(good.image_processor, good.tokenizer, None, chat_template=QWEN2_VL_TEMPLATE)
    with pytest.raises(ValueError, match=r"return_text_replacement_offsets.*got a Silent"):
        encode_images(two_images(), silent)


def test_a_processor_that_tokenises_otherwise():
    class Other(QwenProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            made = super().__call__(*args, **kwargs)
            made["input_ids"][0].insert(0, 1)
            return made

    good = make_processor()
    other = Other(good.image_processor, good.tokenizer, None, chat_template=QWEN2_VL_TEMPLATE)
    with pytest.raises(ValueError, match="got 139 tokens instead of 138"):
        encode_images(two_images(), other)


def test_text_beside_an_image_that_becomes_part_of_its_tokens():
    """Gemma 3 puts line ends around an image, which merge with those of the text."""
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<boi>", "<eoi>", "<soft>"]
    tokenizer = make_tokenizer(
        special,
        merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")],
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        extra_special_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"},
    )
    template = (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}<boi>"
        "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
    )
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        tokenizer,
        chat_template=template,
        image_seq_length=3,
    )
    shown = {**ask("So:\n", picture(), "\nok"), "role": "assistant"}
    row = {"messages": [ask(picture(), "What?"), shown]}
    encoded = encode_images(row, processor)
    image = "\n\n<boi><soft><soft><soft><eoi>\n\n"
    assert tokenizer.decode(encoded["token_ids"].tolist()) == (
        f"<bos><start_of_turn>user\n{image}What?<end_of_turn>\n"
        f"<start_of_turn>assistant\nSo:\n{image}\nok<end_of_turn>\n"
    )
    # The token of three line ends holds one of the text's and is trained; it begins there. That
    # of the image's two and the text's one begins in the image, and is not.
    assert trained_text(encoded, processor) == ["So:\n\n\n", "ok<end_of_turn>"]
    assert encoded["pixel_values"].shape == (2, 3, 28, 28)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ask(image_part(PNG)), answer("A")]}, True),
        ({"messages": [ask("text"), answer("A")]}, False),
        ({"messages": [{"role": "user", "content": "text"}]}, False),
        ({"messages": None}, False),
        ({"messages": ["?"]}, False),
        ({}, False),
    ],
)
def test_has_images(row: Any, expected: bool):
    assert has_images(row) is expected
