"""Sources with images, in Parquet files as the hub has them. The images are made here."""

import io
import json

import pytest
from burnish_data import BadRowError, check_rows, validate_messages
from burnish_data.sources import clevr, geometry3k, refcoco, with_answer
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pillow


def png(colour, size=(8, 6)):
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def write(folder, records, features):
    folder.mkdir()
    dataset = Dataset.from_list(records, features=Features(features))
    dataset.to_parquet(folder / "train-00000-of-00001.parquet")
    return folder


@pytest.fixture
def clevr_folder(tmp_path):
    records = [
        {
            "image": {"bytes": RED, "path": "1.png"},
            "problem": "How many cubes are there?",
            "solution": "<answer> 3 </answer>",
        },
        {
            "image": {"bytes": BLUE, "path": None},
            "problem": " Is there a ball? ",
            "solution": "yes",
        },
        {
            "image": {"bytes": BLUE, "path": None},
            "problem": "And now?",
            "solution": "<answer> </answer>",
        },
    ]
    features = {"image": Image(), "problem": Value("string"), "solution": Value("string")}
    return write(tmp_path / "clevr", records, features)


@pytest.fixture
def geometry_folder(tmp_path):
    records = [
        {"images": [{"bytes": RED, "path": None}], "problem": "<image>Find x.", "answer": "3"},
        {
            "images": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}],
            "problem": "Compare <image> with <image>.",
            "answer": "2 \\sqrt { 5 }",
        },
        {"images": [{"bytes": BLUE, "path": None}], "problem": "Find y.", "answer": "45"},
        {"images": [{"bytes": BLUE, "path": None}], "problem": "<image><image>?", "answer": "4"},
    ]
    features = {"images": List(Image()), "problem": Value("string"), "answer": Value("string")}
    return write(tmp_path / "geometry", records, features)


def test_clevr(clevr_folder):
    rows = clevr(clevr_folder, system=None)
    assert rows[0]["prompt"] == [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": RED},
                {"type": "text", "text": "How many cubes are there?"},
            ],
        }
    ]
    assert (rows[0]["answer"], rows[1]["answer"]) == ("3", "yes")
    with pytest.raises(BadRowError, match=r"parquet, row 3, column 'solution': expected an answer"):
        rows[2]
    assert validate_messages(rows[0]["prompt"]) == rows[0]["prompt"]
    assert with_answer(rows[0])["messages"][-1] == {"role": "assistant", "content": "3"}


def test_geometry3k_puts_images_in_their_places(geometry_folder):
    rows = geometry3k(geometry_folder)
    assert rows[0]["prompt"][1]["content"] == [
        {"type": "image", "image": RED},
        {"type": "text", "text": "Find x."},
    ]
    assert rows[1]["prompt"][1]["content"] == [
        {"type": "text", "text": "Compare"},
        {"type": "image", "image": RED},
        {"type": "text", "text": "with"},
        {"type": "image", "image": BLUE},
        {"type": "text", "text": "."},
    ]
    assert rows[2]["prompt"][1]["content"] == [  # without a place it stands first
        {"type": "image", "image": BLUE},
        {"type": "text", "text": "Find y."},
    ]
    assert rows[1]["answer"] == "2 \\sqrt { 5 }"
    with pytest.raises(BadRowError, match=r"row 4, column 'problem': expected 1 times <image>"):
        rows[3]


def test_the_same_question_about_another_image_is_another_problem():
    from burnish_data.sources._records import image_part, problem

    def made(image):
        parts = [image_part(image, "image"), {"type": "text", "text": "How many cubes?"}]
        return problem("clevr", parts, "3", system=None)["id"]

    picture = Pillow.new("L", (2, 2))
    assert made(RED) == made(png("red"))
    assert len({made(image) for image in (RED, BLUE, "a.png", "b.png", picture)}) == 5


def test_images_are_streamed_too(clevr_folder, geometry_folder):
    for source, folder in ((clevr, clevr_folder), (geometry3k, geometry_folder)):
        good, _ = check_rows(source(folder), on_bad_row="skip")
        assert list(source(folder, streaming=True).handle_bad_rows("skip")) == list(good)


