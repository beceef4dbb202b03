"""The file of a stored piece of KV: safetensors, layer-major, with everything needed to distrust it.

Arrays lead with L, so a layer of an array is one contiguous read. The header's metadata (strings, as safetensors has
it) holds, in this order: ``check``, the CRC32 of the header itself with eight zeros in the place of the check;
``format``; ``space``, ``root`` and ``parent`` of the key; ``tokens``, base64 of little-endian int32; and ``crc32``,
eight hexadecimal digits a layer, of the layer's bytes of all arrays in the order of the file.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import itertools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv.store.key import Key

FORMAT = "jaxkv store 1"
ALIGNMENT = 64
MOST_HEADER_BYTES = 1 << 24
DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_START = b'{"__metadata__":{"check":"'
_NO_CHECK = b"00000000"


class DamagedError(Exception):
    """A file is not what this library wrote under its name."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Names, safetensors dtypes and shapes of arrays that lie one after the other, each leading with L."""

    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> Layout:
        """Return the layout of arrays.

        Raises:
          ValueError: there is none, they differ in L, or a dtype cannot be stored.
        """
        if not arrays:
            raise ValueError("there is no array to store; give k and v")
        for name, array in arrays.items():
            if array.dtype not in _NAMES:
                known = ", ".join(str(dtype) for dtype in _NAMES)
                raise ValueError(f"array {name!r} has dtype {array.dtype}; {known} can be stored")
            if not name or name == "__metadata__" or array.ndim < 1 or not array.size:
                raise ValueError(f"array {name!r} of shape {array.shape} cannot be stored; give [L, ...] with a name")
        layers = {name: array.shape[0] for name, array in arrays.items()}
        if len(set(layers.values())) > 1:
            raise ValueError(f"arrays differ in layers, their first dimension: {layers}")
        return cls(tuple((name, _NAMES[array.dtype], array.shape) for name, array in arrays.items()))

    @property
    def layers(self) -> int:
        """L."""
        return self.arrays[0][2][0]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each array begins, in bytes, and where the last one ends."""
        sizes = (math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self.arrays)
        return (0, *itertools.accumulate(sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.offsets[-1]

    def layer(self, layer: int) -> list[tuple[int, int]]:
        """Return begin and end of one layer's bytes in each array."""
        spans = []
        for start, stop in itertools.pairwise(self.offsets):
            size = (stop - start) // self.layers
            spans.append((start + layer * size, start + (layer + 1) * size))
        return spans

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays that lie in a buffer of bytes, without a copy."""
        return {
            name: buffer[start:stop].view(DTYPES[dtype]).reshape(shape)
            for (name, dtype, shape), (start, stop) in zip(self.arrays, itertools.pairwise(self.offsets), strict=True)
        }


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says about itself. ``start`` is where its data begins, ``crcs`` one CRC32 a layer."""

    key: Key
    layout: Layout
    crcs: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.start + self.layout.nbytes


def layer_crc(buffer: memoryview, spans: Sequence[tuple[int, int]]) -> int:
    """Return the CRC32 of one layer's bytes."""
    crc = 0
    for start, stop in spans:
        crc = zlib.crc32(buffer[start:stop], crc)
    return crc


def encode(key: Key, layout: Layout, crcs: Sequence[int]) -> bytes:
    """Return the bytes that come before the data."""
    header: dict[str, Any] = {
        "__metadata__": {
            "check": _NO_CHECK.decode(),
            "format": FORMAT,
            "space": key.space,
            "root": key.root.hex(),
            "parent": key.parent.hex(),
            "tokens": base64.b64encode(key.ids).decode(),
            "crc32": "".join(f"{crc:08x}" for crc in crcs),
        }
    }
    for (name, dtype, shape), span in zip(layout.arrays, itertools.pairwise(layout.offsets), strict=True):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + _with_check(text, b"%08x" % zlib.crc32(text))


def header_bytes(begin: bytes, file_size: int) -> int:
    """Return how many bytes come before the data; ``begin`` is the first 8 bytes of the file.

    Raises:
      DamagedError: there cannot be so many.
    """
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or not len(_START) < length <= min(MOST_HEADER_BYTES, file_size - 8):
        raise DamagedError(f"a header of {length} bytes in a file of {file_size}")
    return 8 + length


def decode(begin: bytes, file_size: int) -> Header:
    """Return the header of a file, every part of it checked.

    Args:
      begin: the first ``header_bytes`` bytes of the file.
      file_size: bytes of the file.

    Raises:
      DamagedError: it is torn, changed, or not of this format.
    """
    text = begin[8:]
    at = len(_START)
    check = text[at : at + 8]
    if not text.startswith(_START) or check != b"%08x" % zlib.crc32(_with_check(text, _NO_CHECK)):
        raise DamagedError("the header is not of this format, or was changed")
    try:
        header = _decoded(json.loads(text), len(begin))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise DamagedError(f"the header cannot be read: {error}") from error
    if header.size != file_size:
        raise DamagedError(f"{file_size} bytes where the header says {header.size}")
    return header


def _decoded(header: dict[str, Any], start: int) -> Header:
    facts = header.pop("__metadata__")
    if facts["format"] != FORMAT:
        raise ValueError(f"format {facts['format']!r}; this version reads {FORMAT!r}")
    ids = base64.b64decode(facts["tokens"], validate=True)
    key = Key(facts["space"], bytes.fromhex(facts["root"]), bytes.fromhex(facts["parent"]), ids)
    arrays = tuple((name, array["dtype"], tuple(array["shape"])) for name, array in header.items())
    # A header with a right check may still come from another program: nothing in it is taken on trust.
    for _, dtype, shape in arrays:
        if dtype not in DTYPES or not shape or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"an array of dtype {dtype} and shape {shape}")
    layout = Layout(arrays)
    spans = [tuple(array["data_offsets"]) for array in header.values()]
    if not arrays or {shape[0] for _, _, shape in arrays} != {layout.layers}:
        raise ValueError("arrays differ in layers, or there is none")
    if spans != list(itertools.pairwise(layout.offsets)):
        raise ValueError("the arrays do not lie one after the other")
    digits = facts["crc32"]
    if len(digits) != 8 * layout.layers:
        raise ValueError(f"{len(digits)} digits of CRC32 for {layout.layers} layers")
    crcs = tuple(int(digits[8 * layer : 8 * layer + 8], 16) for layer in range(layout.layers))
    return Header(key, layout, crcs, start)


def _with_check(text: bytes, check: bytes) -> bytes:
    at = len(_START)
    return text[:at] + check + text[at + len(check) :]
