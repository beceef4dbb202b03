"""The 4-bit kernels, and a decode round of a small Llama of them, compiled: int4.py NAME TARGET. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import ahead_of_time
import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import array

import pallas_kernels
from jaxkv import model, quant
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.decode import Rows, decode_round
from jaxkv.pool import KVPool

MODEL = ModelConfig("llama", 1024, 512, 1024, 4, 16, 4, 128, context=4096, name="small")
CACHE = CacheConfig(blocks=4999, context=4096, dtype="bfloat16", rows=8)
MATRICES = {"up": (25600, 5120), "down": (5120, 25600), "k": (1024, 5120)}
"""[O, X] of Qwen3-32B."""


def kernels(target: str) -> list[dict[str, Any]]:
    """Compile products in groups of 128, and in those of Q4_K and Q6_K, whose scales count units."""
    cases = [(_int4, name, rows, 128) for name in MATRICES for rows in (1, 8, 64)]
    cases += [(_int4, "up", rows, 32) for rows in (1, 64)]
    if target in ahead_of_time.TARGETS:
        cases += [(_int8, "up", rows, size) for size in (128, 16) for rows in (1, 64)]
    found = []
    for op, name, rows, size in cases:
        outputs, inputs = MATRICES[name]
        function, args = op(outputs, inputs, size)
        program = ahead_of_time.compile_for(target, function, array(rows, inputs, dtype="bfloat16"), *args)
        (kernel,) = (kernel for kernel in program.kernels if kernel.name.startswith(("int4_matmul", "int8_matmul")))
        about = {"case": f"{op.__name__} {name} of {rows} rows, groups of {size}"}
        sizes = {"temporaries": program.memory.temp_size_in_bytes, "plain": 2 * outputs * inputs}
        found.append({**vars(kernel), **about, **sizes})
    return found


def _int4(outputs: int, inputs: int, size: int) -> tuple[Any, list[Any]]:
    groups, units = (inputs // size, outputs), array(2, inputs // 256, outputs, dtype="float16")
    scale = "uint8" if size == 32 else "float16"
    args = [array(outputs, inputs // 2, dtype="uint8"), array(*groups, dtype=scale), array(*groups, dtype="uint8")]

    def function(x: Any, packed: Any, scale: Any, offset: Any, units: Any = None) -> Any:
        return pallas_kernels.int4_matmul(x, packed, scale, offset, units=units)

    return function, [*args, units] if size == 32 else args


def _int8(outputs: int, inputs: int, size: int) -> tuple[Any, list[Any]]:
    scale = array(inputs // size, outputs, dtype="int8" if size == 16 else "float16")
    args = [array(outputs, inputs, dtype="int8"), scale]

    def function(x: Any, q: Any, scale: Any, units: Any = None) -> Any:
        return pallas_kernels.int8_matmul(x, q, scale, units=units)

    return function, [*args, array(inputs // 256, outputs, dtype="float16")] if size == 16 else args


def decode(target: str) -> dict[str, Any]:
    """Compile a round with every layer's matrices packed."""

    def function(pool: Any, weights: Any, rows: Any, steps: Any) -> Any:
        return decode_round(weights, pool, rows, steps, config=MODEL)

    weights = quant.abstract(model.weight_shapes(MODEL, jnp.bfloat16), "int4")
    pool = KVPool.shapes(MODEL, CACHE)
    rows = jax.tree.map(lambda x: array(*np.shape(x), dtype=np.asarray(x).dtype), Rows.idle(CACHE))
    args = (pool, weights, rows, array(dtype="int32"))
    program = ahead_of_time.compile_for(target, function, *args, donate=(0,))
    calls = [line for line in program.text.splitlines() if "__gpu$xla.gpu.triton" in line]
    return {
        "matrices": 7 * MODEL.layers,
        "calls": sum("/int4_matmul/" in line for line in calls),
        "spilled": sum(kernel.spilled for kernel in program.kernels if kernel.name.startswith("int4_matmul")),
        "copies": program.copies(pool.k[0].size),
        "temporaries": program.memory.temp_size_in_bytes,
        "plain": 2 * MODEL.width * MODEL.mlp_width,
        "packed": weights.layers[0].up.nbytes,
    }


if __name__ == "__main__":
    print(json.dumps({"kernels": kernels, "decode": decode}[sys.argv[1]](sys.argv[2])))
