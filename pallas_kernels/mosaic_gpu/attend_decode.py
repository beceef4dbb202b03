"""Paged attention of one query a row for Hopper: pages by TMA, products by wgmma, split over the row's keys.

Grid: ``(B * K, S)``, one warpgroup of 128 threads a program. A program owns one row, one KV head with its G query
heads, and one of S runs of the row's key tiles. A tile is several pages of K and of V: each page [P, D] of the head,
or the part of a larger one that a tile takes, is one copy by the tensor memory accelerator, addressed through the
block table. The copies of a tile run ahead of its arithmetic by as many tiles as there are stages. The warpgroup that
has used a stage refills it, so barriers at which copies arrive, one a stage for K and one for V, are all the
synchronisation there is.

wgmma multiplies 64 rows. The G heads lie in rows ``0 .. G - 1`` and once more in ``32 .. 32 + G - 1``; both compute
the same weights. The first copy multiplies V by the weights rounded to the pages' type, the second by what the
rounding left, and XLA adds the two: the precision of a second product, at the price of none. What the rows between
hold is never set and never looked at, since a row of a product depends on that row alone.

Partial outputs, maxima (of logits in base 2) and totals are float32, and XLA merges the S of them by log-sum-exp
(arXiv 2112.05682; the split is Flash-Decoding's, Dao et al. 2023). How many tiles a run has follows from the row's own
length, and S from batch and chip, so a row's bits depend on neither its neighbours nor the table's width.

Bytes: a row of n slots reads ``4 n K D`` bytes of K and V once, 16 or 32 KiB a tile, and each program writes ``8 G D +
512``: at n = 2176, S = 8, D = 128 and G = 4 it reads 139 KB and writes 4.6 KB. The floor of a layer is ``4 B K n D /
bandwidth`` seconds: B = 8, K = 8 at those are 71 MB, 15 us on an H200 (4.8 TB/s).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu.tiles import HALF, LEAST_BLOCK, ROWS, TileConfig

LOWEST = -1e30
"""The maximum of a query that has seen no key: finite, so that no inf - inf makes a NaN."""

CHUNK = 64
"""Dimensions of the output that one product makes: 128 bytes of a row of V, the widest that wgmma reads at once."""

_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of a call when it is compiled."""

    block: int
    kv_heads: int
    groups: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None
    config: TileConfig

    @property
    def piece(self) -> int:
        """Slots that one copy brings: a page, or the part of a larger page that a tile takes."""
        return min(self.block, self.config.slots)

    @property
    def pieces(self) -> int:
        """Copies that bring the keys of a tile."""
        return self.config.slots // self.piece

    @property
    def chunks(self) -> int:
        """Products that make the output."""
        return self.dim // CHUNK


