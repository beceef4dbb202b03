"""Pages wider than the heads, as a TPU takes them: the pool's shapes and bytes, its writes, and all that reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_policies as pools
import tiny

from jaxkv import decode, policies, triattention
from jaxkv.compression import RowBudget
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.policies.base import Observed
from jaxkv.policies.triattention import TriAttention
from jaxkv.pool import KVPool, block_bytes, page_dim
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats
from pallas_kernels import device

CACHE = dataclasses.replace(tiny.CACHE, blocks=40, block_size=16, rows=2, prefill_rows=2)


@pytest.mark.parametrize(("dim", "width"), [(8, 128), (64, 128), (80, 128), (96, 128), (128, 128), (160, 256)])
def test_pages_are_as_wide_as_the_platform_wants_them(dim: int, width: int) -> None:
    assert page_dim(dim, "tpu") == width
    assert page_dim(dim, "cpu") == page_dim(dim, "gpu") == dim


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_is_counted(dtype: str) -> None:
    model = ModelConfig("llama", 97, 48, 64, 3, 6, 2, 80, context=256)
    cache = CacheConfig(blocks=7, context=64, block_size=32, dtype=dtype)
    narrow, own = KVPool.create(model, cache), block_bytes(model, 32, dtype)
    with device.target("TPU v5 lite"):
        wide, padded = KVPool.create(model, cache), block_bytes(model, 32, dtype)
        assert KVPool.shapes(model, cache).v[2].shape == (8, 2, 32, 128)
    assert (narrow.k[0].shape[3], wide.k[0].shape[3]) == (80, 128)
    assert (narrow.nbytes, wide.nbytes) == (8 * own, 8 * padded)
    assert padded == 2 * 3 * 2 * 32 * 128 * jnp.dtype(dtype).itemsize == own * 128 // 80


def test_a_write_leaves_zeros_past_the_head() -> None:
    rng = np.random.default_rng(0)
    with device.target("TPU v6 lite"):
        pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), KVPool.create(tiny.MODEL, CACHE))
    k, v = rng.standard_normal((2, 1, 2, 2, 8)).astype(np.float32)
    written = pool.write(1, k, v, np.array([[3, 5]]), np.array([[0, 15]]))
    for pages, new in ((written.k[1], k), (written.v[1], v)):
        for index, (block, slot) in enumerate(((3, 0), (5, 15))):
            np.testing.assert_array_equal(pages[block, :, slot, :8], new[0, index])
            np.testing.assert_array_equal(pages[block, :, slot, 8:], 0)
        assert np.isnan(pages).sum() == pages.size - 2 * 2 * 128


def widened(pool: KVPool) -> KVPool:
    """Return it 128 wide: zeros in the slots that are held, NaN in the others."""

    def widen(pages: Any) -> Any:
        padding = jnp.where(jnp.isnan(pages[..., :1]), jnp.nan, 0)
        return jnp.concatenate([pages, jnp.broadcast_to(padding, (*pages.shape[:3], 128 - pages.shape[3]))], axis=3)

    return jax.tree.map(widen, pool)


@pytest.mark.parametrize("method", [name for name in policies.names() if name != "triattention"])
def test_policies_score_the_heads_and_not_the_padding(method: str) -> None:
    pool, table, _, _ = pools.filled_pool()
    policy, rng = pools.make(method), np.random.default_rng(1)
    shape = (2, pools.MODEL.heads, policy.last_queries, pools.D)
    queries = (jnp.asarray(rng.standard_normal(shape), jnp.float32),) * pools.LAYERS
    observed = Observed(last_queries=queries if policy.last_queries else None)
    narrow, wide = (np.asarray(policy.score(pools.view(x, table), observed)) for x in (pool, widened(pool)))
    assert narrow.shape == wide.shape
    for b, length in enumerate(pools.LENGTHS):
        np.testing.assert_allclose(wide[b, ..., :length], narrow[b, ..., :length], atol=1e-6)


def decoded(implementation: Any) -> tuple[Any, KVPool]:
    """Return 12 tokens of two rows, compacted once on the way, and the pool."""
    pool = KVPool.create(tiny.MODEL, CACHE)
    rng = np.random.default_rng(4)
    options = {"config": tiny.MODEL, "implementation": implementation}
    rows, chunk = decode.Rows.idle(CACHE), decode.Chunk.idle(CACHE)
    ids = np.arange(1, 2 * CACHE.table_width + 1, dtype=np.int32).reshape(2, -1)
    chunk.table[:], rows.table[:] = ids, ids
    for start in range(0, 48, 16):
        chunk = jax.tree.map(np.copy, chunk)
        chunk.tokens[:] = rng.integers(0, 97, (2, 16))
        chunk.count[:], chunk.length[:], chunk.position[:] = 16, start, start
        pool, out = decode.prefill_chunk(tiny.weights(), pool, chunk, **options)
    means = rng.uniform(0.5, 1, (3, tiny.MODEL.layers, tiny.MODEL.heads, tiny.MODEL.frequencies)).astype(np.float32)
    policy = TriAttention(phases=triattention.Phases.of_model(tiny.MODEL), stats=QueryStats(*means))
    budgets = Budgets.stack([RowBudget(b_row=32, interval=16, window=4, sinks=2, pinned=0)] * 2)
    held, due = np.array([48, 48], np.int32), np.array([True, True])
    pool = decode.compact_round(
        pool, ids, ids, held, held, due, budgets, policy, mode="per_head", lanes=2, implementation=implementation
    )
    rows.token[:], rows.active[:] = out.token, True
    rows.length[:], rows.position[:] = 32, 48
    pool, _, tokens = decode.decode_round(tiny.weights(), pool, rows, np.int32(12), **options)
    return np.asarray(tokens.tokens), pool


@pytest.mark.parametrize("implementation", ["mosaic_tpu", "xla"])
def test_a_model_decodes_and_compacts_alike_on_a_wide_pool(implementation: Any) -> None:
    expected, narrow = decoded("xla")
    with device.target("TPU v5 lite", interpret=True):
        tokens, wide = decoded(implementation)
    np.testing.assert_array_equal(tokens, expected)
    for pages, same in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        assert pages.shape[3] == 128
        held = np.asarray(pages)[1:3]
        np.testing.assert_allclose(held[..., :8], np.asarray(same)[1:3], atol=1e-5)
        np.testing.assert_array_equal(held[..., 8:], 0)