@pytest.mark.parametrize(
    "image",
    ["a.png", RED, {"path": "a.png"}, {"bytes": RED, "path": "a.png"}, Pillow.new("L", (2, 2))],
)
def test_an_image_is_a_path_bytes_or_pil(image):
    from burnish_data.sources._records import image_part

    expected = RED if isinstance(image, dict) and "bytes" in image else image
    expected = "a.png" if isinstance(image, dict) and "bytes" not in image else expected
    assert image_part(image, "image") == {"type": "image", "image": expected}


@pytest.mark.parametrize("image", ["", b"", {}, 3, {"bytes": b"", "path": ""}])
def test_what_is_no_image(image):
    from burnish_data.sources._records import image_part

    with pytest.raises(BadRowError, match="column 'image': expected an image: a path, bytes, or"):
        image_part(image, "image")


# RefCOCO

PHRASES = ["cat", "the black cat on the left", "left cat"]


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "coco"
    (folder / "train2014").mkdir(parents=True)
    (folder / "train2014" / "COCO_train2014_000000000001.jpg").write_bytes(png("black", (640, 480)))
    return folder


def annotation(**changes):
    return {
        "ref_id": 7,
        "image_path": "coco/train2014/COCO_train2014_000000000001.jpg",
        "bbox": [64.0, 48.0, 320.0, 479.9],
        "captions": PHRASES,
        "raw_image_info": json.dumps({"height": 480, "width": 640, "id": 1}),
        **changes,
    }


def write_annotations(tmp_path, *records):
    path = tmp_path / "refcoco.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_refcoco_answers_with_a_box_in_thousandths(tmp_path, photographs):
    path = write_annotations(tmp_path, annotation())
    row = refcoco(path, images=photographs)[0]
    image, text = row["prompt"][0]["content"]
    assert image["image"] == str(photographs / "train2014" / "COCO_train2014_000000000001.jpg")
    assert text["text"] == (
        "Give the bounding box of what this phrase describes as [x1, y1, x2, y2], with "
        "coordinates from 0 to 1000: the black cat on the left"
    )
    assert (row["answer"], row["id"]) == ("[100, 100, 500, 1000]", "refcoco/7")


@pytest.mark.parametrize(
    ("caption", "phrase"), [("first", "cat"), ("longest", PHRASES[1]), ("shortest", "cat")]
)
def test_refcoco_phrases(tmp_path, photographs, caption, phrase):
    path = write_annotations(tmp_path, annotation())
    (row,) = refcoco(path, images=photographs, caption=caption, streaming=True)
    assert row["prompt"][0]["content"][1]["text"].endswith(f"1000: {phrase}")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"bbox": [64, 48, 32, 480]}, r"column 'bbox': expected \[x1, y1, x2, y2\] within 640 by"),
        ({"bbox": [500, 48, 642, 400]}, r"column 'bbox': expected .* within 640 by 480 pixels"),
        ({"bbox": [1, 2, 3]}, r"column 'bbox': expected four numbers, got \[1, 2, 3\]"),
        ({"captions": []}, r"column 'captions': expected a list of texts, none of them empty"),
        ({"raw_image_info": "{"}, r"column 'raw_image_info': expected JSON \(Expecting"),
        ({"raw_image_info": {"width": 0}}, r"column 'raw_image_info': .*with width and height"),
        (
            {"image_path": "coco/train2014/2.jpg"},
            r"column 'image_path': expected an image in .*coco",
        ),
    ],
)
def test_refcoco_bad_rows(tmp_path, photographs, changes, error):
    path = write_annotations(tmp_path, annotation(), annotation(**changes))
    rows = refcoco(path, images=photographs)
    with pytest.raises(BadRowError, match=rf"refcoco\.jsonl, line 2, {error}"):
        rows[1]


def test_refcoco_arguments(tmp_path, photographs):
    path = write_annotations(tmp_path, annotation())
    with pytest.raises(ValueError, match="images must be the folder that holds COCO's train2014"):
        refcoco(path, images=tmp_path / "none")
    with pytest.raises(ValueError, match='caption must be "first", "longest" or "shortest", got'):
        refcoco(path, images=photographs, caption="best")
