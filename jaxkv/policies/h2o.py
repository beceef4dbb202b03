"""H2O (arXiv 2306.14048): keys that gathered the most attention stay, here that of the last 128 queries.

H2O adds up the attention of every query since the beginning. Attention kernels of the flash kind never write it down,
and the sums would have to move with their slots. So this policy attends once more, with the last 128 queries: all that
came since the last compaction at the default interval, and the last 128 of a prompt. ``scripts/quality.py`` also
measures H2O over every query (``h2o_all``), which the engine does not gather.
"""

from __future__ import annotations

from flax import struct

from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.policies.snapkv import attention_mass
from jaxkv.stats import QueryStats

QUERIES = 128
"""Queries whose attention is added up. They take 4 * L * H * D * 128 bytes a row: 8.4 MiB on the demo model."""


@struct.dataclass
class H2O(Policy):
    """A key is worth the attention of the last 128 queries of its heads. ``scale`` is 1 / sqrt(D)."""

    scale: float = struct.field(pytree_node=False)

    @property
    def last_queries(self) -> int:
        return QUERIES

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K 1 S"]:
        return attention_mass(cached, observed, self.scale)


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> H2O:
    """Return the policy; statistics are of no use to it."""
    return H2O(scale=model.head_dim**-0.5)
