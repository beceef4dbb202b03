"""Kept slots -> a plan in integers -> moved blocks, and the whole pass over rows that have reached their trigger."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

import pallas_kernels
from jaxkv.compression import Mode
from jaxkv.dims import Array, Bool, Int, ceil_div
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.pool import KVPool
from jaxkv.select import Budgets, Ranks, newest

Pages = TypeVar("Pages")

NARROWEST = 1024
"""Slots of the narrowest compaction."""


def compaction_widths(table_width: int, block_size: int) -> list[int]:
    """Return the widths, in blocks, that rows are compacted at: four times apart, the last at least ``table_width``.

    Normalising and sorting cost by the width, and sums may round by it. So a row takes the narrowest that holds it, in
    an engine and in a whole trace alike.
    """
    widths = [ceil_div(NARROWEST, block_size)]
    while widths[-1] < table_width:
        widths.append(4 * widths[-1])
    return widths


@struct.dataclass
class Plan:
    """Which slot goes where, in integers."""

    keep: Int[Array, "B X S"]
    """Slot j of a head receives slot ``keep[j] >= j``. X is K, or 1 where all heads keep the same."""
    count: Int[Array, "B"]
    """Slots that a row keeps; 0 where the row is left alone."""
    source: Int[Array, "B M"]
    """The row's blocks before."""
    target: Int[Array, "B M"]
    """The block that each of them is written to, -1 for those that stay as they are or come free."""


