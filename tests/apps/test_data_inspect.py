"""`burnish data inspect`: what a person sees of files, good ones and bad ones."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from burnish_apps.data.terminal import bar, print_inspection
from burnish_apps.shell.cli import main
from burnish_data.inspect import Inspection, Piece, ShownRow, ShownText
from burnish_data.rows import Skipped
from PIL import Image
from processes import BURNISH, Run
from rich.console import Console
from transformers import AutoProcessor, AutoTokenizer

GOOD = [
    {
        "messages": [
            {"role": "user", "content": "Say something."},
            {"role": "assistant", "content": "Something é 😀"},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "Then."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "[bold]Say[/bold] :smile: \x1b[31mred\x1b]0;title\x07"},
            {"role": "assistant", "content": "<script>alert(1)</script>", "weight": 0.5},
        ]
    },
]
WRONG_ROLES = {"messages": [{"role": "assistant", "content": "Something"}]}
EMPTY = {"messages": [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "  "}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes records, or lines as they are, as JSON lines."""

    def made(records: list[Any], name: str = "chats.jsonl") -> Path:
        path = tmp_path / name
        lines = [line if isinstance(line, str) else json.dumps(line) for line in records]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return made


@pytest.fixture
def inspect(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: exit code, stdout, stderr."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(source: object, *options: object) -> tuple[int, str, str]:
        words = ["data", "inspect", source, "--tokenizer", tiny_model, *options]
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


def test_conversations_with_trained_text_in_brackets(write, inspect):
    code, said, _ = inspect(path := write(GOOD))
    assert code == 0
    assert (
        f"{path}, line 1: 50 tokens, 18 trained\n"
        "<|im_start|>user\n"
        "Say something.<|im_end|>\n"
        "<|im_start|>assistant\n"
        "⟦Something é 😀<|im_end|>⟧\n"
        "<|im_start|>user\n"
        "And then?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "⟦Then.<|im_end|>⟧\n"
    ) in said
    assert "⟦0.5: <script>alert(1)</script><|im_end|>⟧" in said
    assert "[bold]Say[/bold] :smile: \\x1b[31mred\\x1b]0;title\\x07<|im_end|>" in said
    assert "\x1b" not in said


def test_sums(write, inspect):
    _, said, _ = inspect(path := write([*GOOD, WRONG_ROLES]))
    lines = said.splitlines()
    start = lines.index(f"{path}:")
    assert lines[start + 1 : start + 3] == ["  rows read       3", "  sequences       2"]
    assert "  truncated       0" in lines
    assert "  rows skipped    1 of 3 (33.3%)" in lines


def test_colours_on_a_terminal(write, inspect, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    _, said, _ = inspect(write(GOOD))
    assert "\x1b[1;32mSomething é 😀<|im_end|>\x1b[0m" in said
    assert "\x1b[1;32mThen.<|im_end|>\x1b[0m" in said
    assert "\x1b[1;33m<script>alert(1)</script><|im_end|>\x1b[0m" in said
    assert "Say something.<|im_end|>" in said
    assert "⟦" not in said
    assert "\x1b[31mred" not in said  # what the file holds is never obeyed


def test_no_color_means_brackets(write, inspect, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    _, said, _ = inspect(write(GOOD))
    assert "⟦Then.<|im_end|>⟧" in said
    assert "\x1b[1;32m" not in said


def test_edges_of_tokens(write, inspect, tiny_model):
    """Between any two tokens stands one bar, or a bracket."""
    _, said, _ = inspect(write(GOOD[:1]), "--token-edges")
    (shown,) = re.findall(r"trained\n(.*)\n⟦trained⟧", said, re.DOTALL)
    tokens = re.split("[│⟦⟧]", shown)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = tokenizer.apply_chat_template(GOOD[0]["messages"], tokenize=False)
    assert "".join(tokens) == text
    # é is one character of 2 tokens and the emoji of 4; they are not shown apart.
    assert len(tokens) == len(tokenizer(text)["input_ids"]) - 1 - 3


def test_bad_rows_are_counted_with_their_places(write, inspect):
    path = write([GOOD[0], WRONG_ROLES, EMPTY, '{"messages": ', GOOD[1], WRONG_ROLES])
    code, said, _ = inspect(path)
    assert code == 0
    assert "  rows read       6\n" in said
    assert "  rows skipped    4 of 6 (66.7%)\n" in said
    assert said.endswith(
        "\nWARNING: 66.7% of the rows cannot be used and would not be trained on; look at the "
        "reasons.\n"
    )
    assert "    2 wrong order of roles, for example:\n" in said
    for line, column in ((2, "messages[0].role"), (6, "messages[0].role")):
        assert f"      {path}, line {line}, column '{column}': expected " in said
    assert f"{path}, line 3, column 'messages[1].content': expected text that is not empty" in said
    assert f"{path}, line 4, character 13: expected JSON" in said


def test_a_bad_row_can_be_an_error(write, inspect):
    path = write([GOOD[0], WRONG_ROLES])
    code, said, error = inspect(path, "--on-bad-row", "error")
    assert code == 1
    assert said == ""
    assert error.startswith(
        f"burnish data inspect: failed: {path}, line 2, column 'messages[0].role': expected"
    )


def test_no_good_row_at_all_is_a_failure(write, inspect):
    code, said, _ = inspect(write([WRONG_ROLES]))
    assert code == 1
    assert "rows skipped    1" in said


def test_what_is_too_long(write, inspect):
    path = write(GOOD[:1])
    _, said, _ = inspect(path, "--max-length", 45)
    assert "line 1: 45 tokens, " in said
    assert ", truncated\n" in said
    assert "  truncated       1 at 45 tokens\n" in said
    _, said, _ = inspect(write([GOOD[0], *FORMS[0][1:]]), "--max-length", 49, "--too-long", "skip")
    assert "too long, for example:" in said
    assert "expected at most 49 tokens, got 50" in said
    code, _, error = inspect(path, "--max-length", 45, "--too-long", "error", "--on-bad-row=error")
    assert code == 1
    assert "expected at most 45 tokens, got 50" in error


def test_the_last_turn_alone_and_all(write, inspect):
    _, said, _ = inspect(write(GOOD[:1]), "--train-on", "last")
    assert "⟦Then.<|im_end|>⟧" in said
    assert "⟦Something" not in said
    _, said, _ = inspect(write(GOOD[:1]), "--train-on", "all")
    assert "<|im_start|>⟦user\nSay something.<|im_end|>\n" in said


def test_first_rows_and_how_many_are_shown(write, inspect):
    _, said, _ = inspect(write([GOOD[0]] * 5), "--rows", 2, "--show", 1)
    assert "rows read       2" in said
    assert said.count("Something é") == 1
    _, said, _ = inspect(write([GOOD[0]] * 5), "--show", 0)
    assert "Something" not in said
    assert "sequences       5" in said


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("openai", {"messages": GOOD[0]["messages"][:2]}),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "Say something."},
                {"from": "gpt", "value": "Something é 😀"},
            ]
        },
    ),
    ("alpaca", {"instruction": "Say something.", "input": "", "output": "Something é 😀"}),
    ("prompt_response", {"prompt": "Say something.", "response": "Something é 😀"}),
]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("name", "record"), FORMS)
def test_every_form_shows_the_same(write, inspect, name, record, named):
    code, said, error = inspect(write([record]), *(["--format", name] if named else []))
    assert code == 0, error
    assert (
        "<|im_start|>user\nSay something.<|im_end|>\n"
        "<|im_start|>assistant\n⟦Something é 😀<|im_end|>⟧\n"
    ) in said


