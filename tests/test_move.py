"""The compaction of pages, over every implementation present, bit for bit against loops in NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, present

import pallas_kernels

ROWS, KV_HEADS, BLOCK, WIDTH, BLOCKS = 2, 3, 16, 20, 100
SLOTS = WIDTH * BLOCK
"""More slots than the largest tile of a kernel, so that rows of several tiles are among the examples."""

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.cache
def compacted(implementation):
    compact = functools.partial(pallas_kernels.compact, implementation=implementation)
    return jax.jit(compact, donate_argnums=0)


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def random_pages(rng, flat, implementation):
    """Return pages of every kind that an implementation moves, three or more arrays."""
    values = rng.standard_normal((2, BLOCKS, KV_HEADS, BLOCK, 128 if implementation == "mosaic_tpu" else 80))
    values[rng.random(values.shape) < 0.1] = np.nan
    values[rng.random(values.shape) < 0.1] = -0.0
    if implementation == "mosaic_tpu":
        halves = {name: values[index].astype(ml_dtypes.bfloat16) for index, name in enumerate(("k", "v"))}
        return {**halves, "wide": values[0].astype(np.float32)}
    pages = {
        "k": values[0].astype(ml_dtypes.bfloat16),
        "v": values[1].astype(ml_dtypes.bfloat16),
        "codes": rng.integers(-128, 128, (BLOCKS, KV_HEADS, BLOCK, 48), dtype=np.int8),
        "scales": rng.standard_normal((BLOCKS, KV_HEADS, BLOCK)).astype(np.float32),
    }
    if flat:
        pages["positions"] = rng.integers(0, 2**31 - 1, (BLOCKS, BLOCK), dtype=np.int32)
    return pages


@st.composite
def moves(draw):
    """Return a generator, keep [B, X, S], counts, the rows' blocks and where they go: home, elsewhere or nowhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads = draw(st.sampled_from([1, KV_HEADS]))
    # Past the count anything goes, slots that do not exist included.
    keep = rng.integers(0, 2 * SLOTS, (ROWS, heads, SLOTS)).astype(np.int32)
    counts = np.zeros(ROWS, np.int32)
    for b in range(ROWS):
        length = draw(st.integers(0, SLOTS))
        counts[b] = draw(st.integers(0, length))
        kind = draw(st.sampled_from(["any", "first", "last"]))
        for x in range(heads):
            chosen = {
                "any": np.sort(rng.choice(length, counts[b], replace=False)) if length else np.arange(0),
                "first": np.arange(counts[b]),
                "last": np.arange(length - counts[b], length),
            }
            keep[b, x, : counts[b]] = chosen[kind]
    ids = rng.permutation(np.arange(1, BLOCKS)).astype(np.int32)
    source = ids[: ROWS * WIDTH].reshape(ROWS, WIDTH)
    fresh = ids[ROWS * WIDTH : 2 * ROWS * WIDTH].reshape(ROWS, WIDTH)
    target = np.where(rng.random(source.shape) < draw(st.sampled_from([0, 0.3])), fresh, source)
    # A block in which nothing moves need not be written.
    still = keep[:, :, :] == np.arange(SLOTS)
    still = np.all(still.reshape(ROWS, heads, WIDTH, BLOCK), axis=(1, 3)) & (target == source)
    return rng, keep, counts, source, np.where(still, -1, target).astype(np.int32)


@given(problem=moves())
def test_slots_move_bit_for_bit_and_nothing_else_does(implementation, problem):
    rng, keep, counts, source, target = problem
    heads = keep.shape[1]
    before = {name: np.array(page) for name, page in random_pages(rng, heads == 1, implementation).items()}
    # A copy: on a CPU the donated array may be this memory itself.
    given_away = {name: jnp.array(page, copy=True) for name, page in before.items()}
    with present(implementation):
        after = compacted(implementation)(given_away, keep, counts, source, target)
    for name, page in before.items():
        got, expected = bits(after[name]).copy(), bits(page).copy()
        for b in range(ROWS):
            slots = np.arange(counts[b])
            to = target[b, slots // BLOCK]
            slots, to = slots[to >= 0], to[to >= 0]
            for h in range(KV_HEADS):
                origin = keep[b, h if heads > 1 else 0, slots]
                if name == "positions":
                    expected[to, slots % BLOCK] = bits(page)[source[b, origin // BLOCK], origin % BLOCK]
                else:
                    moved = bits(page)[source[b, origin // BLOCK], h, origin % BLOCK]
                    expected[to, h, slots % BLOCK] = moved
            # What a written block holds past the count is nobody's.
            tail = np.arange(counts[b], SLOTS)
            tail_to = target[b, tail // BLOCK]
            tail, tail_to = tail[tail_to >= 0], tail_to[tail_to >= 0]
            for array in (got, expected):
                array[(tail_to, tail % BLOCK) if name == "positions" else (tail_to, slice(None), tail % BLOCK)] = 0
        np.testing.assert_array_equal(got, expected)


def test_nothing_to_keep_changes_nothing(implementation):
    pages = jnp.arange(4 * 2 * 8 * 16, dtype=jnp.float32).reshape(4, 2, 8, 16)
    keep, zero = jnp.full((1, 2, 16), 7), jnp.zeros(1, int)
    with present(implementation):
        after = pallas_kernels.compact(pages, keep, zero, jnp.array([[1, 2]]), jnp.array([[1, 2]]))
    np.testing.assert_array_equal(after, pages)


def test_shapes_that_do_not_fit_are_named(implementation):
    keep, count, table = jnp.zeros((1, 2, 8), int), jnp.zeros(1, int), jnp.zeros((1, 2), int)

    def compact(pages, *args):
        with present(implementation):
            return pallas_kernels.compact(pages, *args, implementation=implementation)

    with pytest.raises(ValueError, match=r"keep \[B, X, M \* P\]"):
        compact(jnp.zeros((9, 2, 4, 8)), keep, count, table, jnp.zeros((1, 3), int))
    with pytest.raises(ValueError, match=r"\(9, 4\) have no heads, and 2 heads keep different slots"):
        compact(jnp.zeros((9, 4)), keep, count, table, table)
