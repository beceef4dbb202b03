"""Clean KV of a segment: prefilled with nothing before it that will not be before it everywhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxkv import decode, model
from jaxkv.blend_layout import check_model, padded
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import Array, Float, Int, ceil_div
from jaxkv.pool import KVPool


def scratch(config: ModelConfig, tokens: int, dtype: str = "float32") -> tuple[KVPool, np.ndarray]:
    """Return a pool for one row of up to ``tokens`` tokens, and its table [1, M]: for work that has no pool."""
    cache = CacheConfig(blocks=ceil_div(tokens, CacheConfig.block_size), context=tokens, dtype=dtype)
    return KVPool.create(config, cache), np.arange(1, cache.blocks + 1, dtype=np.int32)[None]


def segment_kv(
    weights: model.Weights,
    pool: KVPool,
    table: Int[np.ndarray, "1 M"],
    tokens: Sequence[int] | np.ndarray,
    *,
    config: ModelConfig,
    before: Sequence[int] = (),
    chunk: int = 128,
    implementation: pallas_kernels.Implementation | None = None,
) -> tuple[KVPool, Float[np.ndarray, "L T K D"], Float[np.ndarray, "L T K D"]]:
    """Prefill a segment alone and return its keys before RoPE (after k-norm and bias) and its values.

    This is what may stand under a content key: nothing but ``tokens`` and ``before`` has a part in it. Put ``before``
    into the fingerprint, since KV that was prepared otherwise is other KV.

    Args:
      weights: the model's weights.
      pool: donated.
      table: blocks that are overwritten, with room for ``before`` and the segment.
      tokens: of the segment; none is allowed.
      config: the model's shapes.
      before: tokens that are prefilled in front, a BOS say, and whose KV is dropped.
      chunk: tokens of a forward pass. With the chunk of prefill, layer 0 has prefill's bits.
      implementation: as for ``pallas_kernels.attend``.

    Returns:
      The pool, and keys and values in NumPy, of the hidden vectors' dtype: prefill rounds them to it too.

    Raises:
      ValueError: the table has no room.
      NotImplementedError: see ``check_model``.
    """
    check_model(config)
    ids = np.concatenate([np.asarray(before, np.int32), np.asarray(tokens, np.int32)])
    room = table.shape[1] * pool.block_size
    if ids.size > room:
        raise ValueError(f"{ids.size} tokens, those before the segment included, and blocks for {room}; give more")
    shape = (config.layers, 0, config.kv_heads, config.head_dim)
    parts = [(np.zeros(shape, weights.embedding.dtype),) * 2]
    for start in range(0, ids.size, chunk):
        piece = ids[start : start + chunk]
        pool, kv, _ = run_chunk(
            weights, pool, table, padded(piece, chunk), np.array([start, piece.size], np.int32), config=config,
            implementation=implementation,
        )  # fmt: skip
        k, v = jax.device_get(kv)
        parts.append((k[:, : piece.size], v[:, : piece.size]))
    k, v = (np.concatenate(arrays, axis=1)[:, len(before) :] for arrays in zip(*parts, strict=True))
    return pool, k, v


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames=("pool",))
def run_chunk(
    weights: model.Weights,
    pool: KVPool,
    table: Int[Array, "1 M"],
    tokens: Int[Array, "T"],
    bounds: Int[Array, "2"],
    *,
    config: ModelConfig,
    implementation: pallas_kernels.Implementation | None = None,
) -> tuple[KVPool, tuple[Float[Array, "L T K D"], Float[Array, "L T K D"]], Float[Array, "T E"]]:
    """Put a chunk of a row into the pool; return its keys before RoPE and values, and its normed hidden vectors.

    Args:
      weights: the model's weights.
      pool: donated.
      table: the row's blocks.
      tokens: ids.
      bounds: slots that the row holds before, and how many of the tokens are real.
      config, implementation: static.
    """
    start, count = bounds
    steps = jnp.arange(tokens.size)
    slots = jnp.where(steps < count, start + steps, -1)[None]
    paged = decode.paged_attend(table, slots, implementation)
    keys: list[Array] = []
    values: list[Array] = []

    def attend(pool: KVPool, layer: int, heads: model.Heads) -> tuple[KVPool, Array]:
        keys.append(heads.k[0])
        values.append(heads.v[0])
        return paged(pool, layer, heads)

    pool, hidden = model.forward(weights, config, tokens[None], (start + steps)[None], attend, pool)
    return pool, (jnp.stack(keys), jnp.stack(values)), hidden[0]


def warmup(
    weights: model.Weights,
    pool: KVPool,
    table_width: int,
    *,
    config: ModelConfig,
    chunk: int = 128,
    implementation: pallas_kernels.Implementation | None = None,
) -> KVPool:
    """Compile ``segment_kv`` for a pool and tables of a width; return the pool, which is donated."""
    tokens, bounds = np.zeros(chunk, np.int32), np.zeros(2, np.int32)
    args = (weights, pool, np.zeros((1, table_width), np.int32), tokens, bounds)
    return run_chunk(*args, config=config, implementation=implementation)[0]
