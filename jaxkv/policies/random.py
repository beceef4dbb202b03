"""Random eviction: the floor that a policy has to beat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.stats import QueryStats


@struct.dataclass
class Random(Policy):
    """Every slot draws a number, by seed, layer and the row's position: neighbours have no part in it."""

    seed: Array

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K 1 S"]:
        key = jax.random.fold_in(jax.random.key(self.seed), cached.layer)
        shape = (cached.k.shape[1], 1, cached.slots)
        return jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position), shape))(cached.position)


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> Random:
    """Return the policy with the configuration's seed."""
    return Random(seed=jnp.uint32(config.seed))
