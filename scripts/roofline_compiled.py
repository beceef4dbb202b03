"""What compilers count for the parts of a round that are not kernels, ahead of time, for chips that are not there.

Runs where ``scripts/ahead_of_time.py`` does. A compiler's count is not what crosses the memory bus, and is corrected:

* The body of a loop counts once. That is one step of a round, or the one turn in which a compaction takes all rows.
* A kernel's operations count as none, and on a GPU its bytes as all of the pool that it is given. So programs are
  compiled with a pool of two blocks, and what the kernels read comes from ``roofline_arithmetic.kernel_parts``.
* An array of which rows are gathered counts whole on a GPU: the embedding is cut to 16 rows, which changes no other
  number.
* On a TPU bytes in vector memory count too: a weight on its way through it three times. They are taken off again, by
  the module's text; see ``roofline_text``.
* On a TPU ``optimal_seconds`` has -1 added for each instruction whose time the compiler does not know. The sums here
  are well below a second, so what is left past the last whole one is the known part.

What stays in: of a conditional the dearer branch counts, so every token is drawn as from a cut distribution, with a
sort of its logits, and a GPU's caches are taken to hold nothing from one instruction to the next.

A GPU's compiler answers nothing without a GPU; there XLA's own analysis counts the instructions of the module that it
made. Layers are alike, so one and two are compiled and the rest follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ahead_of_time
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib import _jax
from jax.experimental import topologies
from roofline_arithmetic import BLOCK, Case
from roofline_text import known_seconds, vector_memory_bytes

from jaxkv import model as models
from jaxkv import triattention
from jaxkv.compact import compaction_widths
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.decode import Rows, compact_round, decode_round
from jaxkv.dims import ceil_div
from jaxkv.policies.triattention import TriAttention
from jaxkv.pool import KVPool
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats
from pallas_kernels import device

KINDS = (*ahead_of_time.TARGETS, *(kind for kind in ahead_of_time.TPU_TARGETS if kind != "TPU7x"))


@dataclasses.dataclass(frozen=True)
class Count:
    """What a compiler says of one program."""

    bytes: float
    operations: float
    optimal_seconds: float | None
    """Of the instructions whose time it knows; None where it says nothing."""

    def __sub__(self, other: Count) -> Count:
        known = None
        if self.optimal_seconds is not None and other.optimal_seconds is not None:
            known = self.optimal_seconds - other.optimal_seconds
        return Count(self.bytes - other.bytes, self.operations - other.operations, known)

    def plus(self, other: Count, times: int) -> Count:
        """Return the sum of this and ``times`` of the other."""
        known = None
        if self.optimal_seconds is not None and other.optimal_seconds is not None:
            known = self.optimal_seconds + times * other.optimal_seconds
        return Count(self.bytes + times * other.bytes, self.operations + times * other.operations, known)


def counts(kind: str, model: ModelConfig, case: Case, compacted: Case) -> dict[str, Count]:
    """Return the count of one decode step of a case, and of the compaction of another, on a chip of ``KINDS``."""
    found = {}
    for name, program, rows in (("step", _round, case), ("compaction", _compaction, compacted)):
        one, two = (_count(kind, *program(kind, dataclasses.replace(model, layers=n), rows)) for n in (1, 2))
        found[name] = one.plus(two - one, model.layers - 1)
    return found


def _count(kind: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Count:
    if kind in ahead_of_time.TARGETS:
        described = ahead_of_time._topology(kind)
    else:
        described = topologies.get_topology_desc(ahead_of_time._TPUS[kind][0], platform="tpu")
    mesh = jax.sharding.Mesh(np.array(described.devices[:1]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), args)
    with jax.set_mesh(mesh), device.target(kind):
        compiled: Any = jax.jit(function, donate_argnums=0).lower(*args).compile()
    analysis: Any = compiled.cost_analysis()
    if not analysis:
        (module,) = compiled.runtime_executable().hlo_modules()
        analysis = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    inside = 0 if kind in ahead_of_time.TARGETS else vector_memory_bytes(compiled.as_text())
    return Count(analysis["bytes accessed"] - inside, analysis["flops"], known_seconds(analysis))


def _pool(kind: str, model: ModelConfig, case: Case) -> tuple[KVPool, CacheConfig]:
    cache = CacheConfig(blocks=1, context=case.end, block_size=BLOCK, rows=case.rows, dtype="bfloat16")
    with device.target(kind):
        return KVPool.shapes(model, cache), cache


def _round(kind: str, model: ModelConfig, case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    pool, cache = _pool(kind, model, case)

    def function(pool: Any, weights: Any, rows: Any, steps: Any) -> Any:
        return decode_round(weights, pool, rows, steps, config=model)

    weights: Any = models.weight_shapes(model, jnp.bfloat16)
    if weights.head is not None:
        weights = weights.replace(embedding=jax.ShapeDtypeStruct((16, model.width), jnp.bfloat16))
    return function, (pool, weights, _shapes(Rows.idle(cache)), jax.ShapeDtypeStruct((), jnp.int32))


def _compaction(kind: str, model: ModelConfig, case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    pool, _ = _pool(kind, model, case)

    def function(pool: Any, *args: Any) -> Any:
        return compact_round(pool, *args, mode="per_head", lanes=case.rows)

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    table = array(case.rows, compaction_widths(ceil_div(case.end, BLOCK), BLOCK)[-1])
    each, due = array(case.rows), array(case.rows, dtype=jnp.bool_)
    budgets = Budgets(b_row=each, interval=each, window=each, sinks=each, pinned=each)
    mean = array(model.layers, model.heads, model.frequencies, dtype=jnp.float32)
    policy = TriAttention(phases=_shapes(triattention.Phases.of_model(model)), stats=QueryStats(mean, mean, mean))
    return function, (pool, table, table, each, each, due, budgets, policy)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)
