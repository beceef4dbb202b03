"""SnapKV (arXiv 2404.14469): keys that the newest queries attend to, smoothed over their neighbours, stay.

The method was made for one compression at the end of a prompt. Here it runs again at every compaction, with the
queries that are the newest then.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.stats import QueryStats
from pallas_kernels import score_reference

QUERIES = 32
"""Queries of the observation window (the paper's section 4.1; its code has 32)."""

KERNEL = 5
"""Slots that a score is averaged over."""


@struct.dataclass
class SnapKV(Policy):
    """A key is worth the attention of the last 32 queries, averaged over them, its heads and five neighbouring slots.

    ``scale`` is what logits are multiplied by, 1 / sqrt(D).
    """

    scale: float = struct.field(pytree_node=False)

    @property
    def last_queries(self) -> int:
        return QUERIES

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K 1 S"]:
        mass = attention_mass(cached, observed, self.scale)
        padded = jnp.pad(mass, [(0, 0)] * 3 + [(KERNEL // 2, KERNEL // 2)])
        shifted = [padded[..., at : at + cached.slots] for at in range(KERNEL)]
        return sum(shifted[1:], shifted[0]) / KERNEL


def attention_mass(cached: Cached, observed: Observed, scale: float) -> Float[Array, "B K 1 S"]:
    """Return the attention that each slot gets of the last Q queries, averaged over these and the G heads of a KV head.

    Query j of Q belongs to slot ``length - Q + j`` and sees the slots up to it. That holds while none of the Q newest
    slots has ever been evicted, as with a window or an interval of Q or more; otherwise the oldest of the queries see
    some slots too few. At and past ``length`` the mass is 0.

    Raises:
      ValueError: the last queries were not gathered.
    """
    if observed.last_queries is None:
        raise ValueError(
            "this policy ranks by the attention of the last queries, and none were gathered: give Observed.last_queries"
        )
    queries = observed.last_queries[cached.layer]
    rows, heads, count, dim = queries.shape
    kv_heads = cached.k.shape[1]
    groups = heads // kv_heads
    own = queries.reshape(rows * kv_heads, groups * count, dim) * scale

    def logits(keys: Array, slots: Array) -> Array:
        # Pages may be wider than the heads.
        return jnp.einsum("rgd,rsd->rgs", own, keys[..., :dim], precision="highest")

    scores = score_reference.map_tiles(logits, cached.k, cached.table, cached.length, groups * count)
    scores = scores.reshape(rows, kv_heads, groups, count, cached.slots)
    newest = cached.length[:, None] - count + jnp.arange(count)
    seen = (jnp.arange(cached.slots) <= newest[..., None])[:, None, None]
    largest = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - largest, 0)), 0)
    # A query from before the first slot sees nothing.
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return jnp.mean(weights, axis=(2, 3))[:, :, None]


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> SnapKV:
    """Return the policy; statistics are of no use to it."""
    return SnapKV(scale=model.head_dim**-0.5)