@dataclasses.dataclass(frozen=True)
class Loader:
    """Brings the pages of one row and KV head into the stages, a piece at a time."""

    spec: Spec
    table: Any
    row: Any
    kv_head: Any
    newest: Any
    routes: tuple[tuple[Any, Any, Any], ...]
    """(pieces ``[N * K * P / piece, piece, D]``, stages, barriers) of K and of V."""

    def find(self, tile: Any) -> list[Any]:
        """Return where the pieces of a tile lie; those past the row's end lie in the null block."""
        spec, found = self.spec, []
        for piece in range(spec.pieces):
            slot = tile * spec.config.slots + piece * spec.piece
            index = lax.div(slot, spec.block)
            block = self.table[self.row, jnp.minimum(index, self.table.shape[1] - 1)]
            page = jnp.where(slot <= self.newest, block, 0) * spec.kv_heads + self.kv_head
            found.append(page * (spec.block // spec.piece) + lax.div(slot - index * spec.block, spec.piece))
        return found

    def start(self, stage: Any, places: list[Any]) -> None:
        """Start the copies of a tile into a stage that nobody reads any more."""
        for ref, tiles, arrived in self.routes:
            for piece, place in enumerate(places):
                part = tiles.at[stage, pl.ds(piece * self.spec.piece, self.spec.piece)]
                plgpu.copy_gmem_to_smem(ref.at[place], part, arrived.at[stage])


def attend_decode_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    slot_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    q_tile: Any,
    k_tiles: Any,
    v_tiles: Any,
    weight_tile: Any,
    out_tile: Any,
    top_row: Any,
    total_row: Any,
    q_arrived: Any,
    k_arrived: Any,
    v_arrived: Any,
    *,
    spec: Spec,
) -> None:
    """One program: see the module's docstring."""
    pair, split = lax.axis_index("pair"), lax.axis_index("split")
    row, kv_head = lax.div(pair, spec.kv_heads), lax.rem(pair, spec.kv_heads)
    slots, stages = spec.config.slots, spec.config.stages
    newest = slot_ref[row]
    oldest = jnp.int32(0) if spec.window is None else jnp.maximum(newest - spec.window + 1, 0)
    begin, end = lax.div(oldest, slots), lax.div(newest + slots, slots)
    share = lax.div(end - begin + spec.config.splits - 1, spec.config.splits)
    first = begin + split * share
    last = jnp.maximum(first, jnp.minimum(first + share, end))
    routes = ((k_ref, k_tiles, k_arrived), (v_ref, v_tiles, v_arrived))
    loader = Loader(spec, table_ref, row, kv_head, newest, routes)

    for part in range(q_ref.shape[0]):
        for start in (0, HALF):
            rows = q_tile.at[part, pl.ds(start, q_ref.shape[2])]
            plgpu.copy_gmem_to_smem(q_ref.at[part, pair], rows, q_arrived)
    for ahead in range(stages):

        @pl.when(first + ahead < last)
        def _(ahead: int = ahead) -> None:
            loader.start(ahead, loader.find(first + ahead))

    plgpu.barrier_wait(q_arrived)

    def fold(index: Any, carry: tuple[Any, ...], *, ragged: bool) -> tuple[Any, ...]:
        """Fold one tile into (maximum, total, chunks of the output); a ragged one has slots that are not seen."""
        top, total, *out = carry
        stage = lax.rem(index - first, stages)
        # Read before the arithmetic and used after it, which hides the latency of the table.
        following = loader.find(index + stages)
        plgpu.barrier_wait(k_arrived.at[stage])
        logits = _logits(q_tile, k_tiles.at[stage], spec)
        if ragged:
            slot = _iota(logits.shape, 1) + index * slots
            logits = jnp.where((slot >= oldest) & (slot <= newest), logits, -jnp.inf)
        higher = jnp.maximum(top, logits.max(axis=1))
        weight = jnp.exp2(logits - lax.broadcast_in_dim(higher, logits.shape, [0]))
        fade = jnp.exp2(top - higher)
        total = total * fade + weight.sum(axis=1)
        rest = weight - weight.astype(weight_tile.dtype).astype(jnp.float32)
        halves = jnp.where(_iota(weight.shape, 0) < HALF, weight, rest).astype(weight_tile.dtype)
        # Else the compiler puts the sums off until after the products, and the weights hold registers meanwhile.
        total, fade, halves = lax.optimization_barrier((total, fade, halves))
        weight_tile[...] = halves
        plgpu.barrier_wait(v_arrived.at[stage])
        if ragged:
            _clear(v_tiles.at[stage], index * slots, oldest, newest)
        plgpu.commit_smem()
        for chunk in range(spec.chunks):
            new = _product(weight_tile, v_tiles.at[stage, :, pl.ds(chunk * CHUNK, CHUNK)])
            faded = out[chunk] * lax.broadcast_in_dim(fade, new.shape, [0])
            out[chunk] = lax.optimization_barrier(faded + new)

        @pl.when(index + stages < last)
        def _() -> None:
            loader.start(stage, following)

        return (higher, total, *out)

    carry = (
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
        *[plgpu.layout_cast(jnp.zeros((ROWS, CHUNK), jnp.float32), plgpu.Layout.WGMMA)] * spec.chunks,
    )
    # Only the first tile of a window and the last of a row have slots to mask: the others go without.
    whole = jnp.clip(lax.div(oldest + slots - 1, slots), first, last)
    tail = jnp.clip(lax.div(newest + 1, slots), whole, last)
    if spec.window is not None:
        carry = lax.fori_loop(first, whole, functools.partial(fold, ragged=True), carry)
    carry = lax.fori_loop(whole, tail, functools.partial(fold, ragged=False), carry)
    top, total, *out = lax.fori_loop(tail, last, functools.partial(fold, ragged=True), carry)

    top_row[...], total_row[...] = top, total
    for chunk, values in enumerate(out):
        out_tile[...] = values
        plgpu.commit_smem()
        for half in range(2):
            place = out_ref.at[pair, split, half, :, pl.ds(chunk * CHUNK, CHUNK)]
            plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(half * HALF, spec.groups)], place)
        plgpu.wait_smem_to_gmem(0)
    plgpu.copy_smem_to_gmem(top_row, top_ref.at[pair, split])
    plgpu.copy_smem_to_gmem(total_row, total_ref.at[pair, split])
    plgpu.wait_smem_to_gmem(0)


def _logits(q_tile: Any, k_tile: Any, spec: Spec) -> Any:
    """Return the scaled and capped logits of a tile, in base 2: exp2 is what the hardware has."""

    def product(accumulator: Any) -> Any:
        for part in range(q_tile.shape[0]):
            plgpu.wgmma(accumulator, q_tile.at[part], k_tile.transpose((1, 0)))
        return accumulator[...]

    logits = pl.run_scoped(product, plgpu.ACC((ROWS, spec.config.slots), jnp.float32))
    if spec.softcap is None:
        return logits * (spec.scale * _LOG2E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): the hardware's own is good to 11 bits.
    grown = jnp.exp2(logits * (spec.scale / spec.softcap * 2 * _LOG2E))
    return (1 - 2 / (grown + 1)) * (spec.softcap * _LOG2E)


