"""Packed matrices: their values, the error of rounding, their products, and a whole model of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import llama_oracle
import numpy as np
import pytest
from expected import dense
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import model, quant
from jaxkv.config import ModelConfig
from jaxkv.quant import Int4, Int8

CONFIG = ModelConfig("llama", 97, width=64, mlp_width=96, layers=2, heads=4, kv_heads=2, head_dim=16)
KINDS = ["int4", "int8"]


def values(matrix: Any) -> np.ndarray:
    """Return [O, X] in float64 by the definition of the arrays, one weight at a time."""
    outputs, inputs = matrix.shape
    size = inputs // len(matrix.scale)
    out = np.zeros(matrix.shape)
    for o, column in np.ndindex(outputs, inputs):
        group, j = divmod(column, size)
        scale, units = float(matrix.scale[group, o]), matrix.units
        if isinstance(matrix, Int8):
            unit = 1.0 if units is None else float(units[group * len(units) // len(matrix.scale), o])
            out[o, column] = scale * unit * int(matrix.q[o, column])
            continue
        byte = int(matrix.packed[o, group * size // 2 + j % (size // 2)])
        less = float(matrix.offset[group, o])
        if units is not None:
            unit = group * units.shape[1] // len(matrix.scale)
            scale, less = scale * float(units[0, unit, o]), less * float(units[1, unit, o])
        elif matrix.offset.dtype == np.uint8:
            less *= scale
        place = column if matrix.permutation is None else matrix.permutation[column]
        out[o, place] = scale * (byte % 16 if j < size // 2 else byte // 16) - less
    return out


def drawn(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def permuted(matrix: Int4, seed: int = 0) -> Int4:
    order = np.random.default_rng(seed).permutation(matrix.shape[1]).astype(np.int32)
    return dataclasses.replace(matrix, permutation=order)


def every_form() -> dict[str, Any]:
    zeros = quant.quantize(drawn((48, 256)), "int4")
    minimums = dataclasses.replace(zeros, offset=drawn(zeros.scale.shape, 1).astype(np.float32))
    rows = Int8(quant.quantize(drawn((48, 256)), "int8").q, np.full((1, 48), 0.01, np.float32))
    counted = Int4(
        packed=quant.quantize(drawn((48, 256)), "int4", 32).packed,
        scale=np.random.default_rng(2).integers(0, 64, (8, 48), np.uint8),
        offset=np.random.default_rng(3).integers(0, 64, (8, 48), np.uint8),
        units=np.abs(drawn((4, 48), 4)).reshape(2, 2, 48).astype(np.float16) / 64,
    )
    signed = np.random.default_rng(5).integers(-128, 128, (16, 48), np.int8)
    return {
        "units": counted,
        "int8 of units": Int8(rows.q, signed, np.abs(drawn((1, 48), 6)).astype(np.float16) / 4096),
        "zeros": zeros,
        "minimums": minimums,
        "act-order": permuted(zeros),
        "groups of 32": quant.quantize(drawn((48, 96)), "int4"),
        "int8": quant.quantize(drawn((48, 256)), "int8"),
        "int8 a row": rows,
    }


FORMS = every_form()
forms = pytest.mark.parametrize("form", FORMS)


@forms
def test_values_follow_the_definition(form: str) -> None:
    matrix = FORMS[form]
    expected = values(matrix)
    # In float32 scale * q is exact and so is scale * zero; a minimum of its own is rounded away once.
    np.testing.assert_allclose(np.concatenate(list(quant.host_values(matrix))).reshape(matrix.shape), expected, 1e-6)
    on_device = jax.jit(quant.dequantize)(jax.device_put(matrix))
    np.testing.assert_allclose(on_device, expected, rtol=1e-6, atol=1e-7)


@forms
@pytest.mark.parametrize("rows", [1, 5])
def test_linear_equals_a_float64_product(form: str, rows: int) -> None:
    matrix = FORMS[form]
    x = drawn((rows, matrix.shape[1]), 3)
    expected = x.astype(np.float64) @ values(matrix).T
    with jax.default_matmul_precision("float32"):
        out = jax.jit(quant.linear)(jax.device_put(matrix), x)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    half = jnp.asarray(x, jnp.bfloat16)
    narrow = jax.jit(quant.linear)(matrix, half)
    wide = jax.jit(lambda *args: quant.linear(*args, jnp.float32))(matrix, half)
    assert (narrow.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    expected = np.asarray(half, np.float64) @ values(matrix).T
    bound = np.abs(np.asarray(half, np.float64)) @ np.abs(values(matrix)).T
    assert (np.abs(wide - expected) <= 2**-8 * bound).all()
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_matrix_that_lies_by_input_multiplies_as_the_plain_one_does(rows: int, dtype: Any) -> None:
    matrix, x = jnp.asarray(drawn((48, 80), 1), dtype), jnp.asarray(drawn((rows, 80), 2), dtype)
    turned = quant.transposed(matrix)
    assert (turned.shape, turned.nbytes, turned.values.shape) == (matrix.shape, matrix.nbytes, (80, 48))
    expected = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64).T
    with jax.default_matmul_precision("float32"):
        wide = jax.jit(lambda *args: quant.linear(*args, jnp.float32))(turned, x)
        own = jax.jit(quant.linear)(turned, x)
    np.testing.assert_allclose(wide, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert own.dtype == dtype
    np.testing.assert_array_equal(own, wide.astype(dtype))


def test_linear_keeps_leading_axes() -> None:
    matrix, x = FORMS["act-order"], drawn((6, 256))
    flat = quant.linear(matrix, jnp.asarray(x))
    np.testing.assert_array_equal(quant.linear(matrix, jnp.asarray(x.reshape(2, 3, 256))), flat.reshape(2, 3, 48))


@given(
    st.sampled_from(KINDS),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 4),
    st.floats(-3, 3),
    st.floats(-6, 4),
    st.integers(0, 999),
)
def test_no_weight_is_off_by_more_than_half_a_scale(
    kind: str, size: int, groups: int, shift: float, magnitude: float, seed: int
) -> None:
    weights = ((drawn((3, size * groups), seed) + np.float32(shift)) * np.float32(10**magnitude)).astype(np.float32)
    weights[0, :size] = 0
    weights[1, 0] = 0
    matrix: Any = quant.quantize(weights, kind, size)
    got = values(matrix)
    scale = np.repeat(matrix.scale.T.astype(np.float64), size, axis=1)
    assert (np.abs(got - weights) <= 0.5 * scale * (1 + 1e-5)).all()
    assert (got[0, :size] == 0).all()
    assert got[1, 0] == 0
    # The scale is no larger than it has to be: the next float16 above the range over the steps.
    grouped = weights.reshape(3, groups, size).astype(np.float64)
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    least = (high - low) / 15 if kind == "int4" else np.maximum(high, -low) / 127
    most = np.where(least > 0, least * (1 + 2**-10) + 2**-24, 1)
    assert np.all(most - matrix.scale.T >= 0)


def test_pieces_and_groups_are_chosen() -> None:
    weights = drawn((10, 192))
    whole, parts = quant.quantize(weights, "int4"), quant.quantize(iter(np.split(weights, [3, 4])), "int4")
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, parts))
    assert [quant.group_size(inputs) for inputs in (5120, 192, 96, 100)] == [128, 64, 32, None]
    assert whole.scale.shape == (3, 10)
    assert whole.nbytes == 10 * 96 + 3 * 10 * 2 + 3 * 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quant.quantize(drawn((2, 64)), "int3"), "quantize='int3' is unknown; one of int4, int8 is"),
        (lambda: quant.quantize(drawn((2, 100)), "int4"), "100 inputs cannot be split into groups of 128, 64, 32"),
        (lambda: quant.quantize(np.full((2, 64), np.nan, np.float32), "int8"), "spans nan"),
        (lambda: quant.quantize(np.full((2, 64), 1e30, np.float32), "int4"), "up to 982560; leave out quantize"),
        (lambda: dataclasses.replace(FORMS["zeros"], scale=np.zeros((2, 47))), r"for packed \[O, X // 2\]"),
        (lambda: Int4(np.zeros((2, 64), np.int8), np.ones((1, 2)), np.ones((1, 2))), "packed is of int8"),
        (lambda: Int4(np.zeros((2, 64), np.uint8), np.ones((3, 2)), np.ones((3, 2))), "3 groups of 128 inputs"),
        (lambda: dataclasses.replace(FORMS["zeros"], permutation=np.arange(7)), r"permutation has shape \(7,\)"),
        (lambda: dataclasses.replace(FORMS["units"], units=np.ones((2, 3, 48))), r"8 groups, .* got \(2, 3, 48\)"),
        (lambda: Int8(np.zeros((2, 64), np.int8), np.ones((3, 2))), "S a divisor of X"),
        (lambda: Int8(np.zeros((2, 64), np.int8), np.ones((4, 2)), np.ones((3, 2))), r"4 groups, .* got \(3, 2\)"),
        (lambda: Int8(np.zeros((2, 64), np.uint8), np.ones((1, 2))), "q is of uint8"),
    ],
)
def test_what_makes_no_sense_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- a whole model -----------------------------------------------------------------------------------------------------


def packed_model(kind: str) -> tuple[model.Weights, model.Weights]:
    """Return a model with packed matrices, and the same with their values in float64."""
    drawn = model.init_weights(CONFIG, seed=4)
    packed = drawn.replace(layers=tuple(jax.tree.map(lambda x: _packed(x, kind), layer) for layer in drawn.layers))
    plain = jax.tree.map(lambda x: values(x) if quant.is_packed(x) else x, packed, is_leaf=quant.is_packed)
    return packed, plain


def _packed(x: np.ndarray, kind: str) -> Any:
    if x.ndim < 2:
        return x
    if kind == "int8":
        return quant.quantize(x, kind)
    # Act-order: the columns are sorted otherwise, and the values are those of x in its own order.
    order = np.random.default_rng(x.shape[0]).permutation(x.shape[1]).astype(np.int32)
    return dataclasses.replace(quant.quantize(x[:, order], kind), permutation=order)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_weights_up_to_rounding(kind: str) -> None:
    packed, plain = packed_model(kind)
    tokens = np.random.default_rng(5).integers(0, 97, 24)
    with jax.default_matmul_precision("float32"):
        logits = _logits(packed, tokens)
    expected = llama_oracle.logits(plain, CONFIG, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    # The rounding of the weights themselves is far more than that: the oracle does tell them apart.
    unrounded = llama_oracle.logits(model.init_weights(CONFIG, seed=4), CONFIG, tokens)
    assert np.abs(unrounded - expected).max() > 1e-3 * np.abs(expected).max()


def _logits(weights: model.Weights, tokens: np.ndarray) -> np.ndarray:
    @jax.jit
    def run(weights: model.Weights) -> jax.Array:
        _, hidden = model.forward(weights, CONFIG, tokens[None], np.arange(len(tokens))[None], dense, None)
        return model.logits(weights, hidden)

    return np.asarray(run(weights))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_abstract_weights_are_shaped_like_quantised_ones_and_compile(kind: str) -> None:
    described = quant.abstract(model.weight_shapes(CONFIG, jnp.bfloat16), kind)
    drawn = model.init_weights(CONFIG, dtype=jnp.bfloat16)
    layers = [jax.tree.map(lambda x: quant.quantize(x, kind) if x.ndim == 2 else x, layer) for layer in drawn.layers]
    shaped = jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), drawn.replace(layers=tuple(layers)))
    assert jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), described) == shaped
    assert described.layers[0].down.nbytes == layers[0].down.nbytes

    def run(weights: model.Weights, tokens: Any) -> Any:
        _, hidden = model.forward(weights, CONFIG, tokens, jnp.zeros((1, 8), int), dense, None)
        return model.logits(weights, hidden)

    compiled = jax.jit(run).lower(described, jax.ShapeDtypeStruct((1, 8), jnp.int32)).compile()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(described))
    assert held <= compiled.memory_analysis().argument_size_in_bytes <= held + 1024


def test_a_matrix_that_no_group_divides_stays_plain() -> None:
    config = dataclasses.replace(CONFIG, mlp_width=100)
    described = quant.abstract(model.weight_shapes(config), "int4")
    assert not quant.is_packed(described.layers[0].down)
    assert quant.is_packed(described.layers[0].up)
    assert not quant.is_packed(described.embedding)
