"""How the Hopper kernels are cut into tiles, and what they cannot serve."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device as devices
from pallas_kernels.device import Device

ROWS = 64
"""Rows of a wgmma product: what a warpgroup multiplies at once, however few of them are used."""

HALF = ROWS // 2
"""Where the second copy of the query heads starts; a kernel holds no more of them."""

PAGE_DTYPES = ("bfloat16", "float16")
DIMS = (64, 128)
LEAST_BLOCK = 8
"""Rows of the pattern in which wgmma reads shared memory and the memory accelerator writes it."""

MOST_SPLITS = 64

_PROGRAMS = 2
"""Programs a multiprocessor: what has room in its shared memory."""


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How the decode kernel is cut.

    Attributes:
      slots: token slots of a tile, a power of two and a multiple of 64, the width of a row of shared memory.
      splits: programs that share the keys of one (row, KV head).
      stages: tiles of keys and values in shared memory, the one at work included.
    """

    slots: int
    splits: int = 1
    stages: int = 2

    def __post_init__(self) -> None:
        if self.slots < 64 or self.slots & (self.slots - 1):
            raise ValueError(f"slots={self.slots} must be a power of two and at least 64")
        if self.splits < 1:
            raise ValueError(f"splits={self.splits} must be at least 1")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2: one to copy into, one to read")


def attend_decode(device: Device, dim: int, programs: int) -> TileConfig:
    """Tiles for one query a row, 64 KiB of keys and values in flight. The logits of wider ones take the registers.

    The number of splits depends on the batch and the chip and never on a row's length or the width of the table, so
    neither a neighbour nor a wider table changes how a row's keys are grouped.

    Args:
      device: the chip.
      dim: D, one of ``DIMS``.
      programs: B * K.
    """
    wanted = -(-_PROGRAMS * device.cores // programs)
    splits = min(MOST_SPLITS, 1 << (wanted - 1).bit_length())
    return TileConfig(slots=64, splits=splits, stages=256 // dim)


def check_device() -> Device:
    """Return the chip to cut for.

    Raises:
      NotImplementedError: it is not an NVIDIA GPU of compute capability 9.x.
    """
    device = devices.current()
    if device.platform != "gpu":
        raise NotImplementedError(f"platform={device.platform} ({device.kind}); these kernels run on NVIDIA GPUs")
    major, minor = device.capability
    if major < 9:
        raise NotImplementedError(f"{device.kind} has compute capability {major}.{minor}; these kernels need 9.0")
    if major > 9:
        raise NotImplementedError(f"{device.kind} has compute capability {major}.{minor}, and wgmma is on 9.x alone")
    return device


def interpreter(device: Device) -> Any:
    """Return what makes Pallas interpret a kernel, looking for races, or None where it is to be compiled.

    Raises:
      NotImplementedError: this version of JAX has no interpreter for these kernels.
    """
    if not device.interpret:
        return None
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise NotImplementedError(f"JAX {jax.__version__} cannot interpret kernels of Mosaic GPU; 0.11 can")
    # Copies that share a clock look ordered, and each draws one at random: so there are many.
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=32)


def check_pages(pages: Any) -> None:
    """Refuse pages that the kernels cannot read.

    Raises:
      NotImplementedError: with the value that is not served.
    """
    block, dim = pages.shape[2], pages.shape[3]
    if str(pages.dtype) not in PAGE_DTYPES:
        raise NotImplementedError(f"pages of {pages.dtype}; wgmma multiplies {' and '.join(PAGE_DTYPES)} exactly")
    if dim not in DIMS:
        raise NotImplementedError(f"head_dim={dim} is none of {', '.join(map(str, DIMS))}")
    if block & (block - 1) or block < LEAST_BLOCK:
        raise NotImplementedError(f"block_size={block} is not a power of two of at least {LEAST_BLOCK}")


def check_groups(groups: int) -> None:
    """Refuse more query heads a KV head than half the rows of a product.

    Raises:
      NotImplementedError: with the value.
    """
    if groups > HALF:
        raise NotImplementedError(f"{groups} query heads a KV head are more than {HALF}")
