"""A digest of a model's files: what stored KV is tied to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

_PART = 1 << 24


def digest(path: str | os.PathLike[str], cache: Path | None = None) -> str:
    """Return BLAKE2b-256 over the names and bytes of a model's files, in hexadecimal digits.

    Args:
      path: a folder or a file.
      cache: a folder where digests are kept by path, size and time of change: 60 GB take a minute to read.

    Raises:
      OSError: a file cannot be read.
    """
    path = Path(path).resolve()
    files = sorted(_files(path))
    seen = [[str(file), stat.st_size, stat.st_mtime_ns] for file in files for stat in [file.stat()]]
    note = None
    if cache is not None:
        note = cache / f"{hashlib.blake2b(str(path).encode(), digest_size=16).hexdigest()}.json"
        try:
            known = json.loads(note.read_text())
            if known["files"] == seen:
                return str(known["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
    whole = hashlib.blake2b(digest_size=32)
    for file in files:
        one = hashlib.blake2b(file.relative_to(path).as_posix().encode() if file != path else b"", digest_size=32)
        with file.open("rb") as opened:
            while part := opened.read(_PART):
                one.update(part)
        whole.update(one.digest())
    if note is not None:
        _write(note, {"files": seen, "digest": whole.hexdigest()})
    return whole.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from (file for file in path.rglob("*") if file.is_file())


def _write(note: Path, value: object) -> None:
    """Keep a note if that can be done: without it the next start takes longer."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(value))
        draft.replace(note)
    except OSError:
        pass
