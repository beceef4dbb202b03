"""The chip that kernels are chosen and cut for: the default device, or one that is named for a while."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

KIB = 1024
MIB = 1024 * KIB


@dataclasses.dataclass(frozen=True)
class Device:
    """What a kernel has to know of a chip.

    Attributes:
      kind: the chip's name, as JAX spells it.
      platform: gpu, tpu or cpu.
      capability: NVIDIA's compute capability, (9, 0) for Hopper; (0, 0) elsewhere.
      cores: streaming multiprocessors, or tensor cores of a TPU.
      shared_memory: bytes that one block of threads may ask for.
      shared_memory_core: bytes that a multiprocessor has for all its blocks, 1 KiB a block of its own included.
      threads_core: threads that a multiprocessor holds at once.
      vmem: bytes of vector memory that a tensor core of a TPU has.
      interpret: run Pallas kernels in its interpreter, on whatever is there.
    """

    kind: str
    platform: str
    capability: tuple[int, int] = (0, 0)
    cores: int = 1
    shared_memory: int = 0
    shared_memory_core: int = 0
    threads_core: int = 0
    vmem: int = 0
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.platform not in ("gpu", "tpu", "cpu"):
            raise ValueError(f"platform={self.platform!r} is unknown; one of gpu, tpu, cpu is")
        if self.cores < 1:
            raise ValueError(f"cores={self.cores} must be at least 1")

    @property
    def arch(self) -> str:
        """The name that NVIDIA's assembler has for it: sm_89, and sm_90a with the instructions of Hopper alone."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _nvidia(kind: str, capability: tuple[int, int], cores: int, kib: int, threads: int) -> Device:
    # A block can have all of the multiprocessor's shared memory but the 1 KiB that the driver keeps a block.
    return Device(kind, "gpu", capability, cores, (kib - 1) * KIB, kib * KIB, threads)


def _tpu(kind: str, cores: int, mib: int) -> Device:
    return Device(kind, "tpu", cores=cores, vmem=mib * MIB)


DEVICES: dict[str, Device] = {
    device.kind: device
    for device in (
        _nvidia("NVIDIA A100", (8, 0), 108, 164, 2048),
        _nvidia("NVIDIA GeForce RTX 3090", (8, 6), 82, 100, 1536),
        _nvidia("NVIDIA GeForce RTX 4090", (8, 9), 128, 100, 1536),
        _nvidia("NVIDIA H100", (9, 0), 132, 228, 2048),
        _nvidia("NVIDIA H200", (9, 0), 132, 228, 2048),
        # v5e, v6e, v5p and Ironwood, as JAX spells them.
        _tpu("TPU v5 lite", 1, 128),
        _tpu("TPU v6 lite", 1, 128),
        _tpu("TPU v5", 2, 64),
        _tpu("TPU7x", 1, 64),
    )
}
"""Chips known by name, from public figures; others are asked for theirs."""

_TARGET: contextvars.ContextVar[Device | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target(kind: str, *, interpret: bool = False) -> Iterator[Device]:
    """Choose and cut kernels for a chip that is not there: to compile ahead of time, or to interpret.

    What a ``jax.jit`` has traced it keeps: call it first inside, and make another for another target.

    Args:
      kind: a name in ``DEVICES``.
      interpret: run the kernels in Pallas' interpreter, on the default device.

    Raises:
      ValueError: the name is unknown.
    """
    if kind not in DEVICES:
        raise ValueError(f"kind={kind!r} is unknown; one of {', '.join(DEVICES)} is")
    token = _TARGET.set(dataclasses.replace(DEVICES[kind], interpret=interpret))
    try:
        yield DEVICES[kind]
    finally:
        _TARGET.reset(token)


def current() -> Device:
    """Return the target if one is set, else the default device."""
    return _TARGET.get() or _of(jax.local_devices()[0])


def _of(device: jax.Device) -> Device:
    platform = device.platform if device.platform in ("tpu", "cpu") else "gpu"
    # The longest name: "TPU v5 lite" starts as "TPU v5" does.
    for kind in sorted(DEVICES, key=len, reverse=True):
        if device.device_kind.startswith(kind):
            return DEVICES[kind]
    capability = str(getattr(device, "compute_capability", ""))
    major, _, minor = capability.partition(".")
    # AMD's are names such as gfx942: they leave (0, 0), which no kernel of ours serves.
    parsed = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
    optin = int(getattr(device, "shared_memory_per_block_optin", 48 * KIB))
    cores = max(1, int(getattr(device, "core_count", 1) or 1))
    return Device(device.device_kind, platform, parsed, cores, optin, optin + KIB, 1536)
