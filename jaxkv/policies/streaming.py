"""StreamingLLM (arXiv 2309.17453): attention sinks and the most recent tokens."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.select import Budgets
from jaxkv.stats import QueryStats


@struct.dataclass
class Streaming(Policy):
    """Everything that is kept is always kept: the sinks, and the newest slots up to the budget."""

    def budgets(self, budgets: Budgets) -> Budgets:
        return budgets.replace(window=budgets.b_row - budgets.oldest)  # type: ignore[attr-defined]

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B 1 1 S"]:
        return jnp.zeros((cached.table.shape[0], 1, 1, cached.slots), jnp.float32)


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> Streaming:
    """Return the policy; it needs neither model nor statistics."""
    return Streaming()
