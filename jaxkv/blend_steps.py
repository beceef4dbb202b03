"""The jitted steps of a blended prefill: restore, check, select, one layer, logits.

There is a program a step and padded prompt length, not one a model: layers are alike, so one program serves them all,
and a layer's cached KV can be on its way while the layer before it is computed. Inside, tokens go through in chunks of
one static size, as in prefill; how many chunks there are is traced. So results have the bits that prefill gives them,
and ratios and lengths compile nothing.

``W`` is the padded length of the prompt, a multiple of the chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from jaxkv import decode, model, rope
from jaxkv.blend_layout import EXACT, FRESH
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float, Int
from jaxkv.pool import KVPool

Implementation = pallas_kernels.Implementation


@functools.partial(jax.jit, static_argnames=("config", "chunk"), donate_argnames=("pages",))
def restore(
    pages: KVPool,
    k: Float[Array, "W K D"],
    v: Float[Array, "W K D"],
    slots: Int[Array, "W"],
    table: Int[Array, "1 M"],
    *,
    config: ModelConfig,
    chunk: int,
) -> KVPool:
    """Put cached keys, rotated to the positions they now have, and values into one layer of the pool.

    Args:
      pages: one layer, donated.
      k, v: keys before RoPE, and values.
      slots: where each token goes, and its position; -1 leaves it out.
      table: the row's blocks.
      config: the model's shapes (static).
      chunk: tokens that are written at once (static).
    """

    def body(index: Array, pages: KVPool) -> KVPool:
        own, keys, values = (lax.dynamic_slice_in_dim(x, index * chunk, chunk)[None] for x in (slots, k, v))
        cos, sin = _rotation(config, own)
        return _write(pages, 0, rope.rotate(keys, cos, sin), values, table, own)

    last = jnp.max(jnp.where(slots >= 0, jnp.arange(slots.size), -1))
    return lax.fori_loop(0, (last + chunk) // chunk, body, pages)


@functools.partial(jax.jit, static_argnames=("config", "chunk", "implementation"), donate_argnames=("pages",))
def check(
    weights: model.Weights,
    pages: KVPool,
    tokens: Int[Array, "W"],
    cached: Float[Array, "W K D"],
    bounds: Int[Array, "3"],
    table: Int[Array, "1 M"],
    *,
    config: ModelConfig,
    chunk: int,
    implementation: Implementation | None,
) -> tuple[KVPool, Float[Array, "W E"], Float[Array, "W"]]:
    """Run the layers before the check layer over all tokens, and give the check layer fresh keys and values.

    Args:
      weights: with the layers up to the check layer alone.
      pages: of these layers, donated.
      tokens: ids.
      cached: values of the check layer; anything where there are none.
      bounds: slots held before, tokens that are real, and tokens at the front that need not be computed.
      table: the row's blocks.
      config, chunk, implementation: static.

    Returns:
      The pages; the hidden vectors that the check layer gets; and how far each token's cached values are off there:
      the sum over heads and dimensions of the squared difference, in float32.
    """
    start, count, exact = bounds
    last = len(weights.layers) - 1

    def body(index: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        pages, hidden, deviation = carry
        at = index * chunk
        steps = at + jnp.arange(chunk)
        slots = jnp.where(steps < count, start + steps, -1)[None]
        cos, sin = _rotation(config, (start + steps)[None])
        x = model.embed(weights, lax.dynamic_slice_in_dim(tokens, at, chunk)[None])
        attend = decode.paged_attend(table, slots, implementation)
        for layer in range(last):
            pages, x = model.decoder_layer(weights.layers[layer], config, x, cos, sin, attend, pages, layer)

        def keep(pages: KVPool, layer: int, heads: model.Heads) -> tuple[tuple[KVPool, Array], Array]:
            pages = _write(pages, layer, heads.rotated()[1], heads.v, table, slots)
            # What follows in this layer goes nowhere and is not computed.
            return (pages, heads.v), jnp.zeros_like(heads.q)

        (pages, v), _ = model.decoder_layer(weights.layers[last], config, x, cos, sin, keep, pages, last)
        old = lax.dynamic_slice_in_dim(cached, at, chunk)
        off = jnp.sum(jnp.square(v[0].astype(jnp.float32) - old.astype(jnp.float32)), axis=(1, 2))
        hidden = lax.dynamic_update_slice_in_dim(hidden, x[0], at, 0)
        return pages, hidden, lax.dynamic_update_slice_in_dim(deviation, off, at, 0)

    shape = tokens.size, config.width
    carry = pages, jnp.zeros(shape, weights.embedding.dtype), jnp.zeros(tokens.size, jnp.float32)
    # Exact tokens that share a chunk with others are computed once more, to the same values.
    return lax.fori_loop(exact // chunk, (count + chunk - 1) // chunk, body, carry)


@jax.jit
def select(
    hidden: Float[Array, "W E"],
    priority: Float[Array, "W"],
    kind: Int[Array, "W"],
    count: Int[Array, ""],
    start: Int[Array, ""],
) -> tuple[Float[Array, "W E"], Int[Array, "W"], Int[Array, "W"]]:
    """Choose the tokens that go through the layers: all fresh ones, then first ones, then those of highest priority.

    Args:
      hidden: of every token.
      priority: of cached tokens; equal ones go by position, and NaN comes last.
      kind: FRESH, FIRST, CACHED or EXACT; padding counts as EXACT, which is never chosen.
      count: how many tokens in all.
      start: slots held before the first token.

    Returns:
      In order of their positions and padded: hidden vectors, slots (padding -1) and indices (padding -1).
    """
    index = jnp.arange(kind.size)
    kind = kind.astype(jnp.int32)
    ranked = (kind > FRESH) & (kind < EXACT)
    wanted = jnp.where(ranked & ~jnp.isnan(priority), priority, -jnp.inf)
    order = jnp.lexsort((index, -wanted, kind))
    chosen = jnp.zeros(kind.size, bool).at[order].set(index < count)
    rows = jnp.sort(jnp.where(chosen, index, kind.size))
    real = rows < kind.size
    taken = jnp.take(hidden, rows, axis=0, mode="clip")
    return taken, jnp.where(real, start + rows, -1), jnp.where(real, rows, -1)


@functools.partial(jax.jit, static_argnames=("config", "chunk", "implementation"), donate_argnames=("pages",))
def run_layer(
    layer: model.Layer,
    pages: KVPool,
    hidden: Float[Array, "W E"],
    slots: Int[Array, "W"],
    count: Int[Array, ""],
    table: Int[Array, "1 M"],
    *,
    config: ModelConfig,
    chunk: int,
    implementation: Implementation | None,
) -> tuple[KVPool, Float[Array, "W E"]]:
    """Run one layer over the chosen tokens, each writing its own slot and attending up to it.

    Args:
      layer: its weights.
      pages: that layer of the pool, donated; every other token's keys and values are in it.
      hidden: of the chosen tokens, in order of their slots.
      slots: their slots, which are their positions; -1 is padding.
      count: how many are real.
      table: the row's blocks.
      config, chunk, implementation: static.
    """

    def body(index: Array, carry: tuple[KVPool, Array]) -> tuple[KVPool, Array]:
        pages, hidden = carry
        x, own = (lax.dynamic_slice_in_dim(part, index * chunk, chunk)[None] for part in (hidden, slots))
        # The mask is exact for free: a query sees the slots up to its own, wherever it stands among the chosen.
        attend = decode.paged_attend(table, own, implementation)
        pages, x = model.decoder_layer(layer, config, x, *_rotation(config, own), attend, pages, 0)
        return pages, lax.dynamic_update_slice_in_dim(hidden, x[0], index * chunk, 0)

    return lax.fori_loop(0, (count + chunk - 1) // chunk, body, (pages, hidden))


@functools.partial(jax.jit, static_argnames=("config",))
def finish(
    weights: model.Weights, hidden: Float[Array, "W E"], count: Int[Array, ""], *, config: ModelConfig
) -> Float[Array, "1 V"]:
    """Return the float32 logits behind the last of ``count`` tokens."""
    last = lax.dynamic_slice_in_dim(hidden, count - 1, 1)
    return model.logits(weights, model.rms_norm(last, weights.final_norm, config.norm_eps))


def _rotation(config: ModelConfig, positions: Int[Array, "1 T"]) -> tuple[Array, Array]:
    return rope.rotation(config.rope, config.head_dim, positions)


def _write(
    pages: KVPool,
    layer: int,
    k: Float[Array, "1 T K D"],
    v: Float[Array, "1 T K D"],
    table: Int[Array, "1 M"],
    slots: Int[Array, "1 T"],
) -> KVPool:
    """Return the pool with tokens at their slots; those of slot -1 go to the null block."""
    index = jnp.maximum(slots, 0)
    block = jnp.take_along_axis(table, index // pages.block_size, axis=1, mode="clip")
    return pages.write(layer, k, v, jnp.where(slots >= 0, block, 0), index % pages.block_size)
