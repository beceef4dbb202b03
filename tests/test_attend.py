"""Paged attention, over every implementation present, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_oracle import paged_attention, shuffled_pages
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, compiled, present, refused, skip_what_is_padded_alike, widened

import pallas_kernels

BLOCK = 16

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def attend(implementation, q, k, v, *args, **options):
    call = functools.partial(pallas_kernels.attend, implementation=implementation)
    args = (q, widened(implementation, k), widened(implementation, v), *args)
    with present(implementation):
        return compiled(implementation, functools.partial(call, **options))(*args)


def queries(rng, rows, count, heads, dim, dtype=np.float32):
    return rng.standard_normal((rows, count, heads, dim)).astype(dtype)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("groups", [1, 3, 4, 7, 8])
def test_every_length_up_to_two_blocks_and_one(implementation, dim, groups):
    skip_what_is_padded_alike(implementation, dim, groups)
    rng = np.random.default_rng(dim + groups)
    lengths = np.arange(1, 2 * BLOCK + 2)
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, dim)
    q = queries(rng, len(lengths), 1, 2 * groups, dim)
    slots = (lengths - 1)[:, None].astype(np.int32)
    out, lse = attend(implementation, q, k, v, table, slots, return_lse=True)
    expected, expected_lse = paged_attention(q, k, v, table, slots)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("block", [8, 16, 64, 256, 512])
def test_lengths_over_several_tiles(implementation, block):
    rng = np.random.default_rng(block)
    lengths = np.array([1, 255, 256, 257, 700, 1025])
    k, v, table = shuffled_pages(rng, lengths, 1, block, 64)
    q = queries(rng, len(lengths), 1, 3, 64)
    slots = (lengths - 1)[:, None].astype(np.int32)
    out = attend(implementation, q, k, v, table, slots)
    np.testing.assert_allclose(out, paged_attention(q, k, v, table, slots)[0], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"softcap": 3.0},
        {"scale": 0.4},
        {"sinks": True},
        {"scales": True},
        {"window": 40, "softcap": 2.0, "sinks": True, "scales": True},
    ],
    ids=str,
)
def test_chunk_of_ragged_rows_with_every_option(implementation, options):
    rng = np.random.default_rng(5)
    lengths = np.array([7, 33, 300, 1])
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, 64)
    q = queries(rng, 4, 6, 6, 64)
    # Slots in any order, with padding between: each query names its own.
    slots = np.array(
        [[6, 0, -1, 3, 5, 1], [32, 31, 30, 2, -1, -1], [299, 255, 256, 0, 100, -1], [0, 0, -1, -1, -1, -1]]
    )
    options = dict(options)
    arrays = {}
    if options.pop("sinks", False):
        arrays["sinks"] = rng.standard_normal(6).astype(np.float32)
    if options.pop("scales", False):
        # A free slot's scale may be anything, too.
        arrays["k_scale"] = np.where(np.isnan(k[..., 0]), np.nan, rng.uniform(0.5, 2, k.shape[:3])).astype(np.float32)
        arrays["v_scale"] = np.where(np.isnan(k[..., 0]), np.nan, rng.uniform(0.5, 2, k.shape[:3])).astype(np.float32)
    expected, expected_lse = paged_attention(q, k, v, table, slots, **options, **arrays)
    if "sinks" in arrays:
        arrays["sink_logits"] = arrays.pop("sinks")
    if implementation != "xla" and "k_scale" in arrays:
        with refused(implementation, "k_scale and v_scale; these kernels read pages that are"):
            attend(implementation, q, k, v, table, slots.astype(np.int32), **options, **arrays)
        return
    out, lse = attend(implementation, q, k, v, table, slots.astype(np.int32), return_lse=True, **options, **arrays)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    real = slots >= 0
    np.testing.assert_allclose(np.asarray(lse)[real], expected_lse[real], atol=2e-5)
    assert np.all(np.asarray(out)[~real] == 0)
    if implementation != "xla":
        assert np.all(np.asarray(lse)[~real] == -np.inf)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 70, "softcap": 2.0}, {"scale": 0.4}], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_newest_queries_with_options(implementation, options, sinks, count):
    """Slots far into a row, so that a window leaves whole tiles out, and a row of which nothing is decoded."""
    rng = np.random.default_rng(6)
    lengths = np.array([7, 33, 300, 513, 5])
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, 64)
    q = queries(rng, 5, count, 6, 64)
    slots = (lengths[:, None] - 1 - np.arange(count)).astype(np.int32)
    slots[4] = -1
    logits = rng.standard_normal(6).astype(np.float32) if sinks else None
    expected, expected_lse = paged_attention(q, k, v, table, slots, **options, sinks=logits)
    out, lse = attend(implementation, q, k, v, table, slots, return_lse=True, sink_logits=logits, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(lse)[:4], expected_lse[:4], atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_pages_against_float64_of_the_rounded_inputs(implementation, dtype, dim, count):
    rng = np.random.default_rng(1)
    lengths = np.array([3, 64, 500])
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, dim, dtype)
    q = queries(rng, 3, count, 6, dim, dtype)
    slots = (lengths[:, None] - 1 - np.arange(count)).astype(np.int32)
    if implementation == "mosaic_tpu" and dtype == np.float16:
        with refused(implementation, "pages of float16; these kernels take bfloat16, float32"):
            attend(implementation, q, k, v, table, slots)
        return
    out = np.asarray(attend(implementation, q, k, v, table, slots)).astype(np.float64)
    expected, _ = paged_attention(q, k, v, table, slots)
    ulp = float(ml_dtypes.finfo(dtype).eps) * np.maximum(np.abs(expected), 2.0**-6)
    assert np.all(np.abs(out - expected) <= 2 * ulp)


def test_wider_queries_keep_their_precision(implementation):
    """Float32 queries over bfloat16 pages, as where attention runs in float32 to save the pool half its bytes."""
    rng = np.random.default_rng(2)
    lengths = np.array([5, 130])
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, 64, ml_dtypes.bfloat16)
    for count in (1, 2):
        q = queries(rng, 2, count, 6, 64)
        slots = (lengths[:, None] - 1 - np.arange(count)).astype(np.int32)
        out = attend(implementation, q, k, v, table, slots)
        np.testing.assert_allclose(out, paged_attention(q, k, v, table, slots)[0], atol=2e-5)


@given(
    lengths=st.lists(st.integers(1, 700), min_size=3, max_size=3),
    count=st.sampled_from([1, 3]),
    width=st.sampled_from([44, 60]),
    seed=st.integers(0, 99),
)
def test_neighbours_and_table_width_change_no_bit(implementation, lengths, count, width, seed):
    rng = np.random.default_rng(seed)
    k, v, table = shuffled_pages(rng, lengths, 1, BLOCK, 64, width=width, blocks=3 * 44 + 4)
    k, v = widened(implementation, k), widened(implementation, v)
    q = queries(rng, len(lengths), count, 3, 64)
    slots = np.maximum(np.array(lengths, np.int32)[:, None] - 1 - np.arange(count, dtype=np.int32), -1)
    attended = jax.jit(functools.partial(pallas_kernels.attend, implementation=implementation))
    with present(implementation):
        together = np.asarray(attended(q, k, v, table, slots))
        for row in range(len(lengths)):
            alone = np.full_like(slots, -1)
            alone[row] = slots[row]
            # The narrowest table that holds the row, in steps of a tile, so that few shapes are compiled.
            narrow = -(-lengths[row] // 256) * 16
            only = np.asarray(attended(q, k, v, table[:, :narrow], alone))
            np.testing.assert_array_equal(only[row], together[row])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dim", [48, 64, 80])
def test_pages_may_be_wider_than_the_heads(implementation, dim, count):
    rng = np.random.default_rng(3)
    lengths = np.array([3, 64, 500])
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, dim)
    q = queries(rng, 3, count, 6, dim)
    slots = (lengths[:, None] - 1 - np.arange(count)).astype(np.int32)
    args = (q, widened("mosaic_tpu", k), widened("mosaic_tpu", v), table, slots)
    out = attend(implementation, *args)
    np.testing.assert_allclose(out, paged_attention(q, k, v, table, slots)[0], atol=1e-5)


def test_a_batch_of_nothing_but_padding_reads_no_page(implementation):
    k = v = np.full((3, 2, BLOCK, 64), np.nan, np.float32)
    out = attend(implementation, jnp.ones((2, 1, 4, 64)), k, v, jnp.zeros((2, 2), int), jnp.full((2, 1), -1))
    assert np.all(np.asarray(out) == 0)


def test_an_implementation_that_is_not_there_says_so(implementation):
    k = v = jnp.zeros((3, 2, BLOCK, 64))
    args = (jnp.ones((1, 1, 4, 64)), k, v, jnp.zeros((1, 2), int), jnp.zeros((1, 1), int))
    with pytest.raises(ValueError, match="'cudnn' is unknown; one of xla, triton"):
        pallas_kernels.attend(*args, implementation="cudnn")
    missing = [name for name in pallas_kernels.IMPLEMENTATIONS if name not in IMPLEMENTATIONS]
    for name in missing:
        with pytest.raises(NotImplementedError, match=f"attend has no implementation for this call: {name}: "):
            pallas_kernels.attend(*args, implementation=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (1, 1, 3, 64)}, "heads=3 is not a multiple of kv_heads=2"),
        ({"q": (1, 4, 64)}, r"q \[B, T, H, D\]"),
        ({"q": (1, 1, 4, 96)}, r"pages \[N, K, P, D\]"),
        ({"table": (2, 2)}, r"block_table \[B, M\]"),
        ({"slots": (1, 2)}, r"query_slots \[B, T\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(implementation, change, message):
    shapes = {"q": (1, 1, 4, 64), "table": (1, 2), "slots": (1, 1), **change}
    k = v = jnp.zeros((3, 2, BLOCK, 64))
    with pytest.raises(ValueError, match=message):
        pallas_kernels.attend(
            jnp.ones(shapes["q"]), k, v, jnp.zeros(shapes["table"], int), jnp.zeros(shapes["slots"], int)
        )
