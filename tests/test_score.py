"""Scores of cached keys, over every implementation present, against float64 NumPy."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_oracle import shuffled_pages
from implementations import IMPLEMENTATIONS, compiled, present, refused, skip_what_is_padded_alike, widened

import pallas_kernels

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def score(implementation, k, *args):
    args = (widened(implementation, k), *args)
    with present(implementation):
        return compiled(implementation, functools.partial(pallas_kernels.score, implementation=implementation))(*args)


def expected_scores(k_pages, table, lengths, w, c):
    """Return [B, K, G, S] by a loop over rows and heads; NaN past a row's length."""
    rows, offsets, heads, dim = w.shape
    kv_heads, block = k_pages.shape[1:3]
    groups, bands = heads // kv_heads, dim // 2
    out = np.full((rows, kv_heads, groups, table.shape[1] * block), np.nan)
    for b, h in np.ndindex(rows, heads):
        slots = np.arange(lengths[b])
        k = k_pages[table[b, slots // block], h // groups, slots % block].astype(np.float64)
        trig = [k @ w[b, o, h].astype(np.float64) for o in range(offsets)]
        norm = np.hypot(k[:, :bands], k[:, bands:]) @ c[b, h].astype(np.float64)
        out[b, h // groups, h % groups, : lengths[b]] = np.max(trig, axis=0) + norm
    return out


def problem(rng, lengths, kv_heads, groups, block, dim, offsets=1, dtype=np.float32, width=None):
    k, _, table = shuffled_pages(rng, lengths, kv_heads, block, dim, dtype, width=width)
    w = rng.standard_normal((len(lengths), offsets, kv_heads * groups, dim)).astype(np.float32)
    c = rng.uniform(0, 1, (len(lengths), kv_heads * groups, dim // 2)).astype(np.float32)
    return k, table, np.asarray(lengths, np.int32), w, c


def check(implementation, k, table, lengths, w, c):
    got, expected = np.asarray(score(implementation, k, table, lengths, w, c)), expected_scores(k, table, lengths, w, c)
    assert got.shape == expected.shape
    for b, length in enumerate(lengths):
        if length:
            error = np.abs(got[b, ..., :length] - expected[b, ..., :length])
            assert error.max() <= 1e-5 * np.abs(expected[b, ..., :length]).max()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("groups", [1, 3, 7])
def test_ragged_rows(implementation, groups, dim):
    skip_what_is_padded_alike(implementation, dim, groups)
    rng = np.random.default_rng(dim + groups)
    check(implementation, *problem(rng, [1, 0, 37, 130, 16], 2, groups, 16, dim))


@pytest.mark.parametrize("block", [8, 64, 256])
def test_block_sizes_and_the_maximum_over_offsets(implementation, block):
    rng = np.random.default_rng(block)
    check(implementation, *problem(rng, [300, 5], 1, 3, block, 64, offsets=5))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_pages_are_scored_in_float32(implementation, dtype):
    args = problem(np.random.default_rng(3), [100, 33], 2, 2, 16, 64, dtype=dtype)
    if implementation == "mosaic_tpu" and dtype == np.float16:
        with refused(implementation, "pages of float16; these kernels take bfloat16, float32"):
            score(implementation, *args)
        return
    check(implementation, *args)


@pytest.mark.parametrize("dim", [48, 80])
def test_pages_may_be_wider_than_the_heads(implementation, dim):
    k, table, lengths, w, c = problem(np.random.default_rng(5), [100, 33], 2, 3, 16, dim, offsets=2)
    got = np.asarray(score(implementation, widened("mosaic_tpu", k), table, lengths, w, c))
    expected = expected_scores(k, table, lengths, w, c)
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(got[b, ..., :length], expected[b, ..., :length], atol=1e-4)


def test_table_width_and_neighbours_change_no_bit(implementation):
    rng = np.random.default_rng(4)
    k, table, lengths, w, c = problem(rng, [90, 300], 2, 3, 16, 64, width=32)
    together = np.asarray(score(implementation, k, table, lengths, w, c))
    alone = np.asarray(score(implementation, k, table[:, :16], np.array([90, 0], np.int32), w, c))
    np.testing.assert_array_equal(alone[0, ..., :90], together[0, ..., :90])


def test_shapes_that_do_not_fit_are_named(implementation):
    k, table, length = np.zeros((3, 2, 16, 64), np.float32), jnp.zeros((1, 2), int), jnp.zeros(1, int)
    with pytest.raises(ValueError, match=r"w \[B, O, H, D\] and c \[B, H, F\]"):
        score(implementation, k, table, length, jnp.zeros((1, 1, 4, 160)), jnp.zeros((1, 4, 80)))
    with pytest.raises(ValueError, match=r"length \[1\]"):
        score(implementation, k, table, jnp.zeros(2, int), jnp.zeros((1, 1, 4, 64)), jnp.zeros((1, 4, 32)))
