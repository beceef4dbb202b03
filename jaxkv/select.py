"""From scores to the slots that each head keeps, of which there are always as many as the budget says.

How many slots a row keeps never depends on a score: a NaN ranks last and still counts, ties go to the lowest slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxkv.compression import Mode, RowBudget
from jaxkv.dims import Array, Float, Int

SIGMA_FLOOR = 1e-6
_NEVER = 2**30


@struct.dataclass
class Budgets:
    """What each of B rows may hold, traced, so that no budget ever compiles anything. See ``RowBudget``."""

    b_row: Int[Array, "B"]
    interval: Int[Array, "B"]
    window: Int[Array, "B"]
    sinks: Int[Array, "B"]
    pinned: Int[Array, "B"]

    @classmethod
    def stack(cls, rows: Sequence[RowBudget | None]) -> Budgets:
        """Return NumPy arrays of the rows' budgets. None is a row that is never compacted."""
        never = RowBudget(b_row=_NEVER, interval=0, window=0, sinks=0, pinned=0)
        rows = [never if row is None else row for row in rows]
        fields = ("b_row", "interval", "window", "sinks", "pinned")
        arrays = {name: np.asarray([getattr(row, name) for row in rows], np.int32) for name in fields}
        return cls(**arrays)  # type: ignore[arg-type]

    @property
    def oldest(self) -> Int[Array, "B"]:
        """Oldest slots that are always kept."""
        return jnp.maximum(self.sinks, self.pinned)

    @property
    def trigger(self) -> Int[Array, "B"]:
        """The length at which a decoding row is compacted."""
        return self.b_row + self.interval

    def at(self, rows: Int[Array, "R"]) -> Budgets:
        """Return the budgets of some rows."""
        return jax.tree.map(lambda field: jnp.asarray(field)[rows], self)


def normalise(
    scores: Float[Array, "B K G S"], length: Int[Array, "B"], oldest: Int[Array, "B"]
) -> Float[Array, "B K G S"]:
    """Return z-scores of each query head over the row's slots, its ``oldest`` ones left out of the statistics.

    Two passes, divided by the count, sigma at least 1e-6. A NaN is in no statistics and becomes -inf; so does every
    slot at or past ``length``.
    """
    slots = jnp.arange(scores.shape[-1])
    held = slots < length[:, None, None, None]
    counted = held & (slots >= oldest[:, None, None, None]) & jnp.isfinite(scores)
    count = jnp.maximum(jnp.sum(counted, axis=-1, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(counted, scores, 0), axis=-1, keepdims=True) / count
    centred = jnp.where(counted, scores - mean, 0)
    sigma = jnp.sqrt(jnp.sum(centred * centred, axis=-1, keepdims=True) / count)
    return _nan_last(jnp.where(held, (scores - mean) / jnp.maximum(sigma, SIGMA_FLOOR), -jnp.inf))


def select(
    scores: Sequence[Float[Array, "B K G S"]],
    length: Int[Array, "B"],
    budgets: Budgets,
    mode: Mode,
) -> tuple[Int[Array, "B X S"], ...]:
    """Return the slots to keep: ascending, ``min(length, b_row)`` of them, then padding with S.

    The oldest and the newest slots that the budget pins come first, then the best of the rest. Each query head's
    scores become z-scores; a KV head takes the maximum over its G query heads; ``mode`` says how KV heads and layers
    are pooled.

    Args:
      scores: one array a layer that takes part; K and G may be 1 where a policy ranks slots for all heads alike.
      length: slots that each row holds.
      budgets: the rows' budgets.
      mode: see ``CompressionConfig``.

    Returns:
      One array for all layers, or one a layer with ``per_layer_head``. X is K, or 1 where all heads keep the same.
    """
    ranks = Ranks(mode)
    for layer in scores:
        ranks = ranks.add(layer, length, budgets)
    return ranks.keep(length, budgets)


@struct.dataclass
class Ranks:
    """Scores of layers, pooled over the G query heads of a KV head and, but for ``per_layer_head``, over layers too."""

    mode: Mode = struct.field(pytree_node=False)
    pooled: tuple[Float[Array, "B K S"], ...] = ()
    layers: int = struct.field(pytree_node=False, default=0)

    def add(self, scores: Float[Array, "B K G S"], length: Int[Array, "B"], budgets: Budgets) -> Ranks:
        """Return them with those of one more layer."""
        rank = normalise(scores, length, budgets.oldest).max(axis=2)
        if self.mode == "per_layer_head" or not self.pooled:
            pooled = (*self.pooled, rank)
        else:
            pooled = (jnp.maximum(self.pooled[0], rank) if self.mode == "union" else self.pooled[0] + rank,)
        return self.replace(pooled=pooled, layers=self.layers + 1)  # type: ignore[attr-defined]

    def keep(self, length: Int[Array, "B"], budgets: Budgets) -> tuple[Int[Array, "B X S"], ...]:
        """Return the slots to keep; see ``select``."""
        if self.mode == "per_layer_head":
            return tuple(_pick(_nan_last(rank), length, budgets) for rank in self.pooled)
        (pooled,) = self.pooled
        if self.mode == "union":
            pooled = pooled.max(axis=1, keepdims=True)
        else:
            pooled = pooled / self.layers
            if self.mode == "shared":
                pooled = pooled.mean(axis=1, keepdims=True)
        return (_pick(_nan_last(pooled), length, budgets),)


def newest(length: Int[Array, "B"], budgets: Budgets, slots: int) -> Int[Array, "B 1 S"]:
    """Return the slots that a layer with a sliding window keeps: as many as the others, and the newest."""
    index = jnp.arange(slots)
    count = jnp.minimum(length, budgets.b_row)[:, None]
    return jnp.where(index < count, index + length[:, None] - count, slots)[:, None]


def _pick(rank: Float[Array, "B X S"], length: Int[Array, "B"], budgets: Budgets) -> Int[Array, "B X S"]:
    width = rank.shape[-1]
    slots = jnp.arange(width)
    length = length[:, None, None]
    count = jnp.minimum(length, budgets.b_row[:, None, None])
    pinned = (slots < budgets.oldest[:, None, None]) | (slots >= length - budgets.window[:, None, None])
    # Pinned slots rank above +inf and slots past the end below -inf: one order then settles everything.
    key = jnp.where(pinned, jnp.iinfo(jnp.int32).max, _ordered(rank))
    key = jnp.where(slots < length, key, jnp.iinfo(jnp.int32).min)
    threshold = jnp.take_along_axis(lax.sort(key, dimension=-1), jnp.clip(width - count, 0, width - 1), axis=-1)
    above, tied = key > threshold, key == threshold
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    kept = above | (tied & (jnp.cumsum(tied, axis=-1) <= room))
    return lax.sort(jnp.where(kept, slots, width), dimension=-1)


def _ordered(values: Float[Array, "*R"]) -> Int[Array, "*R"]:
    """Return int32 in the order of the floats, with -0 equal to 0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values).astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _nan_last(values: Array) -> Array:
    return jnp.where(jnp.isnan(values), -jnp.inf, values)
