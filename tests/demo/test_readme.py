"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("source", BLOCKS, ids=["llm", "trace"])
def test_python_runs(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    out, _ = capsys.readouterr()
    # Something was said, and it is text and not a dump of arrays.
    assert len(out.split()) > 20
    if "decode_trace" in source:
        assert names["out"].count.max() <= 400  # type: ignore[attr-defined]
        assert names["rows"].length.max() <= 256 + 128  # type: ignore[attr-defined]
