"""Paged attention: one query a row, or several with a slot each.

Grid: ``(B, query tiles)``, in order. A program owns one row and up to 256 query vectors of each of its KV heads: all
of them while decoding. It walks the row's key tiles from the first that a query sees to the newest query's; a tile is a
few whole blocks ``[K, P, D]``, each one contiguous copy out of HBM, for all heads. While a tile is at work the next one
is on its way: the program's own, or the first of the program after it, so that only the first tile of all is waited
for. What a row holds decides how its keys are grouped, so its bits depend on neither its neighbours nor the table's
width. Blocks past the newest slot, and before the window, are not read.

Bytes: a row of n slots reads ``2 n K D`` elements of K and V once while decoding, D being the pages' width. In 16 bits
the floor of a layer is ``4 B K n D / bandwidth`` seconds: B = 8, K = 8, n = 2176, D = 128 are 71 MB, 87 us on a v5e
(0.82 TB/s) and 43 us on a v6e (1.64 TB/s). The G heads of a KV head share each key: their vectors, padded to 8, and the
two pieces of each weight lie below one another in the matrix unit.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.device import Device
from pallas_kernels.mosaic_tpu import tiles
from pallas_kernels.mosaic_tpu.products import product
from pallas_kernels.mosaic_tpu.tiles import LANES, TileConfig
from pallas_kernels.mosaic_tpu.transfer import fetch

LOWEST = -1e30
"""The maximum of a query that has seen no key: finite, so that no inf - inf makes a NaN."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of an attention call when it is compiled; ``width`` is the table's."""

    block: int
    kv_heads: int
    width: int
    scale: float
    window: int | None
    softcap: float | None
    config: TileConfig
    unrolled: bool
    """Whether the program's text has every KV head, so that one's products overlap with another's exponentials."""

    @property
    def slots(self) -> int:
        """Slots of a key tile."""
        return self.config.blocks * self.block


def attend_kernel(
    table_ref: Any,
    low_ref: Any,
    newest_ref: Any,
    own_ref: Any,
    q_ref: Any,
    *refs: Any,
    spec: Spec,
    sinks: bool,
    lse: bool,
) -> None:
    """One program: see the module's docstring."""
    *inputs, k_hbm, v_hbm = refs[: 2 + sinks]
    out_ref, *lse_ref = refs[2 + sinks : 3 + sinks + lse]
    k_buffer, v_buffer, top_ref, total_ref, sum_ref, place_ref, semaphores = refs[3 + sinks + lse :]
    programs = pl.num_programs(0) * pl.num_programs(1)
    program = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    low, newest = low_ref[program], newest_ref[program]

    def tiles_of(program: Any) -> tuple[Any, Any]:
        first = lax.div(low_ref[program], spec.slots)
        # A program that sees nothing has one tile, of no block.
        return first, jnp.maximum(lax.div(newest_ref[program] + spec.slots, spec.slots), first + 1)

    def copies(action: Any, program: Any, tile: Any, place: Any) -> None:
        first, last = lax.div(low_ref[program], spec.block), lax.div(newest_ref[program] + spec.block, spec.block)
        origin = tile * spec.config.blocks
        base = lax.div(program, pl.num_programs(1)) * spec.width
        first, last = jnp.maximum(first, origin), jnp.minimum(last, origin + spec.config.blocks)
        buffers = (k_buffer.at[place], v_buffer.at[place])
        fetch(action, table_ref, base, first, last, origin, (k_hbm, v_hbm), buffers, semaphores.at[place])

    first, last = tiles_of(program)

    @pl.when(program == 0)
    def _() -> None:
        place_ref[0] = 0
        copies("start", program, first, 0)

    top_ref[...] = jnp.full_like(top_ref, LOWEST)
    total_ref[...] = jnp.zeros_like(total_ref)
    if sinks:
        # A sink is one more key with this logit and no value.
        top_ref[...] = jnp.broadcast_to(inputs[0][...], top_ref.shape)
        total_ref[...] = jnp.ones_like(total_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)

    def body(tile: Any, place: Any) -> Any:
        following = jnp.minimum(program + 1, programs - 1)
        more = tile + 1 < last

        @pl.when(more | (program + 1 < programs))
        def _() -> None:
            copies(
                "start",
                jnp.where(more, program, following),
                jnp.where(more, tile + 1, tiles_of(following)[0]),
                1 - place,
            )

        copies("wait", program, tile, place)
        start = tile * spec.slots

        # What lies outside of what is seen may be NaN, or was never read, and 0 * NaN is NaN.
        @pl.when((start < low) | (start + spec.slots > newest + 1))
        def _() -> None:
            shape = v_buffer.shape[1:]
            slot = start + _iota(shape, 0) * spec.block + _iota(shape, 2)
            held = (slot >= low) & (slot <= newest)
            v_buffer[place] = jnp.where(held, v_buffer[place].astype(jnp.float32), 0).astype(v_buffer.dtype)

        fold = functools.partial(_fold, place=place, start=start, own=own_ref[0], spec=spec)
        state = (q_ref, k_buffer, v_buffer, top_ref, total_ref, sum_ref)
        lax.fori_loop(
            0,
            spec.kv_heads,
            lambda head, _: fold(head, *state),
            None,
            unroll=spec.unrolled,
        )
        return 1 - place

    place_ref[0] = lax.fori_loop(first, last, body, place_ref[0])
    total = total_ref[...]
    some = jnp.where(total > 0, total, 1)
    out_ref[0] = (sum_ref[...] / some[..., :1]).astype(out_ref.dtype)
    if lse:
        lse_ref[0][0] = jnp.where(own_ref[0][None] < 0, -jnp.inf, top_ref[...] + jnp.log(some))[..., :1]


