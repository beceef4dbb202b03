"""The Python of the README and of the engine's page runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = [
    block
    for page in ("README.md", "docs/engine.md")
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize("source", BLOCKS, ids=["llm", "documents", "trace", "engine"])
def test_python_runs(
    source: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    out, _ = capsys.readouterr()
    # Something was said, and it is text and not a dump of arrays.
    assert len(out.split()) > 20
    if "decode_trace" in source:
        assert names["out"].count.max() <= 400  # type: ignore[attr-defined]
        assert names["rows"].length.max() <= 256 + 128  # type: ignore[attr-defined]
