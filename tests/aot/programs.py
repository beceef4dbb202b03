"""Whole programs of a small model, compiled with a chip's kernels: programs.py NAME TARGET [MODEL]. Prints JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

import ahead_of_time
import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import array

import pallas_kernels
from jaxkv import model as models
from jaxkv import triattention
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.decode import Chunk, Rows, compact_round, decode_round, decode_trace, prefill_chunk
from jaxkv.policies.triattention import TriAttention
from jaxkv.pool import KVPool
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats
from pallas_kernels import device

MODELS = {
    "llama": ModelConfig("llama", 1024, 512, 1024, 4, 16, 4, 128, context=4096, name="small"),
    # Heads as SmolLM2's: a TPU pads them to 128.
    "smollm2": ModelConfig("llama", 1024, 576, 1536, 4, 9, 3, 64, context=4096, name="small"),
}
MODEL = MODELS[sys.argv[3] if len(sys.argv) > 3 else "llama"]
CACHE = CacheConfig(blocks=4999, context=4096, dtype="bfloat16", rows=8, prefill_chunk=256, prefill_rows=2)
IMPLEMENTATION: pallas_kernels.Implementation = "triton"
if device.DEVICES[sys.argv[2]].platform == "tpu":
    IMPLEMENTATION = "mosaic_tpu"
    # A page array of 200 MiB: a smaller one may be copied to vector memory, and no count of bytes shows it.
    MODEL = dataclasses.replace(MODEL, layers=2)
    CACHE = dataclasses.replace(CACHE, blocks=200 * 2**20 // (MODEL.kv_heads * 16 * 128 * 2))


def main(name: str, target: str, _: str = "") -> None:
    """Compile one program and print what became of the pool."""
    with device.target(target):
        function, args = PROGRAMS[name]()
        pool = KVPool.shapes(MODEL, CACHE)
    program = ahead_of_time.compile_for(target, function, *args, donate=(0,))
    calls = [line for line in program.text.splitlines() if re.search(r"__gpu\$xla\.gpu\.triton|tpu_custom_call", line)]
    kernels = ("attend_decode", "attend_chunk", "score", "compact")
    found = {
        "pool": pool.nbytes,
        "aliased": program.memory.alias_size_in_bytes,
        "temporaries": program.memory.temp_size_in_bytes,
        "copies": program.copies(pool.k[0].size),
        "calls": {kernel: sum(f"/{kernel}/" in line for line in calls) for kernel in kernels},
        "spilled": {
            kernel.name: kernel.spilled
            for kernel in program.kernels
            if kernel.name.startswith(kernels) and isinstance(kernel, ahead_of_time.Kernel)
        },
    }
    print(json.dumps(found))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: array(*np.shape(x), dtype=np.asarray(x).dtype), tree)


def _round() -> tuple[Any, Any]:
    def function(pool: Any, weights: Any, rows: Any, steps: Any) -> Any:
        return decode_round(weights, pool, rows, steps, config=MODEL, implementation=IMPLEMENTATION)

    weights = models.weight_shapes(MODEL, jnp.bfloat16)
    return function, (KVPool.shapes(MODEL, CACHE), weights, _shapes(Rows.idle(CACHE)), array(dtype="int32"))


def _prefill() -> tuple[Any, Any]:
    def function(pool: Any, weights: Any, chunk: Any) -> Any:
        return prefill_chunk(weights, pool, chunk, config=MODEL, implementation=IMPLEMENTATION)

    weights = models.weight_shapes(MODEL, jnp.bfloat16)
    return function, (KVPool.shapes(MODEL, CACHE), weights, _shapes(Chunk.idle(CACHE)))


def _policy() -> tuple[Any, Any]:
    """The policy and the budgets of rows that TriAttention compacts, as shapes."""
    rows = array(CACHE.rows, dtype="int32")
    mean = array(MODEL.layers, MODEL.heads, MODEL.frequencies)
    phases = _shapes(triattention.Phases.of_model(MODEL))
    budgets = Budgets(b_row=rows, interval=rows, window=rows, sinks=rows, pinned=rows)
    return TriAttention(phases=phases, stats=QueryStats(mean, mean, mean)), budgets


def _compaction(mode: Any) -> tuple[Any, Any]:
    def function(pool: Any, *args: Any) -> Any:
        return compact_round(pool, *args, mode=mode, lanes=CACHE.rows, implementation=IMPLEMENTATION)

    rows, due = array(CACHE.rows, dtype="int32"), array(CACHE.rows, dtype="bool")
    table = array(CACHE.rows, CACHE.table_width, dtype="int32")
    policy, budgets = _policy()
    return function, (KVPool.shapes(MODEL, CACHE), table, table, rows, rows, due, budgets, policy)


def _trace() -> tuple[Any, Any]:
    def function(pool: Any, weights: Any, rows: Any, policy: Any, budgets: Any) -> Any:
        options = {"budgets": budgets, "policy": policy, "lanes": CACHE.rows, "implementation": IMPLEMENTATION}
        return decode_trace(weights, pool, rows, n=1000, config=MODEL, **options)

    weights = models.weight_shapes(MODEL, jnp.bfloat16)
    return function, (KVPool.shapes(MODEL, CACHE), weights, _shapes(Rows.idle(CACHE)), *_policy())


PROGRAMS = {
    "decode_round": _round,
    "prefill_chunk": _prefill,
    "decode_trace": _trace,
    "compaction_per_head": lambda: _compaction("per_head"),
    "compaction_per_layer_head": lambda: _compaction("per_layer_head"),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