def plan(
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"] | None = None,
) -> Plan:
    """Return how to move the kept slots: no block is written in which nothing changes.

    Args:
      keep: slots to keep, ascending, one list a head; entries from ``count`` on are padding.
      count: how many; 0 leaves a row alone.
      source: the rows' block tables; M * P = S.
      target: the same, with a fresh private block in place of each shared one that may be written
        (``compression.written_blocks`` knows them). A fresh block is nobody's source. None: all blocks are private.

    Raises:
      ValueError: the widths do not fit.
    """
    target = source if target is None else target
    width, slots = source.shape[1], keep.shape[2]
    if slots % width or target.shape != source.shape:
        raise ValueError(f"keep {keep.shape} and tables {source.shape}, {target.shape} do not fit: S must be M * P")
    index = jnp.arange(slots)
    moved = jnp.any((keep != index) & (index < count[:, None, None]), axis=1)
    moved = jnp.any(moved.reshape(-1, width, slots // width), axis=-1) | (target != source)
    written = moved & (jnp.arange(width) * (slots // width) < count[:, None])
    return Plan(keep=keep, count=count, source=source, target=jnp.where(written, target, -1))


def compact(pages: Pages, plan: Plan, implementation: pallas_kernels.Implementation | None = None) -> Pages:
    """Move the kept slots of every array of a pytree, bit for bit.

    Args:
      pages: arrays ``[N, K, P, ...]``, or ``[N, P, ...]`` where all heads keep the same. Donate them, and no second
        copy is made (of float32 on a CPU; XLA widens a 16-bit scatter there).
      plan: for these pages; codes and scales of quantised pages move by one plan.
      implementation: as for ``pallas_kernels.compact``.

    Raises:
      ValueError: an array has another shape, or no heads while heads keep different slots.
    """
    args = (plan.keep, plan.count, plan.source, plan.target)
    return pallas_kernels.compact(pages, *args, implementation=implementation)


def compact_rows(
    pool: KVPool,
    table: Int[Array, "B M"],
    target: Int[Array, "B M"],
    length: Int[Array, "B"],
    position: Int[Array, "B"],
    due: Bool[Array, "B"],
    budgets: Budgets,
    policy: Policy,
    observed: Observed | None = None,
    *,
    mode: Mode,
    lanes: int = 1,
    sliding: tuple[int, ...] = (),
    implementation: pallas_kernels.Implementation | None = None,
) -> tuple[KVPool, Int[Array, "B"]]:
    """Bring every row that is due down to its budget: score all layers, select, move.

    To be jitted with the pool donated, or called inside a ``lax.while_loop``. Rows go ``lanes`` at a time, due ones
    only, so that what a call costs depends on how many are due.

    Args:
      pool: the pool; its block 0 and the blocks of other rows are not written.
      table: the rows' blocks, M wide enough for the longest row that is due. Selecting costs in proportion to M, so
        while decoding pass the first ceil((b_row + interval) / P) columns, not the whole table.
      target: the blocks that survivors go to; ``table`` itself where all are private.
      length: slots that each row holds.
      position: tokens of each row whose K and V are computed.
      due: which rows to compact.
      budgets: what each may keep.
      policy: how slots are ranked; a pytree.
      observed: what the policy asked the engine to gather.
      mode: whose scores are pooled (static).
      lanes: rows handled at once (static): 1 suits a CPU, all of them kernels on an accelerator. It may change the
        rounding of a score, so one engine uses one number.
      sliding: layers with a sliding window (static). They keep their newest slots and take no part in the scores.
      implementation: as for ``pallas_kernels.score`` and ``compact`` (static).

    Returns:
      The pool, and the lengths after it: ``min(length, b_row)`` where due.
    """
    observed = Observed() if observed is None else observed
    budgets = policy.budgets(budgets)
    rows = length.shape[0]
    waiting = jnp.sum(due, dtype=jnp.int32)
    order = jnp.argsort(~due, stable=True)
    order = jnp.pad(order, (0, -rows % lanes))

    def some_rows(turn: Array, pool: KVPool) -> KVPool:
        index = lax.dynamic_slice_in_dim(order, turn * lanes, lanes)
        here = turn * lanes + jnp.arange(lanes) < waiting
        lane = (table[index], target[index], jnp.where(here, length[index], 0), position[index], budgets.at(index))
        layers = frozenset(sliding)
        return _compact_lanes(pool, *lane, policy, observed.at(index), mode, layers, implementation)

    pool = lax.fori_loop(0, (waiting + lanes - 1) // lanes, some_rows, pool)
    return pool, jnp.where(due, jnp.minimum(length, budgets.b_row), length)


def _compact_lanes(
    pool: KVPool,
    table: Int[Array, "R M"],
    target: Int[Array, "R M"],
    length: Int[Array, "R"],
    position: Int[Array, "R"],
    budgets: Budgets,
    policy: Policy,
    observed: Observed,
    mode: Mode,
    sliding: frozenset[int],
    implementation: pallas_kernels.Implementation | None,
) -> KVPool:
    scored = [layer for layer in range(len(pool.k)) if layer not in sliding]
    ranks = Ranks(mode)
    held = length
    for layer in scored:
        with jax.named_scope("score"):
            cached = Cached(pool.k[layer], pool.v[layer], table, held, position, layer, implementation)
            score = policy.score(cached, observed)
        with jax.named_scope("select"):
            ranks = ranks.add(score, held, budgets)
            # The next layer is scored after this one is ranked: the scores of all layers are as large as a row's pool.
            held, ranks = lax.optimization_barrier((held, ranks))
    with jax.named_scope("select"):
        keeps = ranks.keep(length, budgets) if scored else ()
        groups = [(keep, scored if len(keeps) == 1 else [scored[i]]) for i, keep in enumerate(keeps)]
        if sliding:
            slots = table.shape[1] * pool.block_size
            groups.append((newest(length, budgets, slots), sorted(sliding)))
    count = jnp.minimum(length, budgets.b_row)
    k, v = list(pool.k), list(pool.v)
    with jax.named_scope("move"):
        for keep, layers in groups:
            pages = [(k[layer], v[layer]) for layer in layers]
            for layer, page in zip(
                layers, compact(pages, plan(keep, count, table, target), implementation), strict=True
            ):
                k[layer], v[layer] = page
    return pool.replace(k=tuple(k), v=tuple(v))  # type: ignore[attr-defined]
