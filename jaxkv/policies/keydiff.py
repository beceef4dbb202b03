"""KeyDiff (arXiv 2504.15364): keys least like the mean direction of all the row's keys stay."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.stats import QueryStats
from pallas_kernels import score_reference

_EPS = 1e-12


@struct.dataclass
class KeyDiff(Policy):
    """A key is worth its cosine similarity to the anchor, negated; the anchor is the mean of the unit keys."""

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K 1 S"]:
        kv_heads, dim = cached.k.shape[1], cached.k.shape[3]
        length = jnp.repeat(cached.length, kv_heads)[:, None]

        def add(total: Array, keys: Array, slots: Array) -> Array:
            held = (slots < length)[..., None]
            return total + jnp.sum(jnp.where(held, _unit(keys), 0), axis=1)

        anchor = jnp.zeros((cached.table.shape[0] * kv_heads, dim), jnp.float32)
        # A sum points where the mean does, and only its direction counts.
        anchor = _unit(score_reference.fold_tiles(add, anchor, cached.k, cached.table, cached.length))

        def difference(keys: Array, slots: Array) -> Array:
            return -jnp.einsum("rd,rsd->rs", anchor, _unit(keys), precision="highest")[:, None]

        return score_reference.map_tiles(difference, cached.k, cached.table, cached.length)


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> KeyDiff:
    """Return the policy; it needs neither model nor statistics."""
    return KeyDiff()


def _unit(vectors: Array) -> Array:
    return vectors / jnp.maximum(jnp.sqrt(jnp.sum(vectors * vectors, axis=-1, keepdims=True)), _EPS)