def test_columns_of_other_names(write, inspect):
    path = write([{"q": "Say.", "a": "Something"}])
    code, said, _ = inspect(path, "--columns", "q", "a")
    assert code == 0
    assert "⟦Something<|im_end|>⟧" in said
    code, _, error = inspect(path, "--columns", "q", "a", "--format", "alpaca")
    assert code == 2
    assert "--columns: belongs to --format prompt_response, got --format alpaca" in error
    code, _, error = inspect(path)
    assert code == 2
    assert error.startswith("burnish data inspect: this cannot run:\n- --format: The columns must")


def test_preferences_with_columns_of_other_names(write, inspect):
    path = write([{"q": "Say.", "good": "Something", "bad": "Nothing"}])
    code, said, _ = inspect(path, "--columns", "q", "good", "bad")
    assert code == 0
    assert said.startswith("form: preference_columns('q', 'good', 'bad'), of the columns bad, good")
    assert re.search(r"line 1: chosen, .*⟦Something<\|im_end\|>⟧", said, re.DOTALL)
    assert re.search(r"line 1: rejected, .*⟦Nothing<\|im_end\|>⟧", said, re.DOTALL)
    code, _, error = inspect(path, "--columns", "q", "good", "bad", "--format", "prompt_response")
    assert code == 2
    assert "--columns: belongs to --format preference, got --format prompt_response" in error
    code, _, error = inspect(path, "--columns", "q")
    assert code == 2
    assert "--columns: must be two names (prompt, response) or three" in error


