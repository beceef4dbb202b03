"""Plain XLA semantics of ``int8_matmul``: what the kernel is tested against, and what serves where there is none."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Shaped

from pallas_kernels.int4_reference import product


def dequantize(
    q: Int8[Array, "O X"], scale: Shaped[Array, "S O"], units: Float[Array, "U O"] | None = None
) -> Float[Array, "O X"]:
    """Return the float32 values ``scale * q``; see ``pallas_kernels.int8_matmul`` for the arguments."""
    factor = scale.astype(jnp.float32)
    if units is not None:
        factor = factor * jnp.repeat(units.astype(jnp.float32), len(scale) // len(units), axis=0)
    grouped = q.astype(jnp.float32).reshape(q.shape[0], scale.shape[0], -1)
    return (grouped * factor.T[:, :, None]).reshape(q.shape)


def int8_matmul(
    x: Float[Array, "R X"],
    q: Int8[Array, "O X"],
    scale: Shaped[Array, "S O"],
    *,
    units: Float[Array, "U O"] | None,
    dtype: Any,
) -> Float[Array, "R O"]:
    """See ``pallas_kernels.int8_matmul``. The weights are written out in x's dtype, but those with a scale a row are
    only widened, which XLA does while it multiplies.
    """
    if scale.shape[0] == 1 and units is None:
        return (product(x, q.astype(x.dtype)) * scale[0].astype(jnp.float32)).astype(dtype)
    return product(x, dequantize(q, scale, units).astype(x.dtype)).astype(dtype)
