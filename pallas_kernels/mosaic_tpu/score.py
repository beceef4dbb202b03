"""Scores of cached keys against a few vectors a query head: ``max over o of k . w[o] + |k| . c``.

Grid: ``(B, ceil(M / blocks))``, in order. A program owns one tile of a row, whole blocks ``[K, P, D]`` for all heads,
and while it works the next tile that holds a slot is on its way, this row's or the next row's. Programs past a row's
end do nothing, and write nothing.

A key's two halves meet by a rotation of the lanes: lane f of ``sqrt(k^2 + rotated(k)^2)`` is ``|k|_f`` for f < F, and c
has zeros beyond. Both products are in the precision of float32: a bfloat16 key is taken as it is, w, c and ``|k|`` as
three bfloat16 numbers each.

Bytes: K is read once, D elements a slot and KV head, D being the pages' width, and ``4 G`` bytes, padded to 8 heads,
are written: 256 in and 32 out at D = 128 in bfloat16. The floor of a layer is ``2 B K n D / bandwidth`` seconds in
16 bits: for B = 8, K = 8, n = 2176, D = 128 36 MB, 44 us on a v5e and 22 us on a v6e.
"""

from __future__ import annotations

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
from pallas_kernels.mosaic_tpu.tiles import TileConfig
from pallas_kernels.mosaic_tpu.transfer import fetch


def score_kernel(
    table_ref: Any,
    length_ref: Any,
    w_ref: Any,
    c_ref: Any,
    k_hbm: Any,
    out_ref: Any,
    buffer: Any,
    place_ref: Any,
    semaphores: Any,
    *,
    width: int,
    bands: int,
    config: TileConfig,
    unrolled: bool,
) -> None:
    """One program: see the module's docstring. ``width`` is the table's, ``unrolled`` as in ``attend.Spec``."""
    row, tile, rows = pl.program_id(0), pl.program_id(1), pl.num_programs(0)
    block, columns = buffer.shape[3:]
    slots = config.blocks * block
    length = length_ref[row]

    def copies(action: Any, row: Any, tile: Any, place: Any) -> None:
        first = tile * config.blocks
        last = jnp.minimum(lax.div(length_ref[row] + block - 1, block), first + config.blocks)
        fetch(action, table_ref, row * width, first, last, first, (k_hbm,), (buffer.at[place],), semaphores.at[place])

    @pl.when((row == 0) & (tile == 0))
    def _() -> None:
        place_ref[0] = 0
        copies("start", row, tile, 0)

    # An empty row has one tile, of no block.
    @pl.when((tile == 0) | (tile * slots < length))
    def _() -> None:
        place = place_ref[0]
        more = (tile + 1) * slots < length

        @pl.when(more | (row + 1 < rows))
        def _() -> None:
            copies("start", jnp.where(more, row, row + 1), jnp.where(more, tile + 1, 0), 1 - place)

        copies("wait", row, tile, place)
        place_ref[0] = 1 - place
        held = tile * slots + lax.broadcasted_iota(jnp.int32, (slots, 1), 0) < length

        def head(index: Any, carry: Any) -> Any:
            k = buffer[place, :, index].reshape(slots, columns)
            # What lies past the length may be NaN. Its scores are nobody's, but a product mixes no slots.
            full = jnp.where(held, k.astype(jnp.float32), 0)
            turned = pltpu.roll(full, columns - bands, 1)
            norm = product(c_ref[0, index], jnp.sqrt(full * full + turned * turned), transposed=True)
            trig = product(w_ref[0, index], k, transposed=True)
            best = trig[: config.rows]
            for start in range(config.rows, trig.shape[0], config.rows):
                best = jnp.maximum(best, trig[start : start + config.rows])
            out_ref[0, index] = best + norm
            return carry

        lax.fori_loop(0, buffer.shape[2], head, None, unroll=unrolled)


def score(
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    w: Float[Array, "B O H D"],
    c: Float[Array, "B H F"],
    config: TileConfig,
    device: Device,
) -> Float[Array, "B K G S"]:
    """Return one score a slot, S = M * P; anything at and past ``length``. Pages may be wider than w."""
    batch, table_width = block_table.shape
    pool, kv_heads, block, columns = k_pages.shape
    offsets, heads, dim = w.shape[1:]
    groups, slots = heads // kv_heads, config.blocks * block
    lacking = config.rows - groups
    w = w.astype(jnp.float32).reshape(batch, offsets, kv_heads, groups, dim).transpose(0, 2, 1, 3, 4)
    w = jnp.pad(w, ((0, 0), (0, 0), (0, 0), (0, lacking), (0, columns - dim)))
    w = w.reshape(batch, kv_heads, offsets * config.rows, columns)
    c = c.astype(jnp.float32).reshape(batch, kv_heads, groups, dim // 2)
    c = jnp.pad(c, ((0, 0), (0, 0), (0, lacking), (0, columns - dim // 2)))
    programs = -(-table_width // config.blocks)
    unrolled = tiles.unrolled(kv_heads, device)
    table = jnp.clip(block_table, 0, pool - 1).astype(jnp.int32)

    def vectors(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, kv_heads, rows, columns), lambda row, tile, *_: (row, 0, 0, 0))

    def written(row: Any, tile: Any, _: Any, length: Any) -> tuple[Any, ...]:
        # A program past a row's end stays at the row's last tile, and nothing is written again.
        return row, 0, 0, jnp.minimum(tile, jnp.maximum(lax.div(length[row] + slots - 1, slots) - 1, 0))

    out = pl.pallas_call(
        functools.partial(score_kernel, width=table_width, bands=dim // 2, config=config, unrolled=unrolled),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, programs),
            in_specs=[vectors(offsets * config.rows), vectors(config.rows), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, kv_heads, config.rows, slots), written),
            scratch_shapes=[
                pltpu.VMEM((2, config.blocks, kv_heads, block, columns), k_pages.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, config.rows, programs * slots), jnp.float32),
        compiler_params=tiles.compiler_params(device, "arbitrary", "arbitrary"),
        interpret=device.interpret,
        name="score",
    )(table.reshape(-1), length.astype(jnp.int32), w, c, k_pages)
    return out[:, :, :groups, : table_width * block]