def _product(weight_tile: Any, v_tile: Any) -> Any:
    def product(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, weight_tile, v_tile)
        return accumulator[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, v_tile.shape[1]), jnp.float32))


def _clear(v_tile: Any, start: Any, oldest: Any, newest: Any) -> None:
    """Zero the values that the query does not see: they may be NaN, and 0 * NaN is NaN."""
    for chunk in range(v_tile.shape[1] // CHUNK):
        columns = v_tile.at[:, pl.ds(chunk * CHUNK, CHUNK)]
        values = columns[...]
        slot = _iota(values.shape, 0) + start
        columns[...] = jnp.where((slot >= oldest) & (slot <= newest), values, jnp.zeros_like(values))


def _iota(shape: tuple[int, ...], dimension: int) -> Any:
    return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA)


def attend_decode(
    q: Float[Array, "B 1 H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B 1"],
    spec: Spec,
    sink_logits: Float[Array, "H"] | None = None,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "B 1 H D"], Float[Array, "B 1 H"]]:
    """Return the output in q's dtype and the log-sum-exps."""
    rows, _, heads, width = q.shape
    config, dtype, pairs, dim = spec.config, k_pages.dtype, rows * spec.kv_heads, spec.dim
    queries = _queries(q.reshape(pairs, spec.groups, width), dtype, dim)
    # Rows of 128 bytes in groups of 8, permuted as both the memory accelerator and wgmma know it.
    tiled = (plgpu.TilingTransform((LEAST_BLOCK, CHUNK)), plgpu.SwizzleTransform(128))
    partial = (pairs, config.splits)
    kernel = plgpu.kernel(
        functools.partial(attend_decode_kernel, spec=spec),
        out_type=[
            jax.ShapeDtypeStruct((*partial, 2, spec.groups, dim), jnp.float32),
            *[jax.ShapeDtypeStruct((*partial, ROWS), jnp.float32)] * 2,
        ],
        grid=partial,
        grid_names=("pair", "split"),
        scratch_types=[
            plgpu.SMEM((len(queries), ROWS, dim), dtype, transforms=tiled),
            *[plgpu.SMEM((config.stages, config.slots, dim), dtype, transforms=tiled)] * 2,
            plgpu.SMEM((ROWS, config.slots), dtype, transforms=tiled),
            plgpu.SMEM((ROWS, CHUNK), jnp.float32),
            *[plgpu.SMEM((ROWS,), jnp.float32)] * 2,
            plgpu.Barrier(num_arrivals=2 * len(queries)),
            *[plgpu.Barrier(num_arrivals=spec.pieces, num_barriers=config.stages)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="attend_hopper",
        **({} if interpret is None else {"interpret": interpret}),
    )
    # Pages whose heads and blocks are one dimension: the memory accelerator knows five, and tiling adds two.
    flat = [pages.reshape(-1, spec.piece, dim) for pages in (k_pages, v_pages)]
    integers = block_table.astype(jnp.int32), query_slots[:, 0].astype(jnp.int32)
    out, top, total = kernel(queries, *flat, *integers)
    out, lse = _merge(out, top[..., : spec.groups], total[..., : spec.groups], sink_logits)
    lse = jnp.where(query_slots[:, :, None] < 0, -jnp.inf, lse.reshape(rows, 1, heads))
    return out[..., :width].reshape(q.shape).astype(q.dtype), lse


def _queries(q: Float[Array, "R G W"], dtype: Any, dim: int) -> Float[Array, "X R Y D"]:
    """Return q as a sum of X arrays of the pages' type, two where its own is wider, with zeros up to the pages' width
    and a multiple of 8 rows.
    """
    high = q.astype(dtype)
    terms = [high]
    if jnp.dtype(dtype).itemsize < q.dtype.itemsize:
        terms.append((q - high.astype(q.dtype)).astype(dtype))
    padding = ((0, 0), (0, 0), (0, -q.shape[1] % LEAST_BLOCK), (0, dim - q.shape[2]))
    return jnp.pad(jnp.stack(terms), padding)


def _merge(
    out: Float[Array, "R S 2 G D"],
    top: Float[Array, "R S G"],
    total: Float[Array, "R S G"],
    sink_logits: Float[Array, "H"] | None,
) -> tuple[Float[Array, "R G D"], Float[Array, "R G"]]:
    """Merge the splits of each (row, KV head), and the two halves of the output."""
    top = top * math.log(2)
    highest = jnp.max(top, axis=1)
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(-1, top.shape[2])
        sinks = jnp.tile(sinks, (len(top) // len(sinks), 1))
        highest = jnp.maximum(highest, sinks)
    weight = jnp.exp(top - highest[:, None])
    summed = jnp.sum(total * weight, axis=1)
    if sink_logits is not None:
        summed += jnp.exp(sinks - highest)
    some = jnp.where(summed > 0, summed, 1)
    merged = jnp.sum(out * weight[:, :, None, :, None], axis=(1, 2)) / some[..., None]
    return merged, jnp.where(summed > 0, highest + jnp.log(some), -jnp.inf)
