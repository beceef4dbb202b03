"""The running softmax of a tile of queries over the tiles of a row's keys: what both attention kernels do inside.

Keys are taken in tiles of a fixed number of slots, in order (arXiv 2112.05682). A tile of which nothing is seen leaves
every bit of the carry as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.triton import tiles

LOWEST = -1e30
"""The maximum of a query that has seen no key: finite, so that no inf - inf makes a NaN."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of an attention call when it is compiled."""

    block: int
    groups: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None
    config: tiles.TileConfig

    @property
    def columns(self) -> Any:
        """Dimensions of a tile's rows, past D up to a power of two."""
        return jnp.arange(tiles.padded_dim(self.dim))


def load_queries(q_ref: Any, mask: Any, row: Any, query: Any, head: Any, spec: Spec) -> Any:
    """Return ``[rows, D]`` of q ``[B, T, H, D]``, zeros where ``mask`` is false and past D."""
    mask = mask[:, None] & (spec.columns < spec.dim)[None, :]
    return pltriton.load(q_ref.at[row, query[:, None], head[:, None], spec.columns[None, :]], mask=mask, other=0.0)


def fold(
    carry: tuple[Any, Any, Any],
    first: Any,
    last: Any,
    q: Any,
    own: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    row: Any,
    head: Any,
    spec: Spec,
) -> tuple[Any, Any, Any]:
    """Fold key tiles ``first .. last - 1`` of one row and KV head into (maximum, total, weighted values).

    ``own`` is the slot of each query row, -1 where there is none.
    """
    columns, newest = spec.columns, jnp.max(own)
    factors = _parts(q, k_ref.dtype)

    def body(index: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        top, total, out = carry
        slot = index * spec.config.slots + jnp.arange(spec.config.slots)
        # No query sees a slot past the newest one. What lies there may be NaN, and 0 * NaN is NaN.
        held = slot <= newest
        block, within = slot_address(table_ref, row, slot, held, spec.block, index * spec.config.slots)
        address = (block, head, within[:, None], columns[None, :])
        mask = held[:, None] & (columns < spec.dim)[None, :]
        k = pltriton.load(k_ref.at[address], mask=mask, other=0.0)
        logits = sum(_dot(part, k, trans_b=True) for part in factors) * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * jnp.tanh(logits / spec.softcap)
        seen = slot[None, :] <= own[:, None]
        if spec.window is not None:
            seen &= slot[None, :] > own[:, None] - spec.window
        logits = jnp.where(seen, logits, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weight, fade = jnp.exp(logits - higher[:, None]), jnp.exp(top - higher)
        v = pltriton.load(v_ref.at[address], mask=mask, other=0.0)
        out = out * fade[:, None]
        for part in _parts(weight, v.dtype):
            out += _dot(part, v)
        return higher, total * fade + jnp.sum(weight, axis=1), out

    return lax.fori_loop(first, last, body, carry)


def first_tile(oldest: Any, spec: Spec) -> Any:
    """Return the first key tile that a query at slot ``oldest`` sees anything of."""
    if spec.window is None:
        return jnp.int32(0)
    return lax.div(jnp.maximum(oldest - spec.window + 1, 0), spec.config.slots)


def slot_address(table_ref: Any, row: Any, slot: Any, mask: Any, block: int, start: Any) -> tuple[Any, Any]:
    """Return (block, slot in it) of a tile's slots: the block is a scalar where the tile lies in one, else a column."""
    if block >= slot.shape[0]:
        # One read of the table serves the tile, instead of one a slot. The tile holds a slot, so its block is there.
        index = lax.div(start, block)
        return table_ref[row, index], slot - index * block
    index = lax.div(slot, block)
    return pltriton.load(table_ref.at[row, index], mask=mask, other=0)[:, None], slot - index * block


def _parts(x: Any, dtype: Any) -> tuple[Any, ...]:
    """Split x into a sum of arrays of a narrower dtype, or cast it to a wider one.

    Rounding the weights of a softmax to bfloat16 costs the output more than its last place. A second product with
    what the rounding left costs a tensor core little, and the memory nothing.
    """
    high = x.astype(dtype)
    if jnp.dtype(dtype).itemsize >= jnp.dtype(x.dtype).itemsize:
        return (high,)
    return high, (x - high.astype(x.dtype)).astype(dtype)


def _dot(left: Any, right: Any, trans_b: bool = False) -> Any:
    # Else float32 goes through TF32, which keeps 10 bits of the mantissa.
    return pltriton.dot(left, right, trans_b=trans_b, allow_tf32=False)
