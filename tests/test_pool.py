"""Writes to the pool, and the pool's size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxkv.config import CacheConfig
from jaxkv.pool import KVPool, block_bytes


def test_write_puts_each_token_in_its_slot_and_touches_nothing_else():
    rng = np.random.default_rng(0)
    pool = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), KVPool.create(tiny.MODEL, tiny.CACHE)
    )
    k, v = rng.standard_normal((2, 2, 3, 2, 8)).astype(np.float32)
    block, slot = np.array([[3, 3, 9], [1, 200, 200]]), np.array([[0, 3, 1], [2, 0, 1]])
    written = pool.write(1, k, v, block, slot)
    expected = [np.array(pool.k[1]), np.array(pool.v[1])]
    for b, t in np.ndindex(2, 3):
        expected[0][block[b, t], :, slot[b, t]] = k[b, t]
        expected[1][block[b, t], :, slot[b, t]] = v[b, t]
    np.testing.assert_array_equal(written.k[1], expected[0])
    np.testing.assert_array_equal(written.v[1], expected[1])
    assert written.k[0] is pool.k[0]
    assert written.v[0] is pool.v[0]


def test_ids_out_of_range_are_dropped_not_clipped():
    pool = KVPool.create(tiny.MODEL, tiny.CACHE)
    ones = jnp.ones((1, 1, 2, 8))
    written = pool.write(0, ones, ones, jnp.array([[201]]), jnp.array([[0]]))
    assert not np.any(written.k[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_blocks_and_the_null_block(dtype):
    cache = CacheConfig(blocks=7, context=64, block_size=32, dtype=dtype)
    pool = KVPool.create(tiny.MODEL, cache)
    assert pool.block_size == 32
    assert pool.nbytes == 8 * block_bytes(tiny.MODEL, 32, dtype)
    assert pool.nbytes == sum(np.asarray(x).nbytes for x in jax.tree.leaves(pool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 12}, "block_size=12 must be a power of two"),
        ({"block_size": 512}, "block_size=512 must be a power of two up to 256"),
        ({"dtype": "int8"}, "'int8' is not supported; float32"),
        ({"rows": 0}, "rows=0 must be at least 1"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**{"blocks": 4, "context": 64, **change})
