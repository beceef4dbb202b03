"""Plain XLA semantics of ``int4_matmul``: what the kernels are tested against, and what serves where there is none."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8


def dequantize(
    packed: UInt8[Array, "O X//2"],
    scale: Shaped[Array, "S O"],
    offset: Shaped[Array, "S O"],
    units: Float[Array, "2 U O"] | None = None,
) -> Float[Array, "O X"]:
    """Return the float32 values ``scale * q - minimum``; see ``pallas_kernels.int4_matmul`` for the arguments."""
    outputs, groups = packed.shape[0], scale.shape[0]
    halves = packed.reshape(outputs, groups, 1, -1)
    q = jnp.concatenate([halves & 15, halves >> 4], axis=2).reshape(outputs, groups, -1)
    factor, minimum = (part.T[:, :, None] for part in affine(scale, offset, units))
    return (q.astype(jnp.float32) * factor - minimum).reshape(outputs, -1)


def affine(
    scale: Shaped[Array, "S O"], offset: Shaped[Array, "S O"], units: Float[Array, "2 U O"] | None
) -> tuple[Float[Array, "S O"], Float[Array, "S O"]]:
    """Return each group's scale and minimum in float32."""
    if units is None:
        return one_affine(scale, offset, None)
    return one_affine(scale, offset, jnp.repeat(units, scale.shape[0] // units.shape[1], axis=1))


def one_affine(scale: Any, offset: Any, units: Any) -> tuple[Any, Any]:
    """Return scale and minimum in float32, of any shape; units are a pair of that shape, or None."""
    factor, less = scale.astype(jnp.float32), offset.astype(jnp.float32)
    if units is not None:
        return factor * units[0].astype(jnp.float32), less * units[1].astype(jnp.float32)
    # Without units an integer is a zero point.
    return factor, less * factor if jnp.issubdtype(offset.dtype, jnp.integer) else less


def int4_matmul(
    x: Float[Array, "R X"],
    packed: UInt8[Array, "O X//2"],
    scale: Shaped[Array, "S O"],
    offset: Shaped[Array, "S O"],
    *,
    units: Float[Array, "2 U O"] | None,
    dtype: Any,
) -> Float[Array, "R O"]:
    """See ``pallas_kernels.int4_matmul``. The weights are written out in x's dtype first."""
    return product(x, dequantize(packed, scale, offset, units).astype(x.dtype)).astype(dtype)


def product(x: Float[Array, "R X"], weight: Float[Array, "O X"]) -> Float[Array, "R O"]:
    """Return ``x @ weight.T`` in float32; both have one dtype."""
    return lax.platform_dependent(x, weight, cpu=_wide, default=_product)


def _product(x: Float[Array, "R X"], weight: Float[Array, "O X"]) -> Float[Array, "R O"]:
    # The default precision of float32 on a GPU or a TPU has fewer bits.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=jnp.float32)


def _wide(x: Float[Array, "R X"], weight: Float[Array, "O X"]) -> Float[Array, "R O"]:
    """Multiply in float32, weights on the left: XLA:CPU runs this fastest, and lacks some products of 16 bits."""
    return _product(weight.astype(jnp.float32), x.astype(jnp.float32)).T
