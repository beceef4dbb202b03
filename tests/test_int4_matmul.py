"""Rows times 4-bit weights, over every implementation present, against float64 NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, present, refused

import pallas_kernels
from pallas_kernels import device
from pallas_kernels.triton.int4_matmul import cut

# On Hopper mosaic_gpu leaves this to triton.
pytestmark = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "mosaic_gpu"])

# Of the magnitudes that are summed: sum |x| |w|. Of x's own rounding there is none, it is the problem's.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}


def weights(packed, scale, offset, units=None):
    """Return [O, X] by the definition, one byte at a time, in float64."""
    groups, outputs = scale.shape
    half = packed.shape[1] // groups
    out = np.zeros((outputs, 2 * packed.shape[1]))
    for o, byte in np.ndindex(packed.shape):
        group, j = divmod(byte, half)
        s, less = float(scale[group, o]), float(offset[group, o])
        if units is not None:
            unit = group * units.shape[1] // groups
            s, less = s * float(units[0, unit, o]), less * float(units[1, unit, o])
        elif offset.dtype.kind in "iu":
            less *= s
        for at, q in ((j, packed[o, byte] % 16), (j + half, packed[o, byte] // 16)):
            out[o, group * 2 * half + at] = s * int(q) - less
    return out


def problem(seed, rows, outputs, size, groups, dtype="float32", scales=np.float16, offsets="zero"):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size * groups)).astype(jnp.dtype(dtype))
    packed = rng.integers(0, 256, (outputs, size * groups // 2), np.uint8)
    scale = rng.uniform(0.01, 0.1, (groups, outputs)).astype(scales)
    if offsets == "units":
        scale, offset = rng.integers(0, 64, (2, *scale.shape), np.uint8)
        return x, packed, scale, offset, rng.uniform(1e-3, 2e-3, (2, groups // 4, outputs)).astype(scales)
    if offsets == "zero":
        offset = rng.integers(0, 17, scale.shape).astype(np.uint8)
    else:
        offset = rng.uniform(-0.5, 1, scale.shape).astype(scales)
    return x, packed, scale, offset


def run(implementation, x, packed, scale, offset, units=None, **options):
    def call(x, *arrays):
        return pallas_kernels.int4_matmul(x, *arrays[:3], units=units, implementation=implementation, **options)

    with present(implementation):
        return np.asarray(jax.jit(call)(x, packed, scale, offset))


def reason(implementation, x):
    """Return what the TPU kernel says of rows that it leaves to XLA, or None."""
    if implementation == "mosaic_tpu":
        rows, inputs = x.shape
        if x.dtype == np.float16:
            return "x of float16"
        if rows > 64:
            return f"{rows} rows are more than 64"
        if inputs % 256:
            return f"{inputs} inputs are no multiple of 256"
    return None


def check(implementation, x, *arrays):
    if why := reason(implementation, x):
        with refused(implementation, why):
            run(implementation, x, *arrays)
        return
    got = run(implementation, x, *arrays, dtype=jnp.float32)
    matrix, wide = weights(*arrays), np.asarray(x, np.float64)
    assert got.shape == (len(x), len(matrix)) and got.dtype == np.float32
    error = np.abs(got - wide @ matrix.T)
    assert (error <= TOLERANCE[jnp.dtype(x.dtype).name] * (np.abs(wide) @ np.abs(matrix).T) + 1e-6).all(), error.max()


@pytest.mark.parametrize(
    ("dtype", "size", "offsets"),
    [
        ("float32", 32, "minimum"),
        ("float32", 64, "zero"),
        ("float32", 128, "minimum"),
        ("float32", 32, "units"),
        ("bfloat16", 32, "minimum"),
        ("bfloat16", 64, "zero"),
        ("bfloat16", 128, "zero"),
        ("float16", 128, "zero"),
    ],
)
def test_group_sizes_and_both_kinds_of_offset(implementation, dtype, size, offsets):
    scales = np.float32 if size == 32 else ml_dtypes.bfloat16 if size == 64 else np.float16
    check(implementation, *problem(size, 3, 70, size, 8, dtype, scales, offsets))


@pytest.mark.parametrize("rows", [1, 17, 64, 70])
def test_row_counts(implementation, rows):
    check(implementation, *problem(rows, rows, 40, 128, 4, "bfloat16"))


@settings(max_examples=6)
@given(st.integers(1, 9), st.integers(1, 300), st.sampled_from([32, 64, 128]), st.integers(1, 9), st.integers(0, 99))
def test_any_shape(implementation, rows, outputs, size, groups, seed):
    check(implementation, *problem(seed, rows, outputs, size, groups))


def test_runs_of_groups_are_added_up(implementation):
    args = problem(5, 2, 64, 128, 36)
    assert cut(device.DEVICES["NVIDIA H200"], np.float32, 2, 64, 128 * 36).splits == 9
    check(implementation, *args)


def test_other_rows_change_no_bit(implementation):
    x, *matrix = problem(6, 8, 48, 64, 4)
    together = run(implementation, x, *matrix)
    others = np.concatenate([x[:1], np.full_like(x[1:], np.nan)])
    np.testing.assert_array_equal(run(implementation, others, *matrix)[0], together[0])


def test_the_result_has_the_dtype_asked_for(implementation):
    args = problem(7, 2, 32, 64, 4, "bfloat16")
    wide, narrow = run(implementation, *args, dtype=jnp.float32), run(implementation, *args)
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(ml_dtypes.bfloat16))


def test_shapes_that_do_not_fit_are_named(implementation):
    x, packed, scale, offset = problem(8, 2, 32, 64, 2)
    with pytest.raises(ValueError, match=r"packed \[O, X // 2\], scale and offset \[S, O\], and got \(2, 128\)"):
        run(implementation, x, packed[:, :-1], scale, offset)
    with pytest.raises(ValueError, match=r"packed \[O, X // 2\]"):
        run(implementation, x, packed, scale, offset[:1])
    with pytest.raises(ValueError, match=r"units is \[2, U, 32\], U a divisor of 2 groups, and got \(2, 3, 32\)"):
        run(implementation, x, packed, scale, offset, np.ones((2, 3, 32)))
    with pytest.raises(ValueError, match=r"1 groups of 256 inputs; groups have 32, 64 or 128 inputs"):
        run(implementation, np.zeros((2, 256), np.float32), np.zeros((32, 128), np.uint8), scale[:1], offset[:1])
