"""Plain XLA semantics of moving kept slots toward the front of a row, in place."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

TILE_SLOTS = 256
"""Slots moved at once: what they hold is all the memory that a compaction takes on top of the pages."""

Pages = TypeVar("Pages")


def compact(
    pages: Pages,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
) -> Pages:
    """Give slot j of every row and KV head what its slot ``keep[j]`` holds, bit for bit.

    Args:
      pages: any pytree of arrays ``[N, K, P, ...]``, or ``[N, P, ...]`` where a slot is one for all heads. An array
        that could be either is taken for the first.
      keep: for each row and KV head the slots to keep, ascending, so ``keep[j] >= j``; X is K, or 1 where all heads
        keep the same. Entries from ``count`` on are not used. S is M * P.
      count: slots that a row keeps; 0 leaves the row as it is.
      source: the row's block table.
      target: the block that slots ``m * P ..`` go to: the source's own, or a fresh one where the source is shared;
        -1 where nothing is to be written. No block may be another row's source and this one's target.

    Returns:
      The pages. Slots of a written block from ``count`` on hold anything.

    Raises:
      ValueError: shapes do not fit, or heads keep different slots of an array without heads.
    """
    block = keep.shape[2] // source.shape[1]
    tile = max(1, TILE_SLOTS // block)
    width = -(-source.shape[1] // tile) * tile
    target = jnp.pad(target, ((0, 0), (0, width - target.shape[1])), constant_values=-1)
    keep = jnp.pad(keep, ((0, 0), (0, 0), (0, width * block - keep.shape[2])))
    leaves, tree = jax.tree.flatten(pages)
    headed = [_has_heads(leaf, keep.shape[1], block) for leaf in leaves]

    def move(row: Array, index: Array, leaves: list[Array]) -> list[Array]:
        slots = lax.dynamic_slice_in_dim(keep[row], index * tile * block, tile * block, axis=1)
        blocks = jnp.take(source[row], slots // block, mode="clip")
        to = lax.dynamic_slice_in_dim(target[row], index * tile, tile)
        out = []
        for leaf, with_heads in zip(leaves, headed, strict=True):
            read = _read_headed if with_heads else _read_flat
            # Else XLA fuses the gather into the scatter, and copies all pages to keep the two apart.
            moved, leaf = lax.optimization_barrier((read(leaf, blocks, slots % block, tile), leaf))
            # A negative index would count from the end, one past it is dropped.
            out.append(leaf.at[jnp.where(to < 0, leaf.shape[0], to)].set(moved, mode="drop"))
        return out

    def move_row(row: Array, leaves: list[Array]) -> list[Array]:
        # Forward by tiles: a tile reads no slot before its own first one, and those are all that was written.
        tiles = (count[row] + tile * block - 1) // (tile * block)
        return lax.fori_loop(0, tiles, lambda index, leaves: move(row, index, leaves), leaves)

    return jax.tree.unflatten(tree, lax.fori_loop(0, keep.shape[0], move_row, leaves))


def _has_heads(leaf: Array, heads: int, block: int) -> bool:
    if leaf.ndim > 2 and leaf.shape[2] == block and heads in (1, leaf.shape[1]):
        return True
    if leaf.ndim > 1 and leaf.shape[1] == block:
        if heads == 1:
            return False
        raise ValueError(f"pages {leaf.shape} have no heads, and {heads} heads keep different slots; keep one set")
    raise ValueError(f"pages {leaf.shape} are neither [N, {heads}, {block}, ...] nor [N, {block}, ...]")


def _read_headed(leaf: Array, blocks: Int[Array, "X T"], slots: Int[Array, "X T"], tile: int) -> Array:
    heads, block = leaf.shape[1:3]
    index = (blocks * heads + jnp.arange(heads)[:, None]) * block + slots
    rows = jnp.take(leaf.reshape(-1, *leaf.shape[3:]), index, axis=0, mode="clip")
    return jnp.moveaxis(rows.reshape(heads, tile, *leaf.shape[2:]), 0, 1)


def _read_flat(leaf: Array, blocks: Int[Array, "1 T"], slots: Int[Array, "1 T"], tile: int) -> Array:
    rows = jnp.take(leaf.reshape(-1, *leaf.shape[2:]), (blocks * leaf.shape[1] + slots)[0], axis=0, mode="clip")
    return rows.reshape(tile, *leaf.shape[1:])
