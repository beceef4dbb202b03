"""Paged attention of one query a row, split over the row's keys.

Grid: ``(B, K, S)``. A program owns one row, one KV head with its G query heads, and one of S runs of the row's key
tiles. It writes an unnormalised output, a maximum and a total in float32, and XLA merges the S of them by log-sum-exp
(arXiv 2112.05682; the split is Flash-Decoding's, Dao et al. 2023). How many tiles a run has follows from the row's own
length, and S from batch and chip, so a row's bits depend on neither its neighbours nor the table's width.

Bytes: a row of n slots reads ``2 n K D`` elements of K and V once, 16 bytes a thread, and each program writes
``G * (D + 2)`` floats, under 1 % of what it reads from seven tiles up. In 16 bits the floor of a layer is
``4 B K n D / bandwidth`` seconds: B = 8, K = 8, n = 2176, D = 128 are 71 MB, 71 us on an RTX 4090 (1.0 TB/s) and 15 us
on an H200 (4.8 TB/s). The G heads share each key, and their products on tensor cores, which take 16 rows however few
of them are used, hide behind the reads.
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


def attend_decode_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    slot_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    *,
    spec: Spec,
) -> None:
    """One program: see the module's docstring."""
    row, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    rows, config = spec.config.rows, spec.config
    newest = slot_ref[row, 0]
    group, columns = jnp.arange(rows), spec.columns
    real = group < spec.groups
    zero = jnp.zeros_like(group)
    q = online_softmax.load_queries(q_ref, real, row, zero, kv_head * spec.groups + group, spec)
    begin = online_softmax.first_tile(newest, spec)
    end = lax.div(newest + config.slots, config.slots)
    share = lax.div(end - begin + config.splits - 1, config.splits)
    first = begin + split * share
    carry = (
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns.shape[0]), jnp.float32),
    )
    top, total, out = online_softmax.fold(
        carry,
        first,
        jnp.minimum(first + share, end),
        q,
        zero + newest,
        k_ref,
        v_ref,
        table_ref,
        row,
        kv_head,
        spec,
    )
    mask = real[:, None] & (columns < spec.dim)[None, :]
    pltriton.store(out_ref.at[row, kv_head, split, group[:, None], columns[None, :]], out, mask=mask)
    pltriton.store(top_ref.at[row, kv_head, split, group], top, mask=real)
    pltriton.store(total_ref.at[row, kv_head, split, group], total, mask=real)


def attend_decode(
    q: Float[Array, "B 1 H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B 1"],
    spec: Spec,
    sink_logits: Float[Array, "H"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B 1 H D"], Float[Array, "B 1 H"]]:
    """Return the output in q's dtype and the log-sum-exps."""
    rows, _, heads, dim = q.shape
    kv_heads, splits = k_pages.shape[1], spec.config.splits
    partial = (rows, kv_heads, splits, spec.groups)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*partial, dim), partial, partial)]
    out, top, total = pl.pallas_call(
        functools.partial(attend_decode_kernel, spec=spec),
        grid=(rows, kv_heads, splits),
        in_specs=[pl.no_block_spec] * 5,
        out_specs=[pl.no_block_spec] * 3,
        out_shape=shapes,
        compiler_params=pltriton.CompilerParams(num_warps=spec.config.warps, num_stages=spec.config.stages),
        interpret=interpret,
        name="attend_decode",
    )(q, k_pages, v_pages, block_table, query_slots)
    out, lse = _merge(out, top, total, sink_logits)
    lse = jnp.where(query_slots[:, :, None] < 0, -jnp.inf, lse.reshape(rows, 1, heads))
    return out.reshape(q.shape).astype(q.dtype), lse


def _merge(
    out: Float[Array, "B K S G D"],
    top: Float[Array, "B K S G"],
    total: Float[Array, "B K S G"],
    sink_logits: Float[Array, "H"] | None,
) -> tuple[Float[Array, "B K G D"], Float[Array, "B K G"]]:
    highest = jnp.max(top, axis=2)
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(highest.shape[1:])
        highest = jnp.maximum(highest, sinks)
    weight = jnp.exp(top - highest[:, :, None])
    summed = jnp.sum(total * weight, axis=2)
    if sink_logits is not None:
        summed += jnp.exp(sinks - highest)
    some = jnp.where(summed > 0, summed, 1)
    merged = jnp.sum(out * weight[..., None], axis=2) / some[..., None]
    return merged, jnp.where(summed > 0, highest + jnp.log(some), -jnp.inf)
