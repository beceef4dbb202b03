"""Compiles for an H200: hopper.py decode_round, with the kernels that the chip picks; hopper.py cut SLOTS STAGES, the
decode kernel in tiles that are too large for it. Prints JSON, or fails.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ahead_of_time
import jax
import jax.numpy as jnp
import kernel_cases
import kernel_report
import numpy as np

from jaxkv import model as models
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.decode import Rows, decode_round
from jaxkv.pool import KVPool
from pallas_kernels.mosaic_gpu import tiles

TARGET = "NVIDIA H200"
MODEL = ModelConfig("llama", 1024, 512, 1024, 4, 16, 4, 128, context=4096, name="small")
CACHE = CacheConfig(blocks=4999, context=4096, dtype="bfloat16", rows=8, prefill_chunk=256, prefill_rows=2)
CASE = "G=4 D=128 P=16 bfloat16 options"
CALLS = {"mosaic_gpu": "mosaic_gpu", "triton": "__gpu$xla.gpu.triton"}


def decode_round_of_a_small_llama() -> None:
    """Print which kernels it calls and what became of the pool."""

    def function(pool: Any, weights: Any, rows: Any, steps: Any) -> Any:
        return decode_round(weights, pool, rows, steps, config=MODEL)

    def shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype)

    pool, weights = KVPool.shapes(MODEL, CACHE), models.weight_shapes(MODEL, jnp.bfloat16)
    args = pool, weights, jax.tree.map(shape, Rows.idle(CACHE)), jax.ShapeDtypeStruct((), "int32")
    program = ahead_of_time.compile_for(TARGET, function, *args, donate=(0,))
    lines = [line for line in program.text.splitlines() if "/attend_" in line]
    found = {
        "pool": pool.nbytes,
        "aliased": program.memory.alias_size_in_bytes,
        "temporaries": program.memory.temp_size_in_bytes,
        "copies": program.copies(pool.k[0].size),
        "calls": {name: sum(f'custom_call_target="{call}' in line for line in lines) for name, call in CALLS.items()},
        "spilled": {kernel.name: kernel.spilled for kernel in program.kernels if kernel.name.startswith("attend_")},
    }
    print(json.dumps(found))


def cut(slots: str, stages: str) -> None:
    """Print the registers that are spilled."""
    tiles.attend_decode = lambda *_: tiles.TileConfig(slots=int(slots), stages=int(stages))
    (case,) = (case for case in kernel_cases.cases() if case.name == CASE and case.kernel == "attend_hopper")
    print(json.dumps(kernel_report.measure(TARGET, case)["spilled"]))


if __name__ == "__main__":
    {"decode_round": decode_round_of_a_small_llama, "cut": cut}[sys.argv[1]](*sys.argv[2:])