def test_few_skipped_rows_are_no_alarm(write, inspect):
    _, said, _ = inspect(write([*GOOD * 5, WRONG_ROLES]))
    assert "  rows skipped    1 of 11 (9.1%)\n" in said
    assert "WARNING" not in said
    _, said, _ = inspect(write(GOOD))
    assert "  rows skipped    0\n" in said


@pytest.mark.parametrize("source", ["gsm8k", "my_module:mine", "package.module:rows"])
def test_sources_of_python_are_no_files(inspect, source):
    code, _, error = inspect(source)
    assert code == 2
    assert error == (
        "burnish data inspect: this cannot run:\n- source: must be a file, a folder or a data "
        f"set's id on the hub, got {source!r}, which is Python's; write its rows as JSON lines and "
        "name that file\n"
    )


def test_the_only_other_split_is_named(write, inspect, tmp_path):
    write(GOOD, "test.jsonl")
    code, _, error = inspect(tmp_path)
    assert code == 2
    assert f"--split: must be one that {tmp_path} has, got 'train'; pass --split test\n" in error
    code, _, _ = inspect(tmp_path, "--split", "test")
    assert code == 0
    write(GOOD, "dev.jsonl")
    code, _, error = inspect(tmp_path)
    assert code == 2
    assert "name a split that is there, or name the file itself" in error


def test_options_are_written_out_and_unknown_ones_show_the_commands_usage(write, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", "inspect", str(write(GOOD)), "--tokenizer", "t", "--max-len", "8"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: burnish data inspect ")
    assert error.endswith("burnish data inspect: error: unrecognized arguments: --max-len 8\n")


def test_choices_are_not_guessed_as_answers(write, inspect):
    path = write([{"question": "1 + 1?", "choices": ["1", "2"], "answer": 1}])
    code, _, error = inspect(path)
    assert code == 2
    assert (
        "--format: The columns must say the answer's text, got ['answer', 'choices', 'question'], "
        "in which it is one of choices; read multiple choice by sources.mmlu"
    ) in error


def test_preferences_rankings_and_labels(write, inspect):
    pair = {"prompt": "Say.", "chosen": "Something", "rejected": "Nothing"}
    _, said, _ = inspect(write([pair]))
    assert re.search(r"line 1: chosen, .*⟦Something<\|im_end\|>⟧", said, re.DOTALL)
    assert re.search(r"line 1: rejected, .*⟦Nothing<\|im_end\|>⟧", said, re.DOTALL)
    assert "  rows read       1\n  sequences       2\n" in said
    ranked = {"prompt": "Say.", "completions": ["Some", "None"], "scores": [2, 1]}
    _, said, _ = inspect(write([ranked]))
    assert re.search(r"completions 2, .*⟦None<\|im_end\|>⟧", said, re.DOTALL)
    labelled = {"prompt": "Say.", "completion": "Something", "label": True}
    _, said, _ = inspect(write([labelled]))
    assert re.search(r"line 1: completion, .*⟦Something<\|im_end\|>⟧", said, re.DOTALL)


