"""What a policy is: what it looks at, how it ranks slots, and which it always keeps."""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from flax import struct

import pallas_kernels
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Bool, Float, Int
from jaxkv.model import Heads
from jaxkv.select import Budgets
from jaxkv.stats import QuerySums

Item = TypeVar("Item")


@struct.dataclass
class Cached:
    """One layer of the pool, as the rows to be compacted see it."""

    k: Float[Array, "N K P D"]
    """Keys after RoPE. Pages may be wider than the heads, and have zeros past D in the slots that rows hold."""
    v: Float[Array, "N K P D"]
    table: Int[Array, "B M"]
    length: Int[Array, "B"]
    position: Int[Array, "B"]
    layer: int = struct.field(pytree_node=False)
    """Index in the model, for statistics and observations."""
    implementation: pallas_kernels.Implementation | None = struct.field(pytree_node=False, default=None)
    """As for ``pallas_kernels.score``."""

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
    """A layer's last ``Policy.last_queries`` queries after RoPE, oldest first; zeros for those not seen yet."""

    @classmethod
    def create(cls, policy: Policy, model: ModelConfig, rows: int) -> Observed | None:
        """Return what a policy wants gathered about B rows, empty; None if it wants nothing."""
        sums, last = None, None
        if policy.observes_queries:
            sums = (QuerySums.create(rows, model.heads, model.frequencies),) * model.layers
        if policy.last_queries:
            shape = (rows, model.heads, policy.last_queries, model.head_dim)
            last = (jnp.zeros(shape, jnp.float32),) * model.layers
        return None if sums is None and last is None else cls(query_sums=sums, last_queries=last)

    def add(self, layer: int, heads: Heads, real: Bool[Array, "B T"]) -> Observed:
        """Return it with a layer's queries added. ``real`` is True for each row's first tokens and False after them."""
        sums, last = self.query_sums, self.last_queries
        if sums is not None:
            sums = _replaced(sums, layer, sums[layer].add(heads.q, real))
        if last is not None:
            q, _ = heads.rotated()
            last = _replaced(last, layer, _newest(last[layer], q, real))
        return Observed(query_sums=sums, last_queries=last)

    def cleared(self, rows: Bool[Array, "B"]) -> Observed:
        """Return it with some rows empty, as when another request takes the row."""
        sums, last = self.query_sums, self.last_queries
        gone = rows[:, None, None, None]
        return Observed(
            query_sums=None if sums is None else tuple(layer.cleared(rows) for layer in sums),
            last_queries=None if last is None else tuple(jnp.where(gone, 0, layer) for layer in last),
        )

    def put(self, rows: Int[Array, "R"], other: Observed) -> Observed:
        """Return it with some rows taken from another; a row past the last is dropped."""
        sums, last = self.query_sums, self.last_queries
        if sums is not None and other.query_sums is not None:
            pairs = zip(sums, other.query_sums, strict=True)
            sums = tuple(mine.put(rows, theirs) for mine, theirs in pairs)
        if last is not None and other.last_queries is not None:
            pages = zip(last, other.last_queries, strict=True)
            last = tuple(mine.at[rows].set(theirs, mode="drop") for mine, theirs in pages)
        return Observed(query_sums=sums, last_queries=last)

    def at(self, rows: Int[Array, "R"]) -> Observed:
        """Return what was gathered about some rows."""
        sums, last = self.query_sums, self.last_queries
        return Observed(
            query_sums=None if sums is None else tuple(layer.at(rows) for layer in sums),
            last_queries=None if last is None else tuple(layer[rows] for layer in last),
        )


@struct.dataclass
class Policy:
    """A way to rank cached slots. A subclass is a ``flax.struct.dataclass``: its arrays are traced, its type is static.

    A new policy is one module of ``jaxkv.policies`` with a subclass and ``make``.
    """

    kind: str = struct.field(pytree_node=False, default="", kw_only=True)
    """The class by name; set here. To jaxlib 0.10.2 two dataclasses of like fields are equal as pytrees, so without
    this a jitted function now and then ran what had been compiled for another policy."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", f"{type(self).__module__}.{type(self).__qualname__}")

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


def _newest(
    held: Float[Array, "B H Q D"], q: Float[Array, "B T H D"], real: Bool[Array, "B T"]
) -> Float[Array, "B H Q D"]:
    """Return the newest Q of the queries held and of the real ones after them."""
    both = jnp.concatenate([held, q.astype(held.dtype).swapaxes(1, 2)], axis=2)
    index = jnp.sum(real, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(held.shape[2])
    return jnp.take_along_axis(both, index[:, None, :, None], axis=2)


def _replaced(items: tuple[Item, ...], index: int, new: Item) -> tuple[Item, ...]:
    return (*items[:index], new, *items[index + 1 :])
