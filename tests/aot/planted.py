"""Kernels with a fault in them, compiled: what the tests and the report have to notice. Prints JSON, or fails."""

from __future__ import annotations

import importlib
import json
import sys

import ahead_of_time
import kernel_cases
import kernel_report
import tpu_cases
from kernel_cases import array

from pallas_kernels.mosaic_tpu import tiles as tpu_tiles
from pallas_kernels.triton import tiles

TARGET = "NVIDIA GeForce RTX 4090"
TPU = "TPU v5 lite"


def overflow() -> None:
    """A tile of 512 slots of 256 float16 wants 256 KiB and more of shared memory."""
    _cut("attend_decode", slots=512, rows=16, warps=8, stages=2)
    (case,) = _cases("attend_decode G=2 D=256")
    kernel_report.measure(TARGET, case)


def spill() -> int:
    """64 query vectors of 256 are too many for the registers of 128 threads; the report has to say so."""
    _cut("attend_chunk", slots=64, rows=64, warps=4, stages=1)
    sys.argv = ["kernel_report", "--target", TARGET, "--only", "attend_chunk G=2 D=256"]
    return kernel_report.main()


def no_barrier() -> None:
    """A compaction without the barrier between a tile's loads and stores."""
    module = importlib.import_module("pallas_kernels.triton.compact")
    body = module.compact_kernel
    module.compact_kernel = lambda *refs, barrier, **options: body(*refs, barrier=False, **options)
    (case,) = _cases("compact [N, 8, 16, 128] bfloat16")
    print(json.dumps(kernel_report.measure(TARGET, case)))


def copy() -> None:
    """A compaction of pages that are not given away has to copy them."""
    (case,) = _cases("compact [N, 8, 16, 128] bfloat16")
    program = ahead_of_time.compile_for(TARGET, case.function, *case.args)
    size = case.args[0][0].size
    print(json.dumps({"copies": program.copies(size), "aliased": program.memory.alias_size_in_bytes}))


def xla_copy() -> None:
    """XLA's own moves, gathered rows scattered at once, make a copy of the pool."""

    def move(pages, source, target):
        flat = pages.reshape(-1, pages.shape[-1])
        return flat.at[target].set(flat[source]).reshape(pages.shape)

    rows = array(4096, dtype="int32")
    pages = array(4000, 8, 16, 128, dtype="bfloat16")
    program = ahead_of_time.compile_for(TARGET, move, pages, rows, rows, donate=(0,))
    memory = program.memory
    print(json.dumps({"copies": program.copies(pages.size), "temporaries": memory.temp_size_in_bytes}))


def tpu_copy() -> None:
    """Pages that are not given away, and pages 64 wide, which XLA keeps in another order than a kernel takes."""
    (case,) = (case for case in tpu_cases.cases() if case.name == "D=128 P=16 bfloat16 X=8")
    kept = ahead_of_time.compile_for(TPU, case.function, *case.args)
    tpu_tiles.check_pages = lambda _: None
    pages, *plan = case.args
    narrow = array(*pages[0].shape[:3], 64, dtype="bfloat16")
    program = ahead_of_time.compile_for(TPU, case.function, (narrow, narrow), *plan, donate=(0,))
    print(json.dumps({"kept": kept.copies(pages[0].size), "narrow": program.copies(narrow.size)}))


def _cut(kernel: str, **config: int) -> None:
    setattr(tiles, kernel, lambda *_, **__: tiles.TileConfig(**config))


def _cases(text: str) -> list[kernel_cases.Case]:
    return [case for case in kernel_cases.cases() if f"{case.kernel} {case.name}".startswith(text)][:1]


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]]())