def test_another_template_and_its_variables(write, inspect, tmp_path):
    template = tmp_path / "short.jinja"
    template.write_text(
        "{{ greeting }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    options = ["--chat-template", template, "--chat-template-kwargs", '{"greeting": "Hi! "}']
    code, said, _ = inspect(write(GOOD[:1]), *options)
    assert code == 0
    assert "Hi! [user]Say something.<|im_end|>[assistant]⟦Something é 😀<|im_end|>⟧[user]" in said


def test_the_page(write, inspect, tmp_path):
    page = tmp_path / "<script>alert(2)<" / "script>.html"
    page.parent.mkdir()
    name = "<script>alert(3)<script>.jsonl"
    code, said, _ = inspect(write([*GOOD, WRONG_ROLES], name), "--html", page)
    assert code == 0
    assert f"page: {page}\n" in said
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in re.sub("</?i>", "", text)
    assert "&lt;script&gt;alert(3)&lt;script&gt;.jsonl, line 3, column" in text
    assert "<title>" in text
    assert '<p class="note">form: openai_chat, of the columns messages</p>' in text
    assert '<p class="warning">WARNING: 33.3% of the rows cannot be used' in text
    assert '<th>rows skipped</th><td class="number">1 of 3 (33.3%)</td>' in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "page.txt"], "--html: must end in .html, got 'page.txt'; rename it"),
        (["--html", "nowhere/page.html"], "--html: must be a file in a folder that can be written"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs: "),
        (["--chat-template-kwargs", "[1]"], "must be a JSON object, got '[1]'"),
        (["--chat-template", "nowhere.jinja"], "- --chat-template: A chat template's file must"),
        (["--chat-template", "{% for %}"], "- --chat-template: A chat template must be Jinja"),
        (["--max-length", "1"], "- --max-length: max_length must be at least 2 tokens"),
    ],
)
def test_options_that_cannot_be_used(write, inspect, options, message):
    code, said, error = inspect(write(GOOD), *options)
    assert code == 2, error
    assert said == ""
    assert error.startswith("burnish data inspect: this cannot run:\n- ")
    assert message in error
    assert "Traceback" not in error


def test_the_page_is_not_the_data(write, inspect):
    path = write(GOOD, "chats.html")
    before = path.read_text()
    code, _, error = inspect(path, "--html", path)
    assert code == 2
    assert "--html: must be another file than the data" in error
    assert path.read_text() == before


@pytest.mark.parametrize("name", ["nowhere.jsonl", "."])
def test_a_source_that_is_no_data(inspect, tmp_path, name):
    code, _, error = inspect(tmp_path / name)
    assert code == 2
    assert error.startswith("burnish data inspect: this cannot run:\n- source: ")


def test_a_tokenizer_that_is_none(write, tmp_path, capsys):
    path = write(GOOD)
    code = main(["data", "inspect", str(path), "--tokenizer", str(tmp_path)])
    assert code == 2
    assert "this cannot run:\n- --tokenizer: " in capsys.readouterr().err
    assert main(["data", "inspect", str(path), "--tokenizer", str(tmp_path / "nowhere")]) == 2
    assert (
        f"- --tokenizer: must be a folder that is there, got '{tmp_path / 'nowhere'}'\n"
    ) in capsys.readouterr().err
    assert main(["data", "inspect", str(path), "--tokenizer", str(path)]) == 2
    assert (
        f"- --tokenizer: must be a folder, got the file '{path}'; name the folder it is in\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--rows", "0"], ["--show", "-1"], ["--max-length", "x"]])
def test_numbers_that_cannot_be(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", "inspect", "a.jsonl", "--tokenizer", "t", *words])
    assert ended.value.code == 2
    assert "must be a whole number of" in capsys.readouterr().err


def test_images_need_a_processor(write, inspect):
    content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]
    row = {"messages": [{"role": "user", "content": content}, GOOD[0]["messages"][1]]}
    code, _, error = inspect(write([row]))
    assert code == 2
    assert "The processor must be one for images and text" in error


