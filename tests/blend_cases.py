"""A tiny model with layers to skip, a full prefill to hold blends against, and segments prefilled alone."""

from __future__ import annotations

import dataclasses
import functools

import expected
import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxkv import blend, decode
from jaxkv.blend_layout import CHECK_LAYER
from jaxkv.config import CacheConfig, RopeConfig
from jaxkv.model import forward, init_weights, logits
from jaxkv.pool import KVPool

MODEL = dataclasses.replace(tiny.MODEL, layers=4)
ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig(kind="linear", factor=4),
    "llama3": RopeConfig(theta=500.0, kind="llama3", factor=8, original_context=64),
    "yarn": RopeConfig(kind="yarn", factor=4, original_context=32),
}
CHUNK = 16
CACHE = CacheConfig(blocks=80, context=160, block_size=4, prefill_chunk=CHUNK)


@functools.cache
def weights():
    return jax.tree.map(jnp.asarray, init_weights(MODEL, seed=3))


def config(rope="default"):
    return dataclasses.replace(MODEL, rope=ROPES[rope])


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, count).astype(np.int32)


def row():
    """Return a pool of NaN and a table of blocks in no order, with room for 160 tokens."""
    pool = jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, np.nan, x.dtype)), KVPool.shapes(MODEL, CACHE))
    table = np.random.default_rng(7).permutation(np.arange(1, CACHE.blocks + 1))[: CACHE.table_width]
    return pool, table[None].astype(np.int32)


def prefill(tokens, model=MODEL, pool=None, table=None, start=0):
    """Prefill as an engine does; return the pool, the table and the logits [V] behind the last token."""
    if pool is None:
        pool, table = row()
    for at in range(0, len(tokens), CHUNK):
        chunk = decode.Chunk.idle(CACHE)
        part = tokens[at : at + CHUNK]
        chunk.tokens[0, : len(part)], chunk.count[0] = part, len(part)
        chunk.table[0], chunk.length[0], chunk.position[0] = table[0], start + at, start + at
        pool, out = decode.prefill_chunk(weights(), pool, chunk, config=model)
    return pool, table, np.asarray(out.logits[0])


def segment(tokens, model=MODEL, before=()):
    """Return a segment's clean KV, k before RoPE and v."""
    return _segment(tuple(map(int, tokens)), model, tuple(map(int, before)))


@functools.cache
def _segment(tokens, model, before):
    _, k, v = blend.segment_kv(weights(), *row(), tokens, config=model, before=before, chunk=CHUNK)
    return k, v


def layers_of(kvs):
    """Return what ``blend_prefill`` takes of the KV of some pieces."""
    return lambda layer: [(k[layer], v[layer]) for k, v in kvs]


def blended(layout, kvs, ratio=0.15, model=MODEL, pool=None, table=None, **options):
    """Blend into a pool of NaN; return the pool, the table and the output."""
    if pool is None:
        pool, table = row()
    options = {"config": model, "ratio": ratio, "chunk": CHUNK, **options}
    pool, out = blend.blend_prefill(weights(), pool, table, layout, layers_of(kvs), **options)
    return pool, table, out


def rows_of(pool, table, count):
    """Return keys and values [2, L, T, K, D] of a row's first slots."""
    arrays = []
    for pages in (pool.k, pool.v):
        taken = np.stack([np.asarray(page)[table[0]].swapaxes(1, 2) for page in pages])
        arrays.append(taken.reshape(MODEL.layers, -1, MODEL.kv_heads, MODEL.head_dim)[:, :count])
    return np.stack(arrays)


def assert_same_answer(ours, theirs):
    """Logits differ by at most 1e-4 and agree in their best token."""
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert ours.argmax() == theirs.argmax()


def substituted(layout, kvs, selected, model=MODEL):
    """Return the logits [T, V] of a dense pass in which cached KV stands in for what was not selected.

    Whatever blending does, this is what it means: behind the check layer, a token that is not selected is seen by the
    others as its segment left it. What such a token itself computes is seen by nobody.
    """
    k, v = (np.zeros((MODEL.layers, layout.size, MODEL.kv_heads, MODEL.head_dim), np.float32) for _ in range(2))
    for (begin, end), (keys, values) in zip(layout.spans, kvs, strict=True):
        k[:, begin:end], v[:, begin:end] = keys, values
    reused = np.setdiff1d(np.arange(layout.size), np.asarray(selected))

    def attend(state, layer, heads):
        if layer > CHECK_LAYER:
            heads = heads.replace(
                k=heads.k.at[0, reused].set(k[layer, reused]), v=heads.v.at[0, reused].set(v[layer, reused])
            )
        return expected.dense(state, layer, heads)

    positions = np.arange(layout.size)[None]
    _, hidden = forward(weights(), model, jnp.asarray(layout.tokens)[None], positions, attend, None)
    return np.asarray(logits(weights(), hidden[0]))
