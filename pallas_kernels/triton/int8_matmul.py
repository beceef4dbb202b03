"""Rows times a matrix of 8-bit weights, widened in registers: one pass over the bytes.

Cut as ``int4_matmul``: a program owns a tile of outputs and of rows, and a run of the groups. The integers themselves
go to the tensor cores, exact in 16 bits, and a group's scale follows its product. Groups of 16, which Q6_K has, are
taken eight at a time.

Bytes: ``O X`` of weights and 2 a group and output: a matrix of 25,600 x 5,120 takes 132 us on an RTX 4090 (1.0 TB/s)
and 28 us on an H200 (4.8 TB/s).
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
from jaxtyping import Array, Float, Int8, Shaped

from pallas_kernels.triton import tiles
from pallas_kernels.triton.int4_matmul import INPUTS, Cut, cut, dot

SIZES = (16, 32, 64, 128)
"""Inputs of a group that this kernel takes."""


def int8_matmul_kernel(*refs: Any, size: int, groups: int, cut: Cut) -> None:
    """One program: see the module's docstring."""
    x_ref, q_ref, scale_ref, *units_ref, out_ref = refs
    rows, outputs = x_ref.shape[0], q_ref.shape[0]
    row = pl.program_id(1) * cut.rows + jnp.arange(cut.rows)
    output = pl.program_id(0) * cut.outputs + jnp.arange(cut.outputs)
    split = pl.program_id(2)
    in_rows, in_outputs, column = row < rows, output < outputs, jnp.arange(size)

    def add(group: Any, total: Any) -> Any:
        there = group < groups
        columns = (group * size + column)[None, :]
        q = pltriton.load(q_ref.at[output[:, None], columns], mask=(in_outputs & there)[:, None], other=0)
        x = pltriton.load(x_ref.at[row[:, None], columns], mask=(in_rows & there)[:, None], other=0.0)
        known = in_outputs & there
        scale = pltriton.load(scale_ref.at[group, output], mask=known, other=0).astype(jnp.float32)
        if units_ref:
            unit = lax.div(group, groups // units_ref[0].shape[0])
            scale *= pltriton.load(units_ref[0].at[unit, output], mask=known, other=0).astype(jnp.float32)
        return total + dot(x, q.astype(x.dtype)) * scale[None, :]

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


def int8_matmul(
    x: Float[Array, "R X"],
    q: Int8[Array, "O X"],
    scale: Shaped[Array, "S O"],
    *,
    units: Float[Array, "U O"] | None,
    dtype: Any,
) -> Float[Array, "R O"]:
    """See ``pallas_kernels.int8_matmul``."""
    device = tiles.check_device()
    (rows, inputs), outputs, groups = x.shape, q.shape[0], scale.shape[0]
    if str(x.dtype) not in tiles.PAGE_DTYPES:
        raise NotImplementedError(f"x of {x.dtype}; this kernel reads {', '.join(tiles.PAGE_DTYPES)}")
    if inputs // groups not in SIZES:
        raise NotImplementedError(
            f"groups of {inputs // groups} inputs; this kernel takes {', '.join(map(str, SIZES))}"
        )
    chosen = cut(device, x.dtype, rows, outputs, inputs)
    # A tile has twice the bytes of one of 4 bits.
    chosen = dataclasses.replace(chosen, stages=min(chosen.stages, 3))
    one = chosen.splits == 1
    args = (x, q, scale, *([] if units is None else [units]))
    out = pl.pallas_call(
        functools.partial(int8_matmul_kernel, size=inputs // groups, groups=groups, cut=chosen),
        grid=(pl.cdiv(outputs, chosen.outputs), pl.cdiv(rows, chosen.rows), chosen.splits),
        in_specs=[pl.no_block_spec] * len(args),
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((chosen.splits, rows, outputs), dtype if one else jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=chosen.warps, num_stages=chosen.stages),
        interpret=device.interpret,
        name="int8_matmul",
    )(*args)
    return out[0] if one else jnp.sum(out, axis=0).astype(dtype)
