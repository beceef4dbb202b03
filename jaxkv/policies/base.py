"""What a policy is: what it looks at, how it ranks slots, and which it always keeps."""

from __future__ import annotations

from flax import struct

from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Bool, Float, Int
from jaxkv.select import Budgets
from jaxkv.stats import QuerySums


@struct.dataclass
class Cached:
    """One layer of the pool, as the rows to be compacted see it."""

    k: Float[Array, "N K P D"]
    """Keys after RoPE."""
    v: Float[Array, "N K P D"]
    table: Int[Array, "B M"]
    length: Int[Array, "B"]
    position: Int[Array, "B"]
    layer: int = struct.field(pytree_node=False)
    """Index in the model, for statistics and observations."""

    @property
    def slots(self) -> int:
        """S, slots that the table has room for."""
        return self.table.shape[1] * self.k.shape[2]


@struct.dataclass
class Observed:
    """What the engine gathered about B rows while they ran. What the policy does not ask for is None."""

    query_sums: tuple[QuerySums, ...] | None = None
    """A layer's sums of queries before RoPE, where ``Policy.observes_queries`` is True."""
    last_queries: tuple[Float[Array, "B H Q D"], ...] | None = None
    """A layer's last ``Policy.last_queries`` queries after RoPE, oldest first."""

    @classmethod
    def create(cls, policy: Policy, model: ModelConfig, rows: int) -> Observed | None:
        """Return what a policy wants gathered about B rows, empty; None if it wants nothing."""
        if not policy.observes_queries:
            return None
        sums = QuerySums.create(rows, model.heads, model.frequencies)
        return cls(query_sums=(sums,) * model.layers)

    def add(self, layer: int, q: Float[Array, "B T H D"], real: Bool[Array, "B T"]) -> Observed:
        """Return it with a layer's queries before RoPE added, those where ``real`` is False left out."""
        if self.query_sums is None:
            return self
        sums = (*self.query_sums[:layer], self.query_sums[layer].add(q, real), *self.query_sums[layer + 1 :])
        return self.replace(query_sums=sums)  # type: ignore[attr-defined]

    def cleared(self, rows: Bool[Array, "B"]) -> Observed:
        """Return it with some rows empty, as when another request takes the row."""
        sums = self.query_sums
        cleared = None if sums is None else tuple(layer.cleared(rows) for layer in sums)
        return self.replace(query_sums=cleared)  # type: ignore[attr-defined]

    def put(self, rows: Int[Array, "R"], other: Observed) -> Observed:
        """Return it with some rows taken from another; a row past the last is dropped."""
        if self.query_sums is None or other.query_sums is None:
            return self
        pairs = zip(self.query_sums, other.query_sums, strict=True)
        sums = tuple(mine.put(rows, theirs) for mine, theirs in pairs)
        return self.replace(query_sums=sums)  # type: ignore[attr-defined]

    def at(self, rows: Int[Array, "R"]) -> Observed:
        """Return what was gathered about some rows."""
        sums, last = self.query_sums, self.last_queries
        return Observed(
            query_sums=None if sums is None else tuple(layer.at(rows) for layer in sums),
            last_queries=None if last is None else tuple(layer[rows] for layer in last),
        )


class Policy:
    """A way to rank cached slots. A subclass is a ``flax.struct.dataclass``: its arrays are traced, its type is static.

    A new policy is one module of ``jaxkv.policies`` with a subclass and ``make``.
    """

    @property
    def observes_queries(self) -> bool:
        """Whether the engine has to sum up each row's queries before RoPE."""
        return False

    @property
    def last_queries(self) -> int:
        """How many of each head's last queries the engine has to keep."""
        return 0

    def score(self, cached: Cached, observed: Observed) -> Float[Array, "B K G S"]:
        """Return a score a slot; the highest stay. K and G may be 1. From ``length`` on anything goes."""
        raise NotImplementedError(f"{type(self).__name__} has no score")

    def budgets(self, budgets: Budgets) -> Budgets:
        """Return the budgets with what this policy always keeps. Sinks and the newest window are there already."""
        return budgets
