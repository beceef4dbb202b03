"""The planner's figures beside those of the compiler, for chips that are not there.

    scripts/aot_env.sh .venv-aot && .venv-aot/bin/python scripts/plan_proof.py

Compiles what the engine runs (the decode round, the prefill chunk, the compaction) with abstract weights: nothing is
allocated. What a program takes is its arguments, temporaries and outputs, less what is donated; what all of it takes is
weights and pool, and the most that one of the programs takes beside these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ahead_of_time
import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import facts, planner, quant, triattention
from jaxkv import model as models
from jaxkv.compact import compaction_widths
from jaxkv.compression import CompressionConfig
from jaxkv.config import CacheConfig, ModelConfig, RopeConfig
from jaxkv.decode import Chunk, Rows, compact_round, decode_round, prefill_chunk
from jaxkv.planner import GIB, Plan
from jaxkv.policies.triattention import TriAttention
from jaxkv.pool import KVPool
from jaxkv.sampling import Seen
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats
from pallas_kernels import device

CONTEXT = 32768
LARGEST = 0
"""In the place of a number of rows: the planner's largest batch."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is planned and compiled."""

    model: str
    device: str
    weights: str
    rows: int
    budget: int | None
    context: int = CONTEXT

    def plan(self, layers: int | None) -> Plan:
        """Return the plan, of fewer layers than the model has if a number is given."""
        found = facts.read(self.model)
        if layers is not None:
            found = dataclasses.replace(found, raw={**found.raw, "num_hidden_layers": layers})
        method = {} if self.budget is None else {"method": "triattention", "budget": self.budget}
        options = {"weights": self.weights, "compression": CompressionConfig(**method), "context": self.context}
        plan = Plan(found, planner.device(self.device), **options)
        return dataclasses.replace(plan, rows=self.rows or plan.max_batch)


CASES = (
    Case("Qwen/Qwen3-32B", "rtx4090", "int4", 1, None),
    Case("Qwen/Qwen3-32B", "rtx4090", "int4", 1, 12000),
    Case("Qwen/Qwen3-32B", "rtx4090", "int4", 1, 2048),
    Case("Qwen/Qwen3-32B", "rtx4090", "int4", LARGEST, 2048),
    Case("Qwen/Qwen3-8B", "h200", "bfloat16", 1, None),
    Case("Qwen/Qwen3-8B", "h200", "bfloat16", LARGEST, None),
    Case("Qwen/Qwen3-8B", "h200", "bfloat16", LARGEST, 2048),
    Case("meta-llama/Llama-3.1-8B", "v5e", "bfloat16", 1, 2048),
    Case("meta-llama/Llama-3.1-8B", "v5e", "int4", 1, None),
    Case("meta-llama/Llama-3.1-8B", "v5e", "int4", LARGEST, 2048),
)
PROGRAMS = ("decode", "prefill", "compaction")


def main() -> int:
    """Compile the cases and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", type=int, action="append", help="numbers from 0 (default: all)")
    parser.add_argument("--layers", type=int, help="fewer layers compile faster (default: the model's)")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead")
    args = parser.parse_args()
    chosen = CASES if args.case is None else [CASES[number] for number in args.case]
    found = []
    if not args.json:
        print(f"JAX {jax.__version__}; GiB: {'; '.join(PROGRAMS)}")
    for case in chosen:
        plan = case.plan(args.layers)
        result = measure(plan, [name for name in args.programs.split(",") if name in plan_programs(plan)])
        found.append(result)
        if not args.json:
            print(row(plan, result), flush=True)
    if args.json:
        print(json.dumps(found))
    return int(any(abs(one["difference"]) > 0.03 for one in found))


def row(plan: Plan, result: dict[str, Any]) -> str:
    """Return a row of the table in ``docs/planner.md``."""
    kept = "all" if plan.budget is None else f"{plan.budget.b_row:,}"
    others = "; ".join(
        f"{result['temporaries'][name] / GIB:.3f} ({result['planned_temporaries'][name] / GIB:.3f})"
        for name in result["temporaries"]
    )
    sizes = " | ".join(f"{result[name] / GIB:.3f}" for name in ("weights", "pool", "compiled", "planned"))
    return (
        f"| {plan.model.name}, {plan.weights} | {plan.device.name} | {plan.rows} | {kept} | {others} | {sizes} | "
        f"{result['difference']:+.2%} | {result['seconds']:.0f} s |"
    )


def measure(plan: Plan, programs: list[str]) -> dict[str, Any]:
    """Compile some of the engine's programs for a plan; return bytes as the compiler and as the planner have them."""
    start, sizes = time.perf_counter(), plan.sizes(plan.rows, plan.tokens)
    beside, copies, weights, pool = {}, [], _bytes(_weights(plan)), 0
    for name in programs:
        with device.target(plan.device.kind):
            function, pool_shapes, weight_shapes, rest = _BUILDERS[name](plan)
        pool = pool_shapes.nbytes
        given = (pool_shapes, *(() if weight_shapes is None else (weight_shapes,)), *rest)
        program = ahead_of_time.compile_for(plan.device.kind, function, *given, donate=(0,))
        memory = program.memory
        taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        taken += memory.output_size_in_bytes - memory.alias_size_in_bytes
        beside[name] = taken - pool - _bytes(weight_shapes)
        copies += program.copies(pool_shapes.k[0].size)
    compiled = weights + pool + max(beside.values())
    planned = {name: sizes.temporaries[name] for name in programs}
    total = sizes.weights + sizes.pool + max(planned.values())
    return {
        "weights": weights,
        "planned_weights": sizes.weights,
        "pool": pool,
        "planned_pool": sizes.pool,
        "temporaries": beside,
        "planned_temporaries": planned,
        "compiled": compiled,
        "planned": total,
        "difference": total / compiled - 1,
        "copies": copies,
        "seconds": time.perf_counter() - start,
    }


