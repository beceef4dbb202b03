"""The header of a GGUF file: its metadata and the list of its tensors, without touching their data.

``gguf.GGUFReader`` makes NumPy views of every string of every array, which takes longer for a vocabulary of
49,152 tokens than the rest of a cold start. This reads the same header with ``struct``, and bounds-checks each
read, since a file may be torn or hostile. Layout: ggml's ``docs/gguf.md``, versions 2 and 3.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor's entry in the header.

    Attributes:
      name: the tensor's name.
      shape: slowest dimension first, as NumPy has it; the file stores the reverse.
      ggml_type: number of the ggml type, see ``gguf.GGMLQuantizationType``.
      offset: bytes from the start of the file to the data.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """A file's metadata by key, and its tensors in the file's order."""

    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a GGUF file: numbers, bools, strings, and lists of them, by key.

    Raises ``ValueError`` as ``read_header`` does.
    """
    return read_header(path).metadata


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Return the metadata and the tensors' entries of a GGUF file.

    Whether the data that an entry points at lies within the file is left to whoever knows the size of its type.

    Raises:
      ValueError: the file is no GGUF, is truncated, contradicts itself, or has a version other than 2 and 3.
      OSError: the file cannot be opened.
    """
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24 or file.read(4) != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not begin with {_MAGIC!r} and a header of 24 bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).header()


class _Cursor:
    """A position in the mapped file that never moves past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._size = data, path, len(data)
        self._at, self._what = len(_MAGIC), "header"

    def header(self) -> GGUFHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "it is big-endian" if swapped in _VERSIONS else f"it has version {version}"
            raise ValueError(
                f"{self._path}: {why}; only little-endian GGUF of version 2 or 3 can be read: convert it anew"
            )
        tensor_count, key_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for index in range(key_count):
            self._what = f"key {index + 1} of {key_count}"
            key = self._string()
            self._what = f"value of {key!r}"
            if key in metadata:
                raise ValueError(f"{self._path} has the key {key!r} twice; the file is damaged")
            metadata[key] = self._value(self._number("I"))
        entries = []
        for index in range(tensor_count):
            self._what = f"tensor {index + 1} of {tensor_count}"
            entries.append(self._entry())
        start = self._data_start(metadata.get("general.alignment", 32))
        return GGUFHeader(metadata, tuple(dataclasses.replace(e, offset=start + e.offset) for e in entries))

    def _entry(self) -> TensorEntry:
        name, rank = self._string(), self._number("I")
        if rank > _MAX_DIMENSIONS:
            raise ValueError(f"{self._path}: tensor {name!r} has {rank} dimensions; the file is damaged")
        shape = self._numbers("Q", rank)[::-1]
        return TensorEntry(name, tuple(shape), self._number("I"), self._number("Q"))

    def _data_start(self, alignment: Any) -> int:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"{self._path}: general.alignment={alignment!r} is not a power of two; the file is damaged"
            )
        return -(-self._at // alignment) * alignment

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth == _MAX_NESTING:
            raise ValueError(f"{self._path}: {self._what} has type {kind} at depth {depth}; the file is damaged")
        element, count = self._number("I"), self._number("Q")
        if element in _SCALARS:
            return self._numbers(_SCALARS[element], count)
        if element == _STRING:
            return [self._string() for _ in range(count)]
        return [self._value(element, depth + 1) for _ in range(count)]

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        width = struct.calcsize(f"<{code}") * count
        self._need(width)
        numbers = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += width
        return list(numbers)

    def _string(self) -> str:
        self._need(8)
        (length,) = _LENGTH.unpack_from(self._data, self._at)
        self._at += 8
        self._need(length)
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._path}: {self._what} is not UTF-8 ({error}); the file is damaged") from None

    def _need(self, width: int) -> None:
        if width > self._size - self._at:
            raise ValueError(
                f"{self._path} is truncated or damaged: {self._what} needs {width} bytes at offset {self._at}, "
                f"and the file ends at {self._size}; fetch it again"
            )
