"""Memory of a decode round of Qwen3-8B in bfloat16, by part, on chips that are not there.

    scripts/aot_env.sh .venv-aot && .venv-aot/bin/python scripts/memory_report.py

Compiled at 32,768 tokens of context as they are, and with a budget of 3,072 and an interval of 128. ``other`` is what
the program takes and gives besides weights and pool; temporaries are XLA's own.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import ahead_of_time
import jax
import jax.numpy as jnp
import numpy as np
from ahead_of_time import TARGETS, TPU_TARGETS
from roofline_arithmetic import QWEN3_8B

from jaxkv import model as models
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.decode import Rows, decode_round
from jaxkv.pool import KVPool
from pallas_kernels import Implementation, device

CONTEXT, BUDGET, INTERVAL = 32768, 3072, 128
GIB = 2**30


def main() -> int:
    """Compile each case and print a row of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", action="append", choices=[*TARGETS, *TPU_TARGETS], help="a chip (default: all)")
    parser.add_argument("--layers", type=int, default=QWEN3_8B.layers, help="fewer compile faster")
    args = parser.parse_args()
    model = ModelConfig(**{**vars(QWEN3_8B), "layers": args.layers})
    columns = "weights", "pool", "temporaries", "other", "in all", "of"
    print(f"{'chip':<24} {'rows':>4} {'slots':>6} " + " ".join(f"{name:>11}" for name in columns) + "   GiB")
    for target in args.target or (*TARGETS, *TPU_TARGETS):
        for rows in (1, 8):
            for slots in (CONTEXT, BUDGET + INTERVAL):
                try:
                    parts = measure(target, model, rows, slots)
                except jax.errors.JaxRuntimeError as error:
                    # libtpu compiles no program that the chip has no memory for.
                    wanted = re.search(r"required for .* \((\S+)\) exceeds available HBM \((\S+)\)", str(error))
                    if wanted is None:
                        raise
                    print(f"{target:<24} {rows:>4} {slots:>6}   does not fit: {wanted[1]} of {wanted[2]}", flush=True)
                    continue
                line = " ".join(f"{part / GIB:>11.3f}" for part in parts)
                verdict = "fits" if parts[-2] <= parts[-1] else "does not fit"
                print(f"{target:<24} {rows:>4} {slots:>6} {line}   {verdict}", flush=True)
    return 0


def measure(target: str, model: ModelConfig, rows: int, slots: int) -> tuple[int, ...]:
    """Return bytes of weights, pool, temporaries, the rest, all of it, and the chip's memory."""
    cache = CacheConfig(blocks=rows * slots // 16, context=slots, rows=rows, dtype="bfloat16")
    with device.target(target):
        pool, weights = KVPool.shapes(model, cache), models.weight_shapes(model, jnp.bfloat16)
    implementation: Implementation = "mosaic_tpu" if target in TPU_TARGETS else "triton"

    def function(pool: Any, weights: Any, rows: Any, steps: Any) -> Any:
        return decode_round(weights, pool, rows, steps, config=model, implementation=implementation)

    def shaped(x: Any) -> Any:
        return jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype)

    args = (pool, weights, jax.tree.map(shaped, Rows.idle(cache)), jax.ShapeDtypeStruct((), jnp.int32))
    program = ahead_of_time.compile_for(target, function, *args, donate=(0,))
    # XLA moves pages of less than a TPU's vector memory there and back.
    small = pool.nbytes // (2 * model.layers) < device.DEVICES[target].vmem
    if (copies := program.copies(pool.k[0].size)) and not small:
        raise RuntimeError(f"the program copies pages of the pool: {copies[0]}")
    memory = program.memory
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    other = memory.argument_size_in_bytes - held - pool.nbytes + outputs
    parts = held, pool.nbytes, memory.temp_size_in_bytes, other
    return (*parts, sum(parts), ahead_of_time.memory_size(target))


if __name__ == "__main__":
    sys.exit(main())
