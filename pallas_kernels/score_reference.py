"""Plain XLA semantics of scoring cached keys against a few vectors a head, by tiles of blocks.

Gathering a row's keys first and scoring them then takes two to five times as long on a CPU as scoring tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.reference import Tile

Carry = TypeVar("Carry")


def score(
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    w: Float[Array, "B O H D"],
    c: Float[Array, "B H F"],
) -> Float[Array, "B K G S"]:
    """Score every cached key of a row for every query head, in float32.

    ``S = max over o of k . w[o] + |k| . c`` with ``|k|_f = hypot(k[f], k[f + F])``: TriAttention (arXiv 2604.04921),
    with the mean over future offsets folded into one w (O = 1), or their maximum (O of them).

    Args:
      k_pages: keys after RoPE of one layer, as wide as w or wider.
      block_table: slot s of row b is in block ``block_table[b, s // P]``.
      length: slots that each row holds. 0 leaves a row out.
      w, c: the virtual queries. Head h reads KV head ``h // G``.

    Returns:
      One score a slot, S = M * P. At and past ``length`` it is unspecified and may be NaN. A row's scores depend on
      that row alone.

    Raises:
      ValueError: shapes do not fit.
    """
    rows, offsets, heads, dim = w.shape
    kv_heads, bands = k_pages.shape[1], dim // 2
    if dim > k_pages.shape[3] or heads % kv_heads or c.shape != (rows, heads, bands) or len(block_table) != rows:
        raise ValueError(
            f"score wants pages [N, K, P, D], table [B, M], w [B, O, H, D] and c [B, H, F], "
            f"and got {k_pages.shape}, {block_table.shape}, {w.shape} and {c.shape}"
        )
    groups = heads // kv_heads
    w = w.astype(jnp.float32).reshape(rows, offsets, kv_heads, groups, dim).transpose(0, 2, 1, 3, 4)
    w = w.reshape(rows * kv_heads, offsets * groups, dim)
    c = c.astype(jnp.float32).reshape(rows * kv_heads, groups, bands)

    def tile_scores(k: Float[Array, "BK S D"], _: Array) -> Float[Array, "BK G S"]:
        k = k[..., :dim]
        trig = _product(w, k).reshape(-1, offsets, groups, k.shape[1]).max(axis=1)
        return trig + _product(c, jnp.sqrt(k[..., :bands] ** 2 + k[..., bands:] ** 2))

    return map_tiles(tile_scores, k_pages, block_table, length, groups)


def map_tiles(
    function: Callable[[Array, Array], Array],
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    groups: int = 1,
) -> Float[Array, "B K G S"]:
    """Return ``function(keys, slots)`` of every tile, side by side.

    Args:
      function: takes float32 keys ``[B*K, s, D]`` as wide as the pages, and their slots ``[s]``; returns
        ``[B*K, G, s]``.
      k_pages, block_table, length: as for ``score``.
      groups: G of what the function returns.
    """
    rows, width = block_table.shape
    kv_heads, block = k_pages.shape[1], k_pages.shape[2]
    slots = Tile(block_table, length, kv_heads, block).held.shape[1]
    out = jnp.zeros((rows * kv_heads, groups, slots), jnp.float32)

    def body(out: Array, k: Array, own: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, function(k, own), own[0], axis=2)

    out = fold_tiles(body, out, k_pages, block_table, length)
    return out[..., : width * block].reshape(rows, kv_heads, groups, width * block)


def fold_tiles(
    function: Callable[[Carry, Array, Array], Carry],
    initial: Carry,
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
) -> Carry:
    """Fold ``function(carry, keys, slots)`` over the tiles up to the longest row; the rest is as for ``map_tiles``."""
    tile = Tile(block_table, length, k_pages.shape[1], k_pages.shape[2])

    def body(index: Array, carry: Carry) -> Carry:
        slots = index * tile.slots + jnp.arange(tile.slots)
        return function(carry, tile.gather(k_pages, index).astype(jnp.float32), slots)

    tiles = (jnp.max(length) + tile.slots - 1) // tile.slots
    return lax.fori_loop(0, tiles, body, initial)


def _product(left: Float[Array, "R G D"], keys: Float[Array, "R S D"]) -> Float[Array, "R G S"]:
    # Keys on the right: on XLA:CPU the other order takes twice as long. Full precision: a TPU would round to bfloat16.
    return jnp.einsum("rgd,rsd->rgs", left, keys, precision=lax.Precision.HIGHEST)
