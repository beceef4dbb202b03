"""Products in the precision of float32 on a matrix unit that multiplies bfloat16.

A float32 number is the sum of three of bfloat16. Pieces of the left factor lie below one another, so the right one,
which is what has to be loaded into the unit, is loaded once for all of them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def product(left: Any, right: Any, *, transposed: bool = False, pieces: int = 3) -> Any:
    """Return ``left @ right`` in float32.

    Args:
      left: ``[R, X]``, bfloat16 or float32, R a multiple of 8.
      right: ``[X, C]``, or ``[C, X]`` where it is transposed.
      transposed: see ``right``.
      pieces: bfloat16 numbers that stand for one float32 number of the left: 3 keep all of its bits, 2 keep 16.
    """
    rows = left.shape[0]
    stacked = _stacked(_split(left, pieces))
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    total: Any = None
    for piece in _split(right, 3):
        part = lax.dot_general(stacked, piece.astype(jnp.bfloat16), contract, preferred_element_type=jnp.float32)
        total = part if total is None else total + part
    out = total[:rows]
    for start in range(rows, stacked.shape[0], rows):
        out = out + total[start : start + rows]
    return out


def _split(x: Any, pieces: int) -> list[Any]:
    """Return arrays of bfloat16 values that add up to x: x itself, or those of float32."""
    if x.dtype == jnp.bfloat16:
        return [x]
    found = []
    for _ in range(pieces):
        high = x.astype(jnp.bfloat16).astype(jnp.float32)
        found.append(high)
        x = x - high
    return found


def _stacked(parts: list[Any]) -> Any:
    # As float32 until they are together: 8 rows of bfloat16 are half a tile.
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