def test_images(write, inspect, tmp_path, monkeypatch):
    """Qwen2-VL's own processor; to be read from a folder it would need torchvision."""
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (56, 112, 3), np.uint8)).save(tmp_path / "cat.png")
    content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What?"}]
    row = {"messages": [{"role": "user", "content": content}, GOOD[0]["messages"][3]]}
    monkeypatch.setattr(AutoProcessor, "from_pretrained", read_processor)
    options = ["--image-folder", tmp_path, "--train-on", "all"]
    code, said, error = inspect(write([row, GOOD[0]]), *options)
    assert code == 0, error
    assert "⟦user\n⟧<|pad|> \u00d7 8⟦What?<|im_end|>\n" in said
    assert "  sequences       2\n" in said


def read_processor(folder: str) -> Any:
    """The processor of Qwen2-VL with the tiny model's tokenizer, without videos."""
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideos(Qwen2VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.image_token, tokenizer.image_token_id = "<|pad|>", 3
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<|pad|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return WithoutVideos(Qwen2VLImageProcessorPil(), tokenizer, None, chat_template=template)


def test_an_ascii_terminal(write, tiny_model, tmp_path):
    run = subprocess.run(
        [BURNISH, "data", "inspect", write(GOOD), "--tokenizer", tiny_model],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        timeout=120,
        check=True,
    )
    said = run.stdout.decode("ascii")
    assert "[[Something \\xe9 \\U0001f600<|im_end|>]]" in said
    assert "####" in said


def test_a_reader_that_has_seen_enough(write, tiny_model):
    path = write(GOOD * 300)
    command = f"{BURNISH} data inspect {path} --tokenizer {tiny_model} --show 600"
    run = subprocess.run(
        ["bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.splitlines() == ["form: openai_chat, of the columns messages", "141"]
    assert run.stderr == ""


def test_ctrl_c(write, tiny_model, tmp_path):
    slow = tmp_path / "slow.jinja"
    loop = "{% for i in range(100000) %}{% endfor %}"
    slow.write_text(loop * 20 + "{% for m in messages %}{{ m.content }}{% endfor %}")
    options = ["--tokenizer", tiny_model, "--chat-template", slow]
    run = Run([BURNISH, "data", "inspect", write(GOOD * 2000), *options], tmp_path)
    try:
        reading = tmp_path / "chats.jsonl"
        run.wait_until(lambda: is_busy(run, 6.0), 120)
        assert reading.exists()
        run.interrupt()
        assert run.wait(30) == 130
        assert run.left_behind(5) == []
    finally:
        run.kill()
    assert run.stderr.strip().endswith("burnish: ended by SIGINT")


def is_busy(run: Run, seconds: float) -> bool:
    """Whether it has computed so long, which is more than starting takes."""
    import psutil

    times = psutil.Process(run.process.pid).cpu_times()
    return bool(times.user + times.system > seconds)


def test_many_equal_tokens_and_names_are_short_and_harmless():
    pieces = (*[Piece("<image>", 1, 0)] * 256, Piece("a", 1, 1), *[Piece("!", 1, 1)] * 5)
    row = ShownRow("a\x1b[31m.jsonl, line 1", (ShownText("cho\x07sen", pieces, 262, 6, False),))
    lengths = np.array([262])
    console = Console(width=20, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    skipped = Skipped()
    print_inspection(Inspection("a\x1b", 1, (row,), lengths, lengths, 0, skipped), console)
    console.file.close()
    said = console.export_text()
    assert "a\\x1b[31m.jsonl, line 1: cho\\x07sen, 262 tokens, 6 trained\n" in said
    assert "<image> \u00d7 256⟦a! \u00d7 5⟧\n" in said
    assert "a\\x1b:\n" in said


@pytest.mark.parametrize(
    ("count", "most", "length"), [(0, 10, 0), (1, 1000, 1), (500, 1000, 20), (7, 7, 40)]
)
def test_bars(count: int, most: int, length: int):
    assert bar(count, most) == length


def test_the_command_line_starts_fast():
    """Its arguments are known without what takes seconds to import."""
    code = "import sys, burnish_apps.shell.cli as c; c._parser(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