# -- programs ---------------------------------------------------------------------------------------------------------


def plan_programs(plan: Plan) -> tuple[str, ...]:
    """Return the programs that the engine has for a plan."""
    return PROGRAMS if plan.budget is not None else PROGRAMS[:2]


def _decode(plan: Plan) -> tuple[Callable[..., Any], KVPool, Any, tuple[Any, ...]]:
    config, cache = model_config(plan), _cache(plan)

    def function(pool: Any, weights: Any, rows: Any, steps: Any) -> Any:
        return decode_round(weights, pool, rows, steps, config=config, max_steps=cache.round_steps)

    rows = _shapes(Rows.idle(cache)).replace(seen=_seen(plan))
    return function, KVPool.shapes(config, cache), _weights(plan), (rows, _array(dtype="int32"))


def _prefill(plan: Plan) -> tuple[Callable[..., Any], KVPool, Any, tuple[Any, ...]]:
    config, cache = model_config(plan), _cache(plan)

    def function(pool: Any, weights: Any, chunk: Any) -> Any:
        return prefill_chunk(weights, pool, chunk, config=config)

    chunk = _shapes(Chunk.idle(cache)).replace(seen=_seen(plan))
    return function, KVPool.shapes(config, cache), _weights(plan), (chunk,)


def _compaction(plan: Plan) -> tuple[Callable[..., Any], KVPool, Any, tuple[Any, ...]]:
    config, cache = model_config(plan), _cache(plan)

    def function(pool: Any, *args: Any) -> Any:
        return compact_round(pool, *args, mode="per_head", lanes=plan.rows)

    width = compaction_widths(cache.table_width, cache.block_size)[-1]
    rows, table = _array(plan.rows, dtype="int32"), _array(plan.rows, width, dtype="int32")
    budgets = Budgets(b_row=rows, interval=rows, window=rows, sinks=rows, pinned=rows)
    mean = _array(config.layers, config.heads, config.frequencies)
    policy = TriAttention(_shapes(triattention.Phases.of_model(config, plan.tokens)), QueryStats(mean, mean, mean))
    due = _array(plan.rows, dtype="bool")
    return function, KVPool.shapes(config, cache), None, (table, table, rows, rows, due, budgets, policy)


_BUILDERS = {"decode": _decode, "prefill": _prefill, "compaction": _compaction}


def model_config(plan: Plan) -> ModelConfig:
    """Return the decoder that a plan is of. Its RoPE has no bytes."""
    model = plan.model
    return ModelConfig(
        model.model_type,
        vocab_size=model.vocabulary,
        width=model.width,
        mlp_width=model.mlp_width,
        layers=len(model.kinds),
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        context=plan.tokens,
        rope=RopeConfig(theta=1e6),
        tied_head=model.tied_head,
        qkv_bias=model.model_type == "qwen2",
        qk_norm=model.model_type == "qwen3",
        name=model.name,
    )


def _cache(plan: Plan) -> CacheConfig:
    blocks = plan.sizes(plan.rows, plan.tokens).blocks
    shape = {"block_size": planner.BLOCK_SIZE, "prefill_chunk": planner.PREFILL_CHUNK}
    return CacheConfig(blocks=blocks, context=plan.tokens, rows=plan.rows, dtype=plan.kv_dtype, **shape)


def _weights(plan: Plan) -> Any:
    plain = models.weight_shapes(model_config(plan), jnp.bfloat16)
    return quant.abstract(plain, plan.weights) if plan.weights in quant.KINDS else plain


def _seen(plan: Plan) -> Any:
    return jax.eval_shape(lambda: Seen.create(plan.rows, plan.model.vocabulary))


def _array(*shape: int, dtype: Any = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: _array(*np.shape(x), dtype=np.asarray(x).dtype), tree)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    sys.exit(main())
