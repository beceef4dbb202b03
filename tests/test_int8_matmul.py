"""Rows times 8-bit weights, over every implementation that has a kernel for it, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import present, refused

import pallas_kernels

pytestmark = pytest.mark.parametrize("implementation", ["xla", "triton"])

# Of the magnitudes that are summed. XLA rounds the weights to x's type first, the kernel does not.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}


def problem(seed, rows, outputs, size, groups, dtype="float32", per_unit=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size * groups)).astype(jnp.dtype(dtype))
    q = rng.integers(-128, 128, (outputs, size * groups), np.int8)
    if per_unit:
        units = rng.uniform(1e-4, 1e-3, (groups // per_unit, outputs)).astype(np.float16)
        return x, q, rng.integers(-128, 128, (groups, outputs), np.int8), units
    return x, q, rng.uniform(1e-3, 1e-2, (groups, outputs)).astype(np.float16), None


def run(implementation, x, q, scale, units=None, **options):
    def call(*args):
        return pallas_kernels.int8_matmul(*args, units=units, implementation=implementation, **options)

    with present(implementation):
        return np.asarray(jax.jit(call)(x, q, scale))


def check(implementation, x, q, scale, units):
    got = run(implementation, x, q, scale, units, dtype=jnp.float32)
    groups, wide = len(scale), np.asarray(x, np.float64)
    matrix = np.zeros(q.shape)
    for o, column in np.ndindex(q.shape):
        group = column * groups // q.shape[1]
        unit = 1 if units is None else float(units[group * len(units) // groups, o])
        matrix[o, column] = float(scale[group, o]) * unit * int(q[o, column])
    bound = TOLERANCE[jnp.dtype(x.dtype).name] * (np.abs(wide) @ np.abs(matrix).T) + 1e-6
    assert (np.abs(got - wide @ matrix.T) <= bound).all()


@pytest.mark.parametrize(
    ("dtype", "size", "per_unit"),
    [("float32", 16, 16), ("float32", 128, 0), ("bfloat16", 32, 0), ("bfloat16", 128, 0), ("float16", 64, 0)],
)
def test_group_sizes(implementation, dtype, size, per_unit):
    check(implementation, *problem(size, 3, 70, size, 16 if size == 16 else 5, dtype, per_unit))


@pytest.mark.parametrize("rows", [1, 17, 70])
def test_row_counts(implementation, rows):
    check(implementation, *problem(rows, rows, 40, 128, 3, "bfloat16"))


def test_runs_of_groups_are_added_up(implementation):
    check(implementation, *problem(5, 2, 33, 128, 20))


def test_a_scale_a_row(implementation):
    args = problem(6, 2, 33, 96, 1)
    if implementation == "xla":
        check(implementation, *args)
    else:
        with refused(implementation, "groups of 96 inputs; this kernel takes 16, 32, 64, 128"):
            run(implementation, *args)


def test_other_rows_change_no_bit(implementation):
    x, *matrix = problem(7, 8, 48, 64, 4)
    others = np.concatenate([x[:1], np.full_like(x[1:], np.nan)])
    np.testing.assert_array_equal(run(implementation, others, *matrix)[0], run(implementation, x, *matrix)[0])


def test_shapes_that_do_not_fit_are_named(implementation):
    x, q, scale, _ = problem(8, 2, 32, 64, 2)
    with pytest.raises(ValueError, match=r"S a divisor of X, and got \(2, 128\), \(32, 127\) and \(2, 32\)"):
        run(implementation, x, q[:, :-1], scale)
    with pytest.raises(ValueError, match=r"units is \[U, 32\], U a divisor of 2 groups, and got \(3, 32\)"):
        run(implementation, x, q, scale, np.ones((3, 32)))
