"""Rows times a matrix of 4-bit weights, unpacked in registers: one pass over the packed bytes.

Grid: ``(ceil(O / outputs), ceil(R / rows), splits)``. A program owns a tile of outputs and of rows, and one of
``splits`` runs of the groups. It takes a group at a time: the low halves of its bytes meet the first half of the
group's inputs, the high halves the second, so no weight has to move to another thread. What goes to the tensor cores
are the integers themselves, exact in 16 bits; scale and minimum follow the product of a group,
``scale * (x . q) - minimum * sum(x)``, so the weights are never rounded to the type of x. More rows than a tile has,
as in prefill, are more programs: nothing is written out, and there is no other path.

Bytes: ``O X / 2`` of packed weights, and 3 to 8 more a group and output. They are read from memory once; programs of
other rows, which a launch has only past ``rows``, find them in the second-level cache. With groups of 128 and float16
scales a matrix of 25,600 x 5,120 is 68.6 MB: 68 us on an RTX 4090 (1.0 TB/s), 14 us on an H200 (4.8 TB/s). With one
row a tensor core works at a sixteenth, which hides behind the reads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.device import Device
from pallas_kernels.int4_reference import one_affine
from pallas_kernels.triton import tiles

INPUTS = 128
"""Inputs that a program takes at a time: one group of 128, or several smaller ones."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a call is cut: tiles of outputs and rows, runs of groups, and warps and stages of a program."""

    outputs: int
    rows: int
    splits: int
    warps: int
    stages: int


_RAISED = 16

_PROGRAMS = 4
"""Programs a multiprocessor that a call aims at."""

_STAGES = {16: 4, 32: 3, 64: 2}
"""Tiles in flight, by rows: what lets three programs share an RTX 4090's shared memory."""


def cut(device: Device, dtype: Any, rows: int, outputs: int, inputs: int) -> Cut:
    """Return how a call is cut: by its shapes and the chip, so no row's bits depend on another row."""
    wide = jnp.dtype(dtype).itemsize == 4
    tall = max(16, min(16 if wide else 64, tiles.pow2(rows)))
    # No tensor core multiplies float32 in full: small tiles, so that the operands fit into registers.
    width = 32 if wide else 64
    programs = pl.cdiv(outputs, width) * pl.cdiv(rows, tall)
    # A split costs a float32 result written and read again: worth it only while programs are few, runs long, and the
    # results together no more than the packed bytes.
    wanted = pl.cdiv(_PROGRAMS * device.cores, programs)
    splits = max(1, min(tiles.pow2(wanted), inputs // INPUTS // 4, inputs // (16 * rows), 16))
    return Cut(width, tall, splits, warps=4, stages=1 if wide else _STAGES[tall])


def int4_matmul_kernel(*refs: Any, size: int, groups: int, cut: Cut) -> None:
    """One program: see the module's docstring."""
    x_ref, packed_ref, scale_ref, offset_ref, *units_ref, out_ref = refs
    rows, outputs, half = x_ref.shape[0], packed_ref.shape[0], size // 2
    row = pl.program_id(1) * cut.rows + jnp.arange(cut.rows)
    output = pl.program_id(0) * cut.outputs + jnp.arange(cut.outputs)
    split = pl.program_id(2)
    in_rows, in_outputs, byte = row < rows, output < outputs, jnp.arange(half)

    def add(group: Any, total: Any) -> Any:
        there = group < groups
        mask = (in_outputs & there)[:, None]
        columns = group * half + byte
        tile = pltriton.load(packed_ref.at[output[:, None], columns[None, :]], mask=mask, other=0)
        mask_x = (in_rows & there)[:, None]

        def part(start: int, q: Any) -> tuple[Any, Any]:
            address = x_ref.at[row[:, None], (group * size + start + byte)[None, :]]
            x = pltriton.load(address, mask=mask_x, other=0.0)
            return dot(x, _raised(q, x.dtype)), jnp.sum(x.astype(jnp.float32), axis=1)

        low, high = part(0, tile & 15), part(half, tile >> 4)
        known = in_outputs & there
        scale = pltriton.load(scale_ref.at[group, output], mask=known, other=0)
        offset = pltriton.load(offset_ref.at[group, output], mask=known, other=0)
        units = None
        if units_ref:
            unit = lax.div(group, groups // units_ref[0].shape[1])
            units = [pltriton.load(units_ref[0].at[which, unit, output], mask=known, other=0) for which in (0, 1)]
        scale, minimum = one_affine(scale, offset, units)
        less = (low[1] + high[1])[:, None] * (minimum + _RAISED * scale)[None, :]
        return total + (low[0] + high[0]) * scale[None, :] - less

    each = INPUTS // size
    steps = pl.cdiv(groups, each)
    share = pl.cdiv(steps, cut.splits)

    def body(step: Any, total: Any) -> Any:
        for inner in range(each):
            total = add(step * each + inner, total)
        return total

    first = split * share
    total = jnp.zeros((cut.rows, cut.outputs), jnp.float32)
    total = lax.fori_loop(first, jnp.minimum(first + share, steps), body, total)
    mask = in_rows[:, None] & in_outputs[None, :]
    pltriton.store(out_ref.at[split, row[:, None], output[None, :]], total.astype(out_ref.dtype), mask=mask)


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
    if str(x.dtype) not in tiles.PAGE_DTYPES:
        raise NotImplementedError(f"x of {x.dtype}; this kernel reads {', '.join(tiles.PAGE_DTYPES)}")
    (rows, inputs), outputs, groups = x.shape, packed.shape[0], scale.shape[0]
    chosen = cut(device, x.dtype, rows, outputs, inputs)
    body = functools.partial(int4_matmul_kernel, size=inputs // groups, groups=groups, cut=chosen)
    one = chosen.splits == 1
    args = (x, packed, scale, offset, *([] if units is None else [units]))
    out = pl.pallas_call(
        body,
        grid=(pl.cdiv(outputs, chosen.outputs), pl.cdiv(rows, chosen.rows), chosen.splits),
        in_specs=[pl.no_block_spec] * len(args),
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((chosen.splits, rows, outputs), dtype if one else jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=chosen.warps, num_stages=chosen.stages),
        interpret=device.interpret,
        name="int4_matmul",
    )(*args)
    return out[0] if one else jnp.sum(out, axis=0).astype(dtype)


def _raised(q: Any, dtype: Any) -> Any:
    """Return ``q + 16`` for integers from 0 to 15: their bits, set into the mantissa of 16, where they are exact.

    Conversions go through a slower unit of a GPU than a shift and an or.
    """
    if jnp.dtype(dtype).itemsize == 4:
        return q.astype(dtype) + _RAISED
    mantissa = jnp.finfo(dtype).nmant
    sixteen = (jnp.finfo(dtype).maxexp - 1 + 4) << mantissa
    return lax.bitcast_convert_type(q.astype(jnp.uint16) << (mantissa - 4) | sixteen, jnp.dtype(dtype))


def dot(left: Any, right: Any) -> Any:
    """Return ``left @ right.T`` in float32."""
    # Else float32 goes through TF32, which keeps 10 bits of the mantissa.
    return pltriton.dot(left, right, trans_b=True, allow_tf32=False)
