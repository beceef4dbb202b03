"""The jitted steps: prefill a chunk, decode a round, compact rows. Pure functions on arrays, for people who bring
their own loop.

A round is one donated jit around a ``lax.while_loop``: token -> forward -> attend -> sample. How many steps it takes
is a traced argument, as are tables, lengths and positions, so nothing recompiles when they change.

    pool = KVPool.create(model, cache)
    pool, out = prefill_chunk(weights, pool, chunk, config=model)               # until the prompt is in
    pool, rows, out = decode_round(weights, pool, rows, steps, config=model)    # until the rows end
    pool = compact_round(pool, table, table, length, position, due, budgets, policy, mode="per_head")

A call may still be reading its NumPy arguments after it has returned: make new ones for the next call.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from jaxkv import model, sampling
from jaxkv.batch import Chunk as Chunk
from jaxkv.batch import PrefillOutput as PrefillOutput
from jaxkv.batch import RoundOutput as RoundOutput
from jaxkv.batch import Rows as Rows
from jaxkv.compact import compact_rows, compaction_widths
from jaxkv.compression import Mode
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Bool, Float, Int
from jaxkv.policies.base import Observed, Policy
from jaxkv.pool import KVPool
from jaxkv.sampling import Sampling, Seen
from jaxkv.select import Budgets


def paged_attend(
    table: Int[Array, "B M"],
    slots: Int[Array, "B T"],
    implementation: pallas_kernels.Implementation | None = None,
) -> model.Attend[KVPool]:
    """Return the attention callback that writes each token to its slot of the pool and attends up to it.

    Args:
      table: blocks of each row.
      slots: the slot of every token in its row; -1 is padding, written to the null block and given zeros.
      implementation: as for ``pallas_kernels.attend``.
    """

    def attend(pool: KVPool, layer: int, heads: model.Heads) -> tuple[KVPool, Array]:
        real = slots >= 0
        index = jnp.where(real, slots, 0)
        block = jnp.take_along_axis(table, index // pool.block_size, axis=1, mode="clip")
        q, k = heads.rotated()
        pool = pool.write(layer, k, heads.v, jnp.where(real, block, 0), index % pool.block_size)
        out = pallas_kernels.attend(q, pool.k[layer], pool.v[layer], table, slots, implementation=implementation)
        return pool, out

    return attend


def observing(attend: model.Attend[KVPool], real: Bool[Array, "B T"]) -> model.Attend[tuple[KVPool, Observed | None]]:
    """Return a callback that attends as ``attend`` does and gathers what is asked for of the real queries."""

    def both(
        state: tuple[KVPool, Observed | None], layer: int, heads: model.Heads
    ) -> tuple[tuple[KVPool, Observed | None], Array]:
        pool, observed = state
        pool, out = attend(pool, layer, heads)
        if observed is not None:
            observed = observed.add(layer, heads, real)
        return (pool, observed), out

    return both


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames=("pool",))
def prefill_chunk(
    weights: model.Weights,
    pool: KVPool,
    chunk: Chunk,
    *,
    config: ModelConfig,
    implementation: pallas_kernels.Implementation | None = None,
) -> tuple[KVPool, PrefillOutput]:
    """Put a chunk of each prompt into the pool, and draw the token that follows it.

    Args:
      weights: the model's weights.
      pool: donated.
      chunk: B rows of up to T tokens. Rows may be ragged; no two may share a block that is written.
      config: the model's shapes (static).
      implementation: as for ``pallas_kernels.attend`` (static).

    Returns:
      The pool, and what follows each row's last real token; of use once the prompt is in.
    """
    steps = jnp.arange(chunk.tokens.shape[1])
    real = steps < chunk.count[:, None]
    slots = jnp.where(real, chunk.length[:, None] + steps, -1)
    attend = observing(paged_attend(chunk.table, slots, implementation), real)
    own = None if chunk.observed is None else chunk.observed.at(chunk.row).cleared(chunk.position == 0)
    positions = chunk.position[:, None] + steps
    (pool, own), hidden = model.forward(weights, config, chunk.tokens, positions, attend, (pool, own))
    last = jnp.maximum(chunk.count - 1, 0)
    logits = model.logits(weights, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    seen = None if chunk.seen is None else chunk.seen.at(jnp.minimum(chunk.row, chunk.seen.prompt.shape[0] - 1))
    token, logprob = sampling.sample(logits, chunk.sampling, seen)
    observed = None if chunk.observed is None or own is None else chunk.observed.put(chunk.row, own)
    return pool, PrefillOutput(logits=logits, token=token, logprob=logprob, observed=observed)


@functools.partial(jax.jit, static_argnames=("config", "max_steps", "implementation"), donate_argnames=("pool",))
def decode_round(
    weights: model.Weights,
    pool: KVPool,
    rows: Rows,
    steps: Int[Array, ""],
    *,
    config: ModelConfig,
    max_steps: int = 32,
    implementation: pallas_kernels.Implementation | None = None,
) -> tuple[KVPool, Rows, RoundOutput]:
    """Decode ``min(steps, max_steps)`` tokens a row, or until every row has drawn a stop token.

    Args:
      weights: the model's weights.
      pool: donated.
      rows: B rows. A row's table must have room for ``length + steps`` slots.
      steps: a traced int32 scalar.
      config: the model's shapes (static).
      max_steps: R, the width of the output (static).
      implementation: as for ``pallas_kernels.attend`` (static).

    Returns:
      The pool, the rows after the round, and its tokens. A row whose token was a stop token is no longer active,
      and that token's K and V are not in the pool.
    """
    out = RoundOutput.empty(rows.token.shape[0], max_steps)
    return _decode_until(weights, pool, rows, out, jnp.minimum(steps, max_steps), config, implementation)


@jax.jit
def draw_again(
    logits: Float[Array, "B V"], index: Int[Array, "R"], rows: Sampling, seen: Seen | None
) -> tuple[Int[Array, "R"], Float[Array, "R"]]:
    """Draw R more tokens from what ``prefill_chunk`` returned: the first ones of rows that share a prompt.

    Args:
      logits: of the chunk's prompts.
      index: which prompt each of the R rows continues.
      rows: how each of them draws.
      seen: of the R rows.

    Returns:
      The tokens and their log probabilities.
    """
    return sampling.sample(logits[index], rows, seen)


@functools.partial(
    jax.jit, static_argnames=("n", "config", "mode", "lanes", "implementation"), donate_argnames=("pool",)
)
def decode_trace(
    weights: model.Weights,
    pool: KVPool,
    rows: Rows,
    *,
    n: int,
    config: ModelConfig,
    budgets: Budgets | None = None,
    policy: Policy | None = None,
    mode: Mode = "per_head",
    lanes: int = 1,
    implementation: pallas_kernels.Implementation | None = None,
) -> tuple[KVPool, Rows, RoundOutput]:
    """Decode n tokens a row, or until all rows have drawn a stop token, with compaction inside: one program, no host.

    Tokens are those that an engine of as many rows gives. Memory is constant: with a budget a row never holds more than
    ``b_row + interval`` slots, so its table needs ``ceil((b_row + interval) / P)`` blocks however large n is, and these
    have to be its own.

    Args:
      weights: the model's weights.
      pool: donated. It has the rows' prompts in it; see ``prefill_chunk``.
      rows: B rows. ``observed`` is for a policy that sums up queries.
      n: most tokens a row (static): the width of the output.
      config: the model's shapes (static).
      budgets, policy: what rows may hold and how slots are ranked; both None keeps every token, and tables need room
        for ``length + n`` slots.
      mode: whose scores are pooled (static).
      lanes: rows compacted at once (static).
      implementation: as for ``pallas_kernels.attend`` (static).

    Returns:
      The pool, the rows afterwards, and the tokens.

    Raises:
      ValueError: of budgets and policy only one was given.
    """
    if (budgets is None) != (policy is None):
        raise ValueError("budgets and policy go together: give both to compact rows, or neither to keep every token")
    out = RoundOutput.empty(rows.token.shape[0], n)
    if budgets is None or policy is None:
        return _decode_until(weights, pool, rows, out, jnp.int32(n), config, implementation)
    settings = {"mode": mode, "lanes": lanes, "implementation": implementation}
    return _decode_compacting(weights, pool, rows, out, n, config, budgets, policy, settings)


@functools.partial(jax.jit, static_argnames=("mode", "lanes", "implementation"), donate_argnames=("pool",))
def compact_round(
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
    implementation: pallas_kernels.Implementation | None = None,
) -> KVPool:
    """Bring every row that is due down to its budget; see ``compact.compact_rows``. The pool is donated.

    A row that was due holds ``min(length, b_row)`` slots afterwards, whatever the scores say, so its last blocks can be
    given away as soon as this is called.
    """
    args = (table, target, length, position, due, budgets, policy, observed)
    return compact_rows(pool, *args, mode=mode, lanes=lanes, implementation=implementation)[0]


def _decode_until(
    weights: model.Weights,
    pool: KVPool,
    rows: Rows,
    out: RoundOutput,
    end: Int[Array, ""],
    config: ModelConfig,
    implementation: pallas_kernels.Implementation | None,
) -> tuple[KVPool, Rows, RoundOutput]:
    """Decode until active rows have ``end`` tokens in ``out``, or no row is active. All active rows have as many."""

    def going(carry: tuple[Any, ...]) -> Array:
        step, _, rows, _ = carry
        return (step < end) & jnp.any(rows.active)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, pool, rows, out = carry
        pool, observed, logits = _decode_step(weights, pool, rows, config, implementation)
        seen = None if rows.seen is None else rows.seen.add(rows.token, rows.active)
        tokens, logprobs = sampling.sample(logits, rows.sampling, seen)
        out = out.replace(
            tokens=out.tokens.at[:, step].set(jnp.where(rows.active, tokens, 0)),
            logprobs=out.logprobs.at[:, step].set(jnp.where(rows.active, logprobs, 0)),
            count=out.count + rows.active,
        )
        return step + 1, pool, _advanced(rows, tokens, observed, seen), out

    _, pool, rows, out = lax.while_loop(going, body, (jnp.max(out.count), pool, rows, out))
    return pool, rows, out


def _decode_compacting(
    weights: model.Weights,
    pool: KVPool,
    rows: Rows,
    out: RoundOutput,
    n: int,
    config: ModelConfig,
    budgets: Budgets,
    policy: Policy,
    settings: dict[str, Any],
) -> tuple[KVPool, Rows, RoundOutput]:
    """Decode until active rows have n tokens: up to the next trigger of any row, compact what is due, and on."""
    # The same width as in an engine, so that sums over slots round alike.
    held = rows.table.shape[1]
    width = compaction_widths(held, pool.block_size)[-1]
    table = jnp.pad(rows.table, ((0, 0), (0, width - held)))

    def going(carry: tuple[Any, ...]) -> Array:
        _, rows, out = carry
        return (jnp.max(out.count) < n) & jnp.any(rows.active)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        pool, rows, out = carry
        due = rows.active & (rows.length >= budgets.trigger)
        # A conditional would copy the pool. A call with nothing due goes through no row.
        args = (table, table, rows.length, rows.position, due, budgets, policy, rows.observed)
        pool, length = compact_rows(pool, *args, **settings)
        rows = rows.replace(length=length)
        room = jnp.min(jnp.where(rows.active, budgets.trigger - length, n))
        end = jnp.minimum(jnp.max(out.count) + room, n)
        return _decode_until(weights, pool, rows, out, end, config, settings["implementation"])

    carry: tuple[KVPool, Rows, RoundOutput] = lax.while_loop(going, body, (pool, rows, out))
    return carry


def _decode_step(
    weights: model.Weights, pool: KVPool, rows: Rows, config: ModelConfig, implementation: Any
) -> tuple[KVPool, Observed | None, Float[Array, "B V"]]:
    slots = jnp.where(rows.active, rows.length, -1)[:, None]
    attend = observing(paged_attend(rows.table, slots, implementation), rows.active[:, None])
    state = (pool, rows.observed)
    (pool, observed), hidden = model.forward(
        weights, config, rows.token[:, None], rows.position[:, None], attend, state
    )
    return pool, observed, model.logits(weights, hidden[:, 0])


def _advanced(rows: Rows, tokens: Int[Array, "B"], observed: Observed | None, seen: Seen | None) -> Rows:
    grown = rows.active.astype(jnp.int32)
    return rows.replace(  # type: ignore[attr-defined]
        token=jnp.where(rows.active, tokens, rows.token),
        length=rows.length + grown,
        position=rows.position + grown,
        active=rows.active & ~rows.sampling.is_stop(tokens),
        sampling=rows.sampling.replace(generated=rows.sampling.generated + grown),  # type: ignore[attr-defined]
        observed=observed,
        seen=seen,
    )
