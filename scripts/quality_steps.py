"""Teacher-forced steps over one row: run a chunk, compress, compare. Pure functions on arrays, and what a row is at."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import decode, model
from jaxkv.compact import compact, plan
from jaxkv.compression import Mode, RowBudget
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import Array, Float, Int, ceil_div
from jaxkv.policies.base import Observed, Policy
from jaxkv.pool import KVPool
from jaxkv.select import Budgets, select
from jaxkv.stats import QuerySums

CHUNK = 128
"""Tokens of a forward pass: what is scored between two compactions."""

BLOCK = 16
"""P of the pool that quality is measured in; it changes no kept slot."""

LAST_QUERIES = 128
"""Queries kept of each head: the most that a policy asks for."""

Mass = tuple[Float[Array, "N K P"], ...]
"""A layer's attention that each slot ever got, averaged over the heads of a KV head."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One text on its way through the model. Blocks 1, 2, .. hold its slots in order.

    Attributes:
      pool: its keys and values.
      observed: sums of all its queries, and the last 128 of them.
      mass: the attention that its slots got, None where nobody asks for it.
      length, position: slots held, and tokens computed.
    """

    pool: KVPool
    observed: Observed
    mass: Mass | None
    length: int = 0
    position: int = 0

    @classmethod
    def empty(cls, config: ModelConfig, slots: int, mass: bool = False, dtype: str = "float32") -> Row:
        """Return a row without a token and with room for ``slots`` of them."""
        shape = CacheConfig(blocks=ceil_div(slots, BLOCK), context=slots, block_size=BLOCK, dtype=dtype)
        queries = jnp.zeros((1, config.heads, LAST_QUERIES, config.head_dim), jnp.float32)
        page = jnp.zeros((shape.blocks + 1, config.kv_heads, BLOCK), jnp.float32)
        return cls(
            pool=KVPool.create(config, shape),
            observed=Observed(
                query_sums=(QuerySums.create(1, config.heads, config.frequencies),) * config.layers,
                last_queries=(queries,) * config.layers,
            ),
            mass=(page,) * config.layers if mass else None,
        )

    @property
    def table(self) -> np.ndarray:
        """The row's blocks, [1, M]."""
        return np.arange(1, self.pool.k[0].shape[0], dtype=np.int32)[None]


def run(weights: model.Weights, config: ModelConfig, row: Row, tokens: np.ndarray) -> tuple[Row, Float[Array, "T E"]]:
    """Put up to 128 tokens at the end of a row; return it and their hidden vectors. The row given stays as it is."""
    padded = np.zeros((1, CHUNK), np.int32)
    padded[0, : tokens.size] = tokens
    bounds = np.array([tokens.size, row.length, row.position], np.int32)
    state = (jax.tree.map(jnp.copy, row.pool), row.observed, row.mass)
    (pool, observed, mass), hidden = _run(weights, *state, padded, row.table, bounds, config=config)
    length, position = row.length + tokens.size, row.position + tokens.size
    return Row(pool, observed, mass, length, position), hidden[: tokens.size]


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pool")
def _run(
    weights: model.Weights,
    pool: KVPool,
    observed: Observed,
    mass: Mass | None,
    tokens: Int[Array, "1 T"],
    table: Int[Array, "1 M"],
    bounds: Int[Array, "3"],
    *,
    config: ModelConfig,
) -> tuple[tuple[KVPool, Observed, Mass | None], Float[Array, "T E"]]:
    count, length, position = bounds
    steps = jnp.arange(tokens.shape[1])[None]
    slots = jnp.where(steps < count, length + steps, -1)
    paged = decode.observing(decode.paged_attend(table, slots), steps < count)

    def attend(state: Any, layer: int, heads: model.Heads) -> tuple[Any, Array]:
        pool, observed, mass = state
        (pool, observed), out = paged((pool, observed), layer, heads)
        if mass is not None:
            more = attention_mass(heads.rotated()[0], pool.k[layer], table, slots)
            mass = (*mass[:layer], mass[layer].at[table[0]].add(more), *mass[layer + 1 :])
        return (pool, observed, mass), out

    state, hidden = model.forward(weights, config, tokens, position + steps, attend, (pool, observed, mass))
    return state, hidden[0]


