"""A few rows times a matrix of 4-bit weights, unpacked in vector memory: one pass over the packed bytes.

Grid: ``(ceil(O / outputs),)``. A program owns a tile of outputs over all inputs, and the next tile is on its way while
it works. It takes 128 bytes of an output's row at a time: the low and the high halves of several groups, as integers
that are exact in bfloat16. A tile of them is loaded into the matrix unit once, for all its groups: the rows stand below
one another once for each group, zero outside it, and each group's part of the product meets its scale afterwards.
XLA subtracts ``minimum * sum(x)``, a product of X // S sums a row, and splits the rows into the two halves.

Bytes: ``O X / 2`` of packed weights and 4 a group and output of scales in float32, which XLA writes beforehand where
they are anything else. The floor of a matrix of 25,600 x 5,120 with groups of 128 is 86 us on a v5e (0.82 TB/s).

More than 64 rows are refused: a matrix unit is busy then, and XLA's own product is the better one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.int4_reference import affine
from pallas_kernels.mosaic_tpu import tiles
from pallas_kernels.mosaic_tpu.products import product

MOST_ROWS = 64
_OUTPUTS, _LEAST = 256, 128


def int4_matmul_kernel(x_ref: Any, packed_ref: Any, scale_ref: Any, out_ref: Any, *, half: int) -> None:
    """One program: see the module's docstring. ``half`` is how many bytes a group has."""
    rows, each = x_ref.shape[1], tiles.LANES // half
    lane = lax.broadcasted_iota(jnp.int32, (rows, tiles.LANES), 1)

    def body(step: Any, total: Any) -> Any:
        columns = pl.ds(pl.multiple_of(step * tiles.LANES, tiles.LANES), tiles.LANES)
        byte = packed_ref[:, columns].astype(jnp.int32)
        sums: Any = 0.0
        for which, q in enumerate((byte & 15, byte >> 4)):
            # As float32 until they are together: 8 rows of bfloat16 are half a tile.
            x = x_ref[which, :, columns].astype(jnp.float32)
            parts = [jnp.where(lax.div(lane, half) == group, x, 0) for group in range(each)]
            stacked = jnp.concatenate(parts, axis=0).astype(x_ref.dtype)
            sums += product(stacked, q.astype(jnp.float32).astype(jnp.bfloat16), transposed=True)
        for group in range(each):
            total += sums[group * rows : (group + 1) * rows] * scale_ref[pl.ds(step * each + group, 1), :]
        return total

    steps = packed_ref.shape[1] // tiles.LANES
    out_ref[:] = lax.fori_loop(0, steps, body, jnp.zeros(out_ref.shape, jnp.float32))


def int4_matmul(
    x: Float[Array, "R X"],
    packed: UInt8[Array, "O X//2"],
    scale: Shaped[Array, "S O"],
    offset: Shaped[Array, "S O"],
    *,
    units: Float[Array, "2 U O"] | None,
    dtype: Any,
) -> Float[Array, "R O"]:
    """See ``pallas_kernels.int4_matmul``."""
    device = tiles.check_device()
    (rows, inputs), outputs, groups = x.shape, packed.shape[0], scale.shape[0]
    if str(x.dtype) not in tiles.PAGE_DTYPES:
        raise NotImplementedError(f"x of {x.dtype}; this kernel takes {', '.join(tiles.PAGE_DTYPES)}")
    if rows > MOST_ROWS:
        raise NotImplementedError(f"{rows} rows are more than {MOST_ROWS}")
    if inputs % (2 * tiles.LANES):
        raise NotImplementedError(f"{inputs} inputs are no multiple of {2 * tiles.LANES}")
    tall = tiles.padded(rows, tiles.tile_rows(x.dtype))
    # Bytes and scales of an output, twice for the pipeline, and the rows, twice too.
    each, held = inputs + 8 * groups, 2 * tall * inputs * x.dtype.itemsize
    tiles.check_vectors(_LEAST * each + held, f"{inputs} inputs of {tall} rows")
    width = min(_OUTPUTS if _OUTPUTS * each + held <= tiles.VECTOR_BYTES else _LEAST, outputs)
    grouped = x.reshape(rows, groups, 2, -1)
    halves = jnp.pad(grouped.transpose(2, 0, 1, 3).reshape(2, rows, -1), ((0, 0), (0, tall - rows), (0, 0)))
    factor, minimum = affine(scale, offset, units)
    out = pl.pallas_call(
        functools.partial(int4_matmul_kernel, half=inputs // groups // 2),
        grid=(pl.cdiv(outputs, width),),
        in_specs=[
            pl.BlockSpec(halves.shape, lambda _: (0, 0, 0)),
            pl.BlockSpec((width, inputs // 2), lambda tile: (tile, 0)),
            pl.BlockSpec((groups, width), lambda tile: (0, tile)),
        ],
        out_specs=pl.BlockSpec((tall, width), lambda tile: (0, tile)),
        out_shape=jax.ShapeDtypeStruct((tall, outputs), jnp.float32),
        compiler_params=tiles.compiler_params(device, "parallel"),
        interpret=device.interpret,
        name="int4_matmul",
    )(halves, packed, factor)
    sums = jnp.sum(grouped.astype(jnp.float32), axis=(2, 3))
    less = jnp.dot(sums, minimum, precision=lax.Precision.HIGHEST)
    return (out[:rows] - less).astype(dtype)
