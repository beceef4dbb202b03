"""L2-norm eviction (arXiv 2406.11430): keys of a small norm draw the most attention, so they stay."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.stats import QueryStats
from pallas_kernels import score_reference


@struct.dataclass
class KNorm(Policy):
    """A key is worth its norm, negated. RoPE leaves norms alone."""

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K 1 S"]:
        def norm(keys: Array, slots: Array) -> Array:
            return -jnp.sqrt(jnp.sum(keys * keys, axis=-1))[:, None]

        return score_reference.map_tiles(norm, cached.k, cached.table, cached.length)


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> KNorm:
    """Return the policy; it needs neither model nor statistics."""
    return KNorm()
