"""How each kernel is cut into tiles, and what the kernels of this folder cannot serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels import device as devices
from pallas_kernels.device import Device

AMPERE = (8, 0)
PAGE_DTYPES = ("bfloat16", "float16", "float32")
MOST_GROUPS = 16
MOST_DIM = 256


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut. Tiles have powers of two of elements: Triton knows no others.

    Attributes:
      slots: token slots that a program takes at a time.
      rows: query vectors that a program holds (chunk), padded to a tensor core's 16 (decode).
      columns: dimensions of a head that a program moves (compact).
      splits: programs that share the keys of one (row, KV head) (decode).
      warps: warps of 32 threads a program.
      stages: tiles in flight, the one at work included.
    """

    slots: int
    rows: int = 16
    columns: int = 64
    splits: int = 1
    warps: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        for field in ("slots", "rows", "columns", "warps"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{field}={value} must be a power of two")
        for field in ("splits", "stages"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")


_PROGRAMS: dict[str, int] = {"NVIDIA A100": 3, "NVIDIA H100": 4, "NVIDIA H200": 4}
"""Programs a multiprocessor that decoding aims at: as many as its shared memory has room for. Elsewhere 2."""

MOST_SPLITS = 64


def pow2(value: int) -> int:
    """Return the least power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Return the width of a tile that holds D: a power of two, and at least the 16 of a tensor core."""
    return max(16, pow2(dim))


def attend_decode(device: Device, dtype: Any, dim: int, groups: int, programs: int) -> TileConfig:
    """Tiles for one query a row.

    The number of splits depends on the batch and the chip and never on a row's length or the width of the table, so
    neither a neighbour nor a wider table changes how a row's keys are grouped.

    Args:
      device: the chip.
      dtype: of the pages.
      dim, groups: D and G.
      programs: B * K.
    """
    wanted = -(-_PROGRAMS.get(device.kind, 2) * device.cores // programs)
    splits = min(MOST_SPLITS, pow2(wanted))
    rows = max(16, pow2(groups))
    if jnp.dtype(dtype).itemsize == 4:
        # No tensor core multiplies float32 in full: small tiles, so that the operands fit into registers.
        return TileConfig(slots=16, rows=rows, splits=splits, warps=4 if dim <= 128 else 8)
    return TileConfig(slots=64 if dim <= 128 else 32, rows=rows, splits=splits, stages=2)


def attend_chunk(dtype: Any, dim: int, groups: int, queries: int) -> TileConfig:
    """Tiles for T queries a row; ``queries`` is T."""
    if jnp.dtype(dtype).itemsize == 4:
        return TileConfig(slots=16, rows=16, warps=4 if dim <= 128 else 8)
    return TileConfig(slots=32, rows=max(16, min(64 if dim <= 128 else 32, pow2(queries * groups))), stages=2)


def score(dim: int) -> TileConfig:
    """Tiles for scores: real and imaginary parts lie in registers, in float32."""
    return TileConfig(slots=32 if padded_dim(dim) <= 128 else 16)


def compact(itemsize: int, width: int) -> TileConfig:
    """Tiles for moves of ``width`` elements a slot: 128 bytes of 128 slots, 32 bytes a thread and array."""
    columns = min(pow2(width), 128 // itemsize)
    return TileConfig(slots=128, columns=columns, warps=max(4, min(16, columns * itemsize // 8)))


def check_device() -> Device:
    """Return the chip to cut for.

    Raises:
      NotImplementedError: it is not an NVIDIA GPU of compute capability 8.0 or newer.
    """
    device = devices.current()
    if device.platform != "gpu":
        raise NotImplementedError(f"platform={device.platform} ({device.kind}); these kernels run on NVIDIA GPUs")
    if device.capability < AMPERE:
        major, minor = device.capability
        raise NotImplementedError(f"{device.kind} has compute capability {major}.{minor}; these kernels need 8.0")
    return device


def check_pages(pages: Any) -> None:
    """Refuse what the attention and score kernels cannot read.

    Raises:
      NotImplementedError: with the value that is not served.
    """
    block, dim = pages.shape[2], pages.shape[3]
    if str(pages.dtype) not in PAGE_DTYPES:
        raise NotImplementedError(f"pages of {pages.dtype}; these kernels read {', '.join(PAGE_DTYPES)}")
    if block & (block - 1):
        raise NotImplementedError(f"block_size={block} is not a power of two")
    if dim > MOST_DIM:
        raise NotImplementedError(f"head_dim={dim} is more than {MOST_DIM}")


def check_groups(groups: int) -> None:
    """Refuse more query heads a KV head than a tile holds.

    Raises:
      NotImplementedError: with the value.
    """
    if groups > MOST_GROUPS:
        raise NotImplementedError(f"{groups} query heads a KV head are more than {MOST_GROUPS}")
