"""TriAttention (arXiv 2604.04921): keys that the mean query of each head will want."""

from __future__ import annotations

from flax import struct

from jaxkv import triattention
from jaxkv.compression import CompressionConfig
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.stats import QueryStats


@struct.dataclass
class TriAttention(Policy):
    """``stats`` None takes each row's own queries, summed up while it runs."""

    phases: triattention.Phases
    stats: QueryStats | None = None

    @property
    def observes_queries(self) -> bool:
        return self.stats is None

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K G S"]:
        if self.stats is not None:
            means = self.stats.layer(cached.layer)
        elif observed.query_sums is not None:
            means = observed.query_sums[cached.layer].means()
        else:
            raise ValueError(
                "triattention without stats needs the rows' query sums; give stats, or Observed.query_sums"
            )
        return triattention.score(
            cached.k,
            cached.table,
            cached.length,
            cached.position,
            means=means,
            phases=self.phases,
            implementation=cached.implementation,
        )


def make(config: CompressionConfig, model: ModelConfig, stats: QueryStats | None = None) -> TriAttention:
    """Return the policy for a model, with its statistics, or None for each row's own."""
    if stats is not None:
        stats.check(model)
    phases = triattention.Phases.of_model(model, offsets=config.offsets, aggregation=config.aggregation)
    return TriAttention(phases=phases, stats=stats)
