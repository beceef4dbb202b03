"""Paged attention of several queries a row, each with a slot of its own.

Grid: ``(query tiles, K, B)``. A program owns one row, one KV head and as many of the chunk's queries as fit, with all
their G heads: ``rows // G`` queries lie in ``rows`` vectors, so that each key is read once for all of them. It walks
the row's key tiles up to the newest slot among its queries, and normalises at the end.
Queries may stand in any order and at any slots: RoPE positions never get here. -1 is padding, and gives zeros.

Bytes: a program reads ``2 * n * D`` elements, n being its newest slot + 1, so a chunk of T queries reads the row
``ceil(T / (rows // G))`` times, mostly from the second-level cache: the tiles of a row and head are neighbours in the
grid. The floor is the tensor cores' from some hundred queries on: ``4 T n H D`` operations, and half as many
again for the second product with the weights' rounding errors.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.triton import online_softmax
from pallas_kernels.triton.online_softmax import LOWEST, Spec


def attend_chunk_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, slot_ref: Any, *refs: Any, spec: Spec, queries: int
) -> None:
    """One program: see the module's docstring. ``refs`` are sink logits, if there are any, output and log-sum-exp."""
    *sink_ref, out_ref, lse_ref = refs
    tile, kv_head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    rows, config, columns = spec.config.rows, spec.config, spec.columns
    index = jnp.arange(rows)
    # Rows past the last whole query are not used where G is no power of two.
    each = rows // spec.groups
    query = tile * each + lax.div(index, spec.groups)
    head = kv_head * spec.groups + lax.rem(index, spec.groups)
    real = (index < each * spec.groups) & (query < queries)
    own = pltriton.load(slot_ref.at[row, query], mask=real, other=-1)
    q = online_softmax.load_queries(q_ref, real, row, query, head, spec)
    top = jnp.full((rows,), LOWEST, jnp.float32)
    total = jnp.zeros((rows,), jnp.float32)
    if sink_ref:
        top = pltriton.load(sink_ref[0].at[head], mask=real, other=0.0).astype(jnp.float32)
        total = jnp.ones((rows,), jnp.float32)
    newest = jnp.max(own)
    oldest = jnp.min(jnp.where(own < 0, newest, own))
    top, total, out = online_softmax.fold(
        (top, total, jnp.zeros((rows, columns.shape[0]), jnp.float32)),
        online_softmax.first_tile(oldest, spec),
        lax.div(newest + config.slots, config.slots),
        q,
        own,
        k_ref,
        v_ref,
        table_ref,
        row,
        kv_head,
        spec,
    )
    some = jnp.where(total > 0, total, 1)
    mask = real[:, None] & (columns < spec.dim)[None, :]
    address = (row, query[:, None], head[:, None], columns[None, :])
    pltriton.store(out_ref.at[address], (out / some[:, None]).astype(out_ref.dtype), mask=mask)
    lse = jnp.where(own < 0, -jnp.inf, top + jnp.log(some))
    pltriton.store(lse_ref.at[row, query, head], lse, mask=real)


def attend_chunk(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B T"],
    spec: Spec,
    sink_logits: Float[Array, "H"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Return the output in q's dtype and the log-sum-exps."""
    rows, queries, heads, _ = q.shape
    kv_heads = k_pages.shape[1]
    sinks = () if sink_logits is None else (sink_logits,)
    return pl.pallas_call(
        functools.partial(attend_chunk_kernel, spec=spec, queries=queries),
        grid=(pl.cdiv(queries, spec.config.rows // spec.groups), kv_heads, rows),
        in_specs=[pl.no_block_spec] * (5 + len(sinks)),
        out_specs=[pl.no_block_spec] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, queries, heads), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=spec.config.warps, num_stages=spec.config.stages),
        interpret=interpret,
        name="attend_chunk",
    )(q, k_pages, v_pages, block_table, query_slots, *sinks)
