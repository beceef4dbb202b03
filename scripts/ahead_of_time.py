"""Compile for NVIDIA GPUs and TPUs that are not there, and read what came out: registers, memory, PTX, copies.

Runs in the environment that ``scripts/aot_env.sh`` makes: JAX's CUDA plugin and NVIDIA's assembler, no driver and no
GPU, and libtpu. A description of the chip stands in for it. Import this module before JAX.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

CUDA = pathlib.Path(importlib.import_module("nvidia.cu13").__path__[0])
_DUMP = tempfile.TemporaryDirectory(prefix="aot-")
_FLAGS: dict[str, Any] = {
    "xla_dump_to": _DUMP.name,
    "xla_gpu_cuda_data_dir": CUDA,
    # Else the PTX of a module is cut up, to compile the pieces side by side.
    "xla_gpu_force_compilation_parallelism": 1,
}
if not importlib.metadata.version("jax").startswith("0.10."):
    # Newer ones dump PTX only when told to, and the older do not know how to be told.
    _FLAGS["xla_dump_emitter_re"] = "ptx"
# Mosaic GPU calls an assembler itself and has files of its own. It says that it misses nvdisasm, and goes on.
os.environ["MOSAIC_GPU_DUMP_TO"] = _DUMP.name
os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu asks a TPU's machine what it is otherwise, and refuses to be in two processes at once.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
# A program that comes from the cache leaves no PTX.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *(f"--{k}={v}" for k, v in _FLAGS.items())])
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax._src.lib import _jax, xla_client  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from pallas_kernels import device as devices  # noqa: E402

_REGISTERS = 65536
"""Of 32 bits, a multiprocessor."""

TARGETS = ("NVIDIA GeForce RTX 4090", "NVIDIA H200")

TPU_TARGETS = ("TPU v5 lite", "TPU v6 lite", "TPU v5", "TPU7x")

_TPUS = {
    "TPU v5 lite": ("v5e:2x2", 16 * 2**30),
    "TPU v6 lite": ("v6e:2x2", 32 * 2**30),
    "TPU v5": ("v5p:2x2x1", 95 * 2**30),
    "TPU7x": ("tpu7x:2x2x1", 96 * 2**30),
}
"""The smallest host that libtpu describes, and bytes of memory of one of its devices."""

_MEMORY = {
    "NVIDIA GeForce RTX 4090": (24564 * 2**20, 1008 * 10**9, 72 * 2**20),
    "NVIDIA H200": (143771 * 2**20, 4800 * 10**9, 50 * 2**20),
}
"""Bytes of memory as the driver counts them, bytes a second, and bytes of second-level cache."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled program."""

    name: str
    registers: int
    spilled: int
    """Bytes that a thread stores and loads because registers ran out."""
    shared_memory: int
    threads: int
    ptx: str

    def blocks(self, chip: devices.Device) -> int:
        """Blocks of threads that a multiprocessor holds at once."""
        warps = -(-self.threads // 32)
        # Registers are handed out by 256 a warp, shared memory by 128 bytes and 1 KiB of the driver's a block.
        by_registers = _REGISTERS // (warps * -(-self.registers * 32 // 256) * 256)
        by_memory = chip.shared_memory_core // (-(-self.shared_memory // 128) * 128 + 1024)
        return min(by_registers, by_memory, chip.threads_core // (warps * 32), 24 if chip.threads_core < 2048 else 32)

    def occupancy(self, chip: devices.Device) -> float:
        """Share of the multiprocessor's threads that can be resident."""
        return self.blocks(chip) * -(-self.threads // 32) * 32 / chip.threads_core


@dataclasses.dataclass(frozen=True)
class VectorKernel:
    """One kernel of a program compiled for a TPU."""

    name: str
    vector_memory: int
    """Bytes that it takes while it runs, the blocks of its inputs and outputs included."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its text, its memory and its kernels."""

    text: str
    memory: Any
    kernels: tuple[Any, ...]
    """Of ``Kernel``, or of ``VectorKernel`` on a TPU."""

    def copies(self, elements: int) -> list[str]:
        """Return the instructions that copy an array of so many elements."""
        found = []
        for line in self.text.splitlines():
            match = re.search(r"= \(?\w+\[([\d,]+)\]\S* (?:.* )?(copy|copy-start|transpose)\(", line)
            if match and math.prod(map(int, match[1].split(","))) == elements:
                found.append(line.strip()[:160])
        return found


def compile_for(kind: str, function: Callable[..., Any], *args: Any, donate: Sequence[int] = ()) -> Program:
    """Compile a function of arrays, given as shapes, for a chip of ``TARGETS`` or ``TPU_TARGETS``.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses it; a kernel that wants more shared memory than there is, say.
    """
    described = _topology(kind) if kind in TARGETS else topologies.get_topology_desc(_TPUS[kind][0], platform="tpu")
    mesh = jax.sharding.Mesh(np.array(described.devices[:1]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    for path in _dumped("*"):
        path.unlink()
    with jax.set_mesh(mesh), devices.target(kind):
        compiled = jax.jit(function, donate_argnums=tuple(donate)).lower(*args).compile()
    text = compiled.as_text()
    kernels = _kernels(devices.DEVICES[kind].arch) if kind in TARGETS else _vector_kernels(text)
    return Program(text, compiled.memory_analysis(), tuple(kernels))


def memory_size(kind: str) -> int:
    """Return how many bytes of memory a chip of ``TARGETS`` or a device of ``TPU_TARGETS`` has."""
    return _MEMORY[kind][0] if kind in TARGETS else _TPUS[kind][1]


def _topology(kind: str) -> topologies.TopologyDescription:
    jax.devices()  # Finds the plugin.
    if not xla_client.pjrt_plugin_loaded("cuda"):
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
        library = pathlib.Path(plugin.__path__[0]) / "xla_cuda_plugin.so"
        xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    options = {"target_config": _description(devices.DEVICES[kind]), "topology": "1x1x1"}
    topology = _jax.get_default_c_api_topology("cuda", "", options)
    return topologies.TopologyDescription(topology._make_compile_only_devices())


def _description(chip: devices.Device) -> str:
    """Return XLA's description of the chip, as a text proto."""
    size, bandwidth, cache = _MEMORY[chip.kind]
    limits = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": chip.threads_core,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_block_limit": _REGISTERS,
        "registers_per_core_limit": _REGISTERS,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": chip.shared_memory,
        "shared_memory_per_core": chip.shared_memory_core,
        "core_count": chip.cores,
        "fpus_per_core": 128,
        "device_memory_size": size,
        "memory_bandwidth": bandwidth,
        "l2_cache_size": cache,
        "clock_rate_ghz": 2.0,
        "device_address_bits": 64,
    }
    versions = ("driver_version", "runtime_version", "compile_time_toolkit_version")
    major, minor = chip.capability
    own = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    lines = [f"{name}: {value}" for name, value in limits.items()]
    lines += [f'{name}: "13.0.0"' for name in versions]
    lines += [f'name: "{chip.kind}"', 'device_vendor: "NVIDIA Corporation"', 'dnn_version: "9.10.0"']
    lines += [f"cuda_compute_capability {{ major: {major} minor: {minor}{own} }}"]
    dnn = "dnn_version_info { major: 9 minor: 10 patch: 0 }"
    return f'gpu_device_info {{ {" ".join(lines)} }} platform_name: "CUDA" {dnn} device_description_str: "{chip.kind}"'


def _vector_kernels(text: str) -> Iterator[VectorKernel]:
    """Yield the Pallas kernels of a module compiled for a TPU."""
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name, used = re.search(r"%([\w-]+)", line), re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
            assert name is not None and used is not None, line
            sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1])
            yield VectorKernel(name[1], sum(map(int, sizes)))


def _dumped(pattern: str) -> list[pathlib.Path]:
    return sorted(path for path in pathlib.Path(_DUMP.name).glob(pattern) if path.is_file())


def _kernels(arch: str) -> Iterator[Kernel]:
    """Yield the kernels of the module just compiled: launches from XLA's schedule, the rest from the assembler."""
    launches = {}
    for path in _dumped("*.thunk_sequence.txt"):
        pattern = r"\] (\S+) grid: \[[\d, ]+\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+)"
        for name, threads, memory in re.findall(pattern, path.read_text()):
            launches[name] = math.prod(map(int, threads.split(","))), int(memory)
    for path in _dumped("*.ptx"):
        ptx = path.read_text()
        if ".version" not in ptx:
            continue
        command = [str(CUDA / "bin" / "ptxas"), "-v", f"-arch={arch}", str(path), "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for part in report.split("Compiling entry function ")[1:]:
            name = part.split("'")[1]
            threads, memory = launches.get(name) or _mosaic_launch(path)
            spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", part))
            registers = re.search(r"Used (\d+) registers", part)
            assert registers is not None, part
            yield Kernel(name, int(registers[1]), spilled, memory, threads, _entry(ptx, name))


def _mosaic_launch(ptx: pathlib.Path) -> tuple[int, int]:
    """Return threads and bytes of shared memory of a kernel of Mosaic GPU, which XLA's schedule has as a mere call."""
    log = ptx.with_suffix(".mlir-passes.log")
    if not log.exists():
        return 0, 0
    with log.open() as lines:
        launch = next(line for line in lines if "gpu.launch " in line)
    found = re.search(r"threads\(.*\) in \((.*)\) dynamic_shared_memory_size %c(\d+)_i32", launch)
    assert found is not None, launch
    return math.prod(map(int, re.findall(r"= %c(\d+)", found[1]))), int(found[2])


def _entry(ptx: str, name: str) -> str:
    """Return the PTX of one kernel."""
    start = ptx.index(f".entry {name}(")
    following = ptx.find(".entry ", start + 1)
    return ptx[start : None if following < 0 else following]
