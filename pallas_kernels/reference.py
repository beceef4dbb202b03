"""Plain XLA semantics of every attention entry: what the kernels are tested against, and what CPUs run.

Keys are taken in tiles of a fixed number of slots and merged in order by an online softmax (arXiv 2112.05682). A tile
that is masked throughout changes no bit of the carry, so the result of a row depends on that row alone: not on the
width of the table and not on how long its neighbours are, though all rows walk the tiles together.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TILE_SLOTS = 256
"""Slots of a tile: 16 blocks of 16. On XLA:CPU smaller and larger ones were no faster."""

_LOWEST = -1e30
"""The running maximum of a row that has seen no key. It is finite, so that no inf - inf can make a NaN."""


def attend(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Float[Array, "H"] | None = None,
    k_scale: Float[Array, "N K P"] | None = None,
    v_scale: Float[Array, "N K P"] | None = None,
    return_lse: bool = False,
) -> Any:
    """See ``pallas_kernels.attend``."""
    rows, queries, heads, dim = q.shape
    kv_heads, block = k_pages.shape[1], k_pages.shape[2]
    groups = heads // kv_heads
    newest = jnp.max(query_slots, axis=1)
    tile = Tile(block_table, newest + 1, kv_heads, block)
    # Queries of one KV head lie together, [B*K, T*G, D]: one batched product a tile serves them all.
    x = q.reshape(rows, queries, kv_heads, groups, dim).transpose(0, 2, 1, 3, 4)
    x = x.reshape(rows * kv_heads, queries * groups, dim)
    own = jnp.repeat(jnp.repeat(query_slots, groups, axis=1), kv_heads, axis=0)[:, :, None]

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, top, total, out = carry
        slots = index * tile.slots + jnp.arange(tile.slots)
        k, v = (tile.gather(pages, index)[..., :dim] for pages in (k_pages, v_pages))
        logits = _product(x, k, "rqd,rsd->rqs") * scale
        if k_scale is not None:
            logits = logits * tile.gather(k_scale, index)[:, None, :]
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        seen = slots <= own
        if window is not None:
            seen &= slots > own - window
        logits = jnp.where(seen, logits, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        weight = jnp.exp(logits - higher[..., None])
        fade = jnp.exp(top - higher)
        total = total * fade + jnp.sum(weight, axis=-1)
        if v_scale is not None:
            weight = weight * tile.gather(v_scale, index)[:, None, :]
        return index + 1, higher, total, out * fade[..., None] + _product(weight, v, "rqs,rsd->rqd")

    shape = (rows * kv_heads, queries * groups)
    top, total = jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sink_logits is not None:
        # A sink is one more key with this logit and no value (arXiv 2309.17453; GPT-OSS).
        sinks = sink_logits.astype(jnp.float32).reshape(kv_heads, 1, groups)
        top = jnp.broadcast_to(sinks, (rows, kv_heads, queries, groups)).reshape(shape)
        total = jnp.ones(shape, jnp.float32)
    out = jnp.zeros((*shape, dim), jnp.float32)
    tiles = (jnp.max(newest) + tile.slots) // tile.slots
    carry = lax.while_loop(lambda c: c[0] < tiles, body, (jnp.int32(0), top, total, out))
    _, top, total, out = carry
    out = out / jnp.where(total > 0, total, 1)[..., None]

    def back(y: Array) -> Array:
        y = y.reshape(rows, kv_heads, queries, groups, *y.shape[2:])
        return jnp.moveaxis(y, 1, 2).reshape(rows, queries, heads, *y.shape[4:])

    out = back(out).astype(q.dtype)
    if not return_lse:
        return out
    return out, back(jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf))


class Tile:
    """Gathers the pages of one tile of every row, heads before slots, and zeros for slots that the row does not hold.

    Those are free or foreign: what is in them may be NaN, and 0 * NaN is NaN.
    """

    def __init__(self, block_table: Int[Array, "B M"], length: Int[Array, "B"], kv_heads: int, block: int) -> None:
        self.blocks = max(1, TILE_SLOTS // block)
        self.slots = self.blocks * block
        self.kv_heads = kv_heads
        width = block_table.shape[1]
        # Block 0 is the null block, so a table may be padded with it: nothing reads it unmasked.
        self.table = jnp.pad(block_table, ((0, 0), (0, -width % self.blocks)))
        # All bits or none: XLA:CPU gathers in vectors when a bitwise operation follows, and not when a select does, nor
        # when nothing does. Attention as a whole is 1.5 times as fast for it.
        slots = jnp.arange(self.table.shape[1] * block)
        self.held = -(slots < length[:, None]).astype(jnp.int32)

    def gather(self, pages: Array, index: Array) -> Array:
        """Return ``[B*K, slots, ...]`` of pages ``[N, K, P, ...]`` at tile ``index``."""
        blocks = lax.dynamic_slice_in_dim(self.table, index * self.blocks, self.blocks, axis=1)
        heads = jnp.arange(self.kv_heads)
        rows = blocks[:, None, :] * self.kv_heads + heads[None, :, None]
        out = lax.platform_dependent(pages, rows, cpu=_gather_rows, default=_gather_blocks)
        out = out.reshape(len(rows), self.kv_heads, self.slots, *pages.shape[3:])
        held = lax.dynamic_slice_in_dim(self.held, index * self.slots, self.slots, axis=1)
        held = held.reshape(len(rows), 1, self.slots, *(1 for _ in pages.shape[3:]))
        bits = jnp.dtype(f"int{8 * pages.dtype.itemsize}")
        out = lax.bitcast_convert_type(lax.bitcast_convert_type(out, bits) & held.astype(bits), pages.dtype)
        return out.reshape(-1, *out.shape[2:])


def _gather_blocks(pages: Array, index: Int[Array, "B K T"]) -> Array:
    return jnp.take(pages.reshape(-1, *pages.shape[2:]), index, axis=0, mode="clip")


def _gather_rows(pages: Array, index: Int[Array, "B K T"]) -> Array:
    """Gather each block of a head as one long row: XLA:CPU copies these twice as fast. On a TPU it would copy the
    pool.
    """
    rows = pages.reshape(pages.shape[0] * pages.shape[1], -1)
    return jnp.take(rows, index, axis=0, mode="clip").reshape(*index.shape, *pages.shape[2:])


def _product(left: Array, right: Array, spec: str) -> Array:
    """Batched product in the wider of the two dtypes, with a float32 result."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return jnp.einsum(spec, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)