def _fold(
    head: Any,
    q_ref: Any,
    k_buffer: Any,
    v_buffer: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    *,
    place: Any,
    start: Any,
    own: Any,
    spec: Spec,
) -> None:
    """Fold one head's keys of a tile into its running softmax (arXiv 2112.05682)."""
    k = k_buffer[place, :, head].reshape(spec.slots, -1)
    logits = product(q_ref[0, head], k, transposed=True) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * jnp.tanh(logits / spec.softcap)
    slot = start + _iota((1, spec.slots), 1)
    seen = slot <= own
    if spec.window is not None:
        seen &= slot > own - spec.window
    logits = jnp.where(seen, logits, -jnp.inf)
    top = top_ref[head]
    higher = jnp.maximum(top, jnp.max(logits, axis=1, keepdims=True))
    weight, fade = jnp.exp(logits - higher[:, :1]), jnp.exp(top - higher)
    top_ref[head] = higher
    total_ref[head] = total_ref[head] * fade + jnp.sum(weight, axis=1, keepdims=True)
    v = v_buffer[place, :, head].reshape(spec.slots, -1)
    # Weights in one bfloat16 number each would cost the output more than its last place.
    added = product(weight, v, pieces=2 if v.dtype == jnp.bfloat16 else 3)
    sum_ref[head] = sum_ref[head] * fade[:, :1] + added


def _iota(shape: tuple[int, ...], axis: int) -> Any:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def attend(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B T"],
    spec: Spec,
    sink_logits: Float[Array, "H"] | None,
    return_lse: bool,
    device: Device,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"] | None]:
    """Return the output in q's dtype, and the log-sum-exps if asked for. Pages may be wider than q."""
    batch, queries, heads, dim = q.shape
    pool, kv_heads, _, width = k_pages.shape
    groups, rows = heads // kv_heads, spec.config.rows
    programs = -(-queries * groups // rows)
    used, padding = queries * groups, programs * rows - queries * groups
    x = q.reshape(batch, queries, kv_heads, groups, dim).transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, used, dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, width - dim)))
    own = jnp.pad(jnp.repeat(query_slots, groups, axis=1), ((0, 0), (0, padding)), constant_values=-1)
    own = own.astype(jnp.int32)
    low, newest = seen_range(own.reshape(batch, programs, rows), spec.window)
    table = jnp.clip(block_table, 0, pool - 1).astype(jnp.int32)

    def by_rows(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, tile, *_: (row, *(0,) * (len(shape) - 2), tile, 0))

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs, specs = [own[..., None], x], [by_rows(rows, 1), by_rows(kv_heads, rows, width)]
    if sink_logits is not None:
        sinks = jnp.tile(sink_logits.astype(jnp.float32).reshape(kv_heads, 1, groups), (1, queries, 1))
        inputs.append(jnp.pad(sinks.reshape(kv_heads, used), ((0, 0), (0, padding)))[..., None])
        specs.append(pl.BlockSpec((kv_heads, rows, 1), lambda row, tile, *_: (0, tile, 0)))
    outputs = [jax.ShapeDtypeStruct(x.shape, q.dtype)]
    out_specs = [by_rows(kv_heads, rows, width)]
    if return_lse:
        outputs.append(jax.ShapeDtypeStruct((*x.shape[:3], 1), jnp.float32))
        out_specs.append(by_rows(kv_heads, rows, 1))
    buffer = pltpu.VMEM((2, spec.config.blocks, *k_pages.shape[1:]), k_pages.dtype)
    state = [pltpu.VMEM((kv_heads, rows, columns), jnp.float32) for columns in (LANES, LANES, width)]
    scratch = [buffer, buffer, *state, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2,))]
    out, *lse = pl.pallas_call(
        functools.partial(attend_kernel, spec=spec, sinks=sink_logits is not None, lse=return_lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, programs),
            in_specs=[*specs, hbm, hbm],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=outputs,
        compiler_params=tiles.compiler_params(device, "arbitrary", "arbitrary"),
        interpret=device.interpret,
        name="attend_decode" if queries == 1 else "attend_chunk",
    )(table.reshape(-1), low.reshape(-1), newest.reshape(-1), *inputs, k_pages, v_pages)

    def back(y: Array) -> Array:
        y = y[:, :, :used].reshape(batch, kv_heads, queries, groups, -1)
        return y.transpose(0, 2, 1, 3, 4).reshape(batch, queries, heads, -1)

    return back(out[..., :dim]), back(lse[0])[..., 0] if lse else None


def seen_range(own: Int[Array, "B X R"], window: int | None) -> tuple[Int[Array, "B X"], Int[Array, "B X"]]:
    """Return the first and the newest slot that any of a program's queries sees; 0 and -1 where none sees any."""
    newest = jnp.max(own, axis=-1)
    if window is None:
        return jnp.zeros_like(newest), newest
    oldest = jnp.min(jnp.where(own < 0, newest[..., None], own), axis=-1)
    return jnp.maximum(oldest - window + 1, 0), newest
