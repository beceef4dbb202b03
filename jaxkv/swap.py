"""Blocks out of the pool and back into it, bit for bit: to host memory and from there, and from one block to another.

One program each, for ``WIDTH`` blocks at a time: how many a row has changes the number of calls and compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from jaxkv.dims import Array, Int, host_array
from jaxkv.pool import KVPool

WIDTH = 32
"""Blocks that one call moves."""


def save(pool: KVPool, blocks: Sequence[int]) -> list[KVPool]:
    """Return what is in some blocks as NumPy arrays ``[WIDTH, K, P, D]``, a pool for each ``WIDTH`` of them. This waits
    for the device.
    """
    return jax.device_get([_take(pool, ids) for ids in _groups(blocks)])


def load(pool: KVPool, blocks: Sequence[int], saved: Sequence[KVPool]) -> KVPool:
    """Return the pool, which is donated, with what ``save`` returned in some blocks: as many, and others if need be."""
    for ids, pages in zip(_groups(blocks), saved, strict=True):
        pool = _put(pool, ids, pages)
    return pool


def copy(pool: KVPool, source: Sequence[int], target: Sequence[int]) -> KVPool:
    """Return the pool, which is donated, with each source block's content in a target block, which is no source."""
    for source_ids, target_ids in zip(_groups(source), _groups(target), strict=True):
        pool = _copy(pool, source_ids, target_ids)
    return pool


def _groups(blocks: Sequence[int]) -> list[np.ndarray]:
    groups = []
    for start in range(0, len(blocks), WIDTH):
        some = blocks[start : start + WIDTH]
        # The rest is the null block's, which anything may be written to.
        groups.append(host_array(WIDTH))
        groups[-1][: len(some)] = some
    return groups


@jax.jit
def _take(pool: KVPool, ids: Int[Array, "W"]) -> KVPool:
    return jax.tree.map(lambda pages: pages[ids], pool)


@functools.partial(jax.jit, donate_argnames="pool")
def _put(pool: KVPool, ids: Int[Array, "W"], saved: KVPool) -> KVPool:
    return jax.tree.map(lambda pages, new: pages.at[ids].set(new), pool, saved)


@functools.partial(jax.jit, donate_argnames="pool")
def _copy(pool: KVPool, source: Int[Array, "W"], target: Int[Array, "W"]) -> KVPool:
    def moved(pages: Array) -> Array:
        # Without the barrier a GPU fuses the gather into the scatter, and copies the pool for it.
        taken, pages = lax.optimization_barrier((pages[source], pages))
        return pages.at[target].set(taken)

    return jax.tree.map(moved, pool)
