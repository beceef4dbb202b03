"""How each kernel is cut into tiles, and what the kernels of this folder cannot serve."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import device as devices
from pallas_kernels.device import MIB, Device

LANES = 128
"""Columns of a tile of vector memory. A page whose width is no multiple of it lies in HBM in another order."""

PAGE_DTYPES = ("bfloat16", "float32")
TILE_BYTES = 512 * 1024
"""Bytes of K that a tile aims at: two of them, K's and V's, outlast the microsecond that a read of HBM takes."""

MOST_SLOTS = 1024
MOST_ROWS = 256
"""Query vectors of a KV head that a program takes."""

UNROLLED_HEADS = 8

SCALAR_BYTES = 512 * 1024
"""Bytes of tables that a kernel may hold in scalar memory, of the 1 MiB that a TPU has of it."""

VECTOR_BYTES = 12 * MIB
"""Bytes of vector memory that a kernel plans with. XLA lets one have 16 MiB where nothing else is said."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How an attention or score kernel is cut.

    Attributes:
      blocks: blocks of a tile.
      rows: query vectors of a KV head that a program takes, a multiple of 8.
    """

    blocks: int
    rows: int = 8

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.rows < 8 or self.rows % 8:
            raise ValueError(f"blocks={self.blocks} must be at least 1 and rows={self.rows} a multiple of 8")


def tile_rows(dtype: Any) -> int:
    """Return the rows of a tile of vector memory: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def padded(value: int, unit: int) -> int:
    """Round up to a multiple."""
    return -(-value // unit) * unit


def key_blocks(pages: Any) -> int:
    """Return the blocks of a tile of keys. It depends on the pages' shape alone, so a row's bits do not on others."""
    _, kv_heads, block, width = pages.shape
    slots = TILE_BYTES // (kv_heads * width * pages.dtype.itemsize)
    slots = min(MOST_SLOTS, 1 << max(7, slots.bit_length() - 1))
    return max(1, slots // block)


def attend(pages: Any, groups: int, queries: int) -> TileConfig:
    """Tiles for T queries a row; ``queries`` is T."""
    _, kv_heads, block, width = pages.shape
    blocks = key_blocks(pages)
    slots = blocks * block
    held = 4 * kv_heads * slots * width * pages.dtype.itemsize
    # q and the output twice each, for the pipeline, the running maximum, the total and the weighted values.
    each = kv_heads * (4 * width * 4 + 2 * LANES * 4 + width * 4) + 6 * slots * 4
    fitting = max(8, (VECTOR_BYTES - held) // each // 8 * 8)
    rows = padded(queries * groups, 8)
    # Tiles of one size: the last is not left with a few.
    programs = -(-rows // min(MOST_ROWS, fitting))
    return TileConfig(blocks, padded(-(-rows // programs), 8))


def score(pages: Any, groups: int, offsets: int) -> TileConfig:
    """Tiles for scores of G heads against O offsets.

    Raises:
      NotImplementedError: the vectors to score against are more than vector memory holds.
    """
    _, kv_heads, _, width = pages.shape
    rows = padded(groups, 8)
    check_vectors(3 * 4 * (offsets + 1) * kv_heads * rows * width, f"{offsets} offsets of {kv_heads * rows} heads")
    return TileConfig(key_blocks(pages), rows)


def move_slots(block: int) -> int:
    """Return the slots that a compaction moves at a time: those of a matrix unit's rows, or of one block."""
    return max(LANES, block)


def unrolled(kv_heads: int, device: Device) -> bool:
    """Return whether a program's text has each KV head. Interpreted, that would only take longer to compile."""
    return kv_heads <= UNROLLED_HEADS and not device.interpret


def compiler_params(device: Device, *semantics: Literal["arbitrary", "parallel"]) -> pltpu.CompilerParams:
    """Return the parameters of a kernel whose grid has these semantics."""
    # Twice what was planned: the compiler has temporaries of its own.
    limit = min(device.vmem, 2 * VECTOR_BYTES) or None
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


def check_device() -> Device:
    """Return the chip to cut for.

    Raises:
      NotImplementedError: it is no TPU.
    """
    device = devices.current()
    if device.platform != "tpu":
        raise NotImplementedError(f"platform={device.platform} ({device.kind}); these kernels run on TPUs")
    return device


def check_pages(pages: Any) -> None:
    """Refuse pages that cannot be moved by whole tiles, or are of a type that the matrix unit does not take.

    Raises:
      NotImplementedError: with the value that is not served.
    """
    if pages.ndim != 4:
        raise NotImplementedError(f"pages of shape {pages.shape}; these kernels take [N, K, P, D]")
    if str(pages.dtype) not in PAGE_DTYPES:
        raise NotImplementedError(f"pages of {pages.dtype}; these kernels take {', '.join(PAGE_DTYPES)}")
    block, width = pages.shape[2:]
    if width % LANES:
        raise NotImplementedError(
            f"pages are {width} wide, and a TPU copies them all where that is no multiple of {LANES}; "
            f"make them {padded(width, LANES)} wide"
        )
    if block < tile_rows(pages.dtype) or block & (block - 1):
        raise NotImplementedError(
            f"block_size={block} is not a power of two from {tile_rows(pages.dtype)} on, "
            f"the rows of a tile of {pages.dtype}"
        )


def check_tables(entries: int) -> None:
    """Refuse tables that scalar memory has no room for.

    Raises:
      NotImplementedError: with their size.
    """
    if 4 * entries > SCALAR_BYTES:
        raise NotImplementedError(f"tables of {4 * entries} bytes; these kernels hold {SCALAR_BYTES} in scalar memory")


def check_vectors(held: int, what: str) -> None:
    """Refuse what vector memory has no room for.

    Raises:
      NotImplementedError: with its size.
    """
    if held > VECTOR_BYTES:
        raise NotImplementedError(f"{what} take {held} bytes of vector memory; these kernels plan with {VECTOR_BYTES}")
