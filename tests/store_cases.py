"""Pieces of KV that every test and every process of a test makes alike, and a look at a store's folder without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.store import Key
from jaxkv.store.lock import FolderLock

ROOT = bytes(range(32))
SHAPE = (3, 8, 2, 4)
"""L, T, K, D."""
TOKENS = SHAPE[1]
NBYTES = 2 * 4 * int(np.prod(SHAPE))
FILE_BYTES = 2048
"""Of one piece, header included."""


def piece(number: int, root: bytes = ROOT) -> tuple[Key, dict[str, np.ndarray]]:
    """Return key and arrays number so and so."""
    rng = np.random.default_rng(number)
    arrays = rng.standard_normal((2, *SHAPE), np.float32)
    return Key.content(root, [number, *rng.integers(0, 1000, TOKENS - 1)]), {"k": arrays[0], "v": arrays[1]}


def key(number: int) -> Key:
    """Return key number so and so."""
    return piece(number)[0]


def same(found: Any, number: int) -> bool:
    """Whether arrays are those of a piece, bit for bit."""
    arrays = piece(number)[1]
    return (
        found is not None and list(found) == list(arrays) and all(np.array_equal(found[n], arrays[n]) for n in arrays)
    )


def path(folder: Path, number: int) -> Path:
    """Return where the file of a piece is."""
    name = key(number).name
    return folder / name[:2] / f"{name}.safetensors"


def files(folder: Path) -> list[Path]:
    """Return all files of pieces."""
    return [file for file in folder.glob("??/*.safetensors") if file.is_file() and not file.is_symlink()]


def bytes_now(folder: Path) -> int:
    """Return the bytes of all files and all parts, at one moment."""
    root = os.open(folder, os.O_RDONLY)
    lock = FolderLock(root, writable=True)
    try:
        with lock.hold():
            return sum(file.lstat().st_size for file in [*folder.glob("??/*"), *folder.glob("parts/*")])
    finally:
        lock.close()
        os.close(root)


def loads(text: str) -> dict[str, Any]:
    """Return what a process of ``store_program`` printed."""
    return json.loads(text)