def attention_mass(
    q: Float[Array, "1 T H D"], k_pages: Float[Array, "N K P D"], table: Int[Array, "1 M"], slots: Int[Array, "1 T"]
) -> Float[Array, "M K P"]:
    """Return the attention that T queries give each slot, summed over them and averaged over a KV head's G heads."""
    keys = k_pages[table[0]].swapaxes(0, 1)
    kv_heads, width, block, dim = keys.shape
    queries = q[0].reshape(q.shape[1], kv_heads, -1, dim)
    logits = jnp.einsum("tkgd,ksd->kgts", queries, keys.reshape(kv_heads, -1, dim)) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(width * block) <= slots[0][:, None], logits, -1e30), axis=-1)
    weights = jnp.where(slots[0][:, None] >= 0, weights, 0)
    return weights.sum(axis=2).mean(axis=1).reshape(kv_heads, width, block).swapaxes(0, 1)


def compress(row: Row, budget: RowBudget, policy: Policy | None, mode: Mode) -> Row:
    """Return a row brought down to its budget. Without a policy, by the attention that its slots ever got."""
    kept = budget.kept(row.length)
    budgets = Budgets.stack([budget])
    bounds = [np.array([x], np.int32) for x in (row.length, row.position)]
    pool = jax.tree.map(jnp.copy, row.pool)
    if policy is None:
        assert row.mass is not None
        pool, mass = _compress_by_mass(pool, row.mass, row.table, bounds[0], budgets, mode=mode)
        return dataclasses.replace(row, pool=pool, mass=mass, length=kept)
    observed = wanted(row.observed, policy)
    pool = decode.compact_round(
        pool, row.table, row.table, *bounds, np.array([True]), budgets, policy, observed, mode=mode
    )
    return dataclasses.replace(row, pool=pool, length=kept)


def wanted(observed: Observed, policy: Policy) -> Observed | None:
    """Return of what was gathered only what a policy would have had gathered."""
    sums = observed.query_sums if policy.observes_queries else None
    last = observed.last_queries if policy.last_queries else None
    if last is not None:
        last = tuple(queries[:, :, -policy.last_queries :] for queries in last)
    return None if sums is None and last is None else Observed(query_sums=sums, last_queries=last)


@functools.partial(jax.jit, static_argnames="mode", donate_argnames="pool")
def _compress_by_mass(
    pool: KVPool, mass: Mass, table: Int[Array, "1 M"], length: Int[Array, "1"], budgets: Budgets, *, mode: Mode
) -> tuple[KVPool, Mass]:
    scores = [pages[table].swapaxes(1, 2).reshape(1, pages.shape[1], 1, -1) for pages in mass]
    keeps = select(scores, length, budgets, mode)
    count = jnp.minimum(length, budgets.b_row)
    layers = []
    for layer, pages in enumerate(zip(pool.k, pool.v, mass, strict=True)):
        layers.append(compact(pages, plan(keeps[layer if len(keeps) > 1 else 0], count, table)))
    k, v, moved = zip(*layers, strict=True)
    return pool.replace(k=k, v=v), _blank(moved, count, table)  # type: ignore[attr-defined]


def _blank(mass: Mass, count: Int[Array, "1"], table: Int[Array, "1 M"]) -> Mass:
    """Return the mass with zeros in slots that come free, for the tokens that will take them."""
    free = jnp.arange(table.shape[1] * BLOCK).reshape(-1, 1, BLOCK) >= count
    return tuple(pages.at[table[0]].set(jnp.where(free, 0, pages[table[0]])) for pages in mass)


@jax.jit
def log_probabilities(weights: model.Weights, hidden: Float[Array, "T E"]) -> Float[Array, "T V"]:
    """Return the float32 log probabilities of what follows each token."""
    return jax.nn.log_softmax(model.logits(weights, hidden), axis=-1)


@jax.jit
def compare(
    weights: model.Weights, hidden: Float[Array, "T E"], full: Float[Array, "T V"], targets: Int[Array, "T"]
) -> Float[Array, "4 T"]:
    """Return KL(full || compressed) in nats, whether both have the same best token, and the nll of both."""
    own = log_probabilities(weights, hidden)
    divergence = jnp.sum(jnp.exp(full) * (full - own), axis=-1)
    same = jnp.argmax(own, axis=-1) == jnp.argmax(full, axis=-1)
    nll = [-jnp.take_along_axis(x, targets[:, None], axis=1)[:, 0] for x in (own, full)]
    return jnp.stack([divergence, same.astype(jnp.float32), *nll])
