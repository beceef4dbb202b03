"""The TPU kernels under Pallas' own interpreter of a TPU: copies land when they are waited for and not before, memory
begins as NaN, and a detector looks for accesses that nothing orders.

Small shapes: every copy is a call into Python. Bits are compared as integers, and NaNs of every kind are among them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from attention_oracle import paged_attention, shuffled_pages
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels
from pallas_kernels import device

BLOCK = 16

attend_module = importlib.import_module("pallas_kernels.mosaic_tpu.attend")
compact_module = importlib.import_module("pallas_kernels.mosaic_tpu.compact")
tiles = importlib.import_module("pallas_kernels.mosaic_tpu.tiles")


@contextlib.contextmanager
def simulated(**options: Any) -> Iterator[None]:
    """Kernels cut for a v5e, and interpreted with the race detector on.

    Two copies that share a clock look ordered to it, and each draws one at random: so there are many.
    """
    defaults = {"dma_execution_mode": "on_wait", "uninitialized_memory": "nan", "vector_clock_size": 64}
    params = pltpu.InterpretParams(detect_races=True, **{**defaults, **options})
    with device.target("TPU v5 lite"), pltpu.force_tpu_interpret_mode(params):
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the calls inside ``simulated`` so far had a race, as the detector sees it."""
    return bool(interpreter.races.races_found)


def has_race(call: Callable[..., Any], *args: Any, **options: Any) -> bool:
    """Whether a call has a race. Newer JAX raises where it finds one, older notes it and goes on."""
    try:
        call(*args, **options)
    except RuntimeError as error:
        return "RACE DETECTED" in str(error)
    return races_found()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of two blocks, so that a few hundred slots are many."""
    monkeypatch.setattr(tiles, "key_blocks", lambda _: 2)


def attention(dtype: Any, queries: int, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    lengths = np.array([37, 5, 100, 64])
    k, v, table = shuffled_pages(rng, lengths, 2, BLOCK, 128, dtype)
    q = rng.standard_normal((4, queries, 4, 128)).astype(dtype)
    slots = np.maximum(lengths[:, None] - 1 - np.arange(queries), -1).astype(np.int32)
    # An idle row between busy ones: it has nothing to read, and passes the next row's first tile on.
    slots[1] = -1
    return q, k, v, table, slots


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
def test_attention(queries: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MOST_ROWS", 8)
    args = attention(np.float32, queries)
    expected, _ = paged_attention(*args, **options)
    with simulated():
        out = np.asarray(pallas_kernels.attend(*args, implementation="mosaic_tpu", **options))
        assert not races_found()
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_scores() -> None:
    rng = np.random.default_rng(1)
    lengths = np.array([0, 37, 0, 100], np.int32)
    k, _, table = shuffled_pages(rng, lengths, 2, BLOCK, 128)
    w = rng.standard_normal((4, 2, 4, 96)).astype(np.float32)
    c = rng.uniform(0, 1, (4, 4, 48)).astype(np.float32)
    # Padding of a narrower head, and NaN in every slot that nobody holds.
    k[..., 96:] = np.where(np.isnan(k[..., 96:]), np.nan, 0)
    with simulated():
        got = np.asarray(pallas_kernels.score(k, table, lengths, w, c, implementation="mosaic_tpu"))
        assert not races_found()
    for b, h in np.ndindex(4, 4):
        slots = np.arange(lengths[b])
        keys = k[table[b, slots // BLOCK], h // 2, slots % BLOCK].astype(np.float64)
        expected = (keys[:, :96] @ w[b, :, h].T.astype(np.float64)).max(axis=1)
        expected += np.hypot(keys[:, :48], keys[:, 48:96]) @ c[b, h].astype(np.float64)
        np.testing.assert_allclose(got[b, h // 2, h % 2, : lengths[b]], expected, atol=1e-4)


def moves(dtype: Any, per_head: bool) -> tuple[Any, ...]:
    """Return pages of random bits, and a plan for two rows of several tiles: in place, and into fresh blocks."""
    rng = np.random.default_rng(2)
    rows, heads, width, blocks = 2, 2, 12, 32
    size = np.dtype(dtype).itemsize
    shape = (2, blocks, heads, BLOCK, 128)
    pages = rng.integers(0, 2 ** (8 * size), shape, dtype=f"u{size}")
    ids = rng.permutation(np.arange(1, blocks)).astype(np.int32)
    source = ids[: rows * width].reshape(rows, width)
    target = source.copy()
    target[1, 2:5] = ids[rows * width : rows * width + 3]
    # The first two blocks stay as they are.
    target[0, :2] = -1
    count = np.array([180, 133], np.int32)
    keep = np.full((rows, heads if per_head else 1, width * BLOCK), 2**30, np.int32)
    for b, x in np.ndindex(*keep.shape[:2]):
        late = np.sort(rng.choice(np.arange(32, width * BLOCK), count[b] - 32, replace=False))
        keep[b, x, : count[b]] = np.concatenate([np.arange(32), late])
    return pages, keep, count, source, target


def moved(pages: Any, keep: Any, count: Any, source: Any, target: Any) -> tuple[Any, Any]:
    """Return what a page array has to hold afterwards, and where anything goes."""
    expected, free = pages.copy(), np.zeros(pages.shape, bool)
    for b, m in np.ndindex(*target.shape):
        if target[b, m] < 0 or m * BLOCK >= count[b]:
            continue
        for h, slot in np.ndindex(pages.shape[1], BLOCK):
            j = m * BLOCK + slot
            if j < count[b]:
                origin = keep[b, h if keep.shape[1] > 1 else 0, j]
                expected[target[b, m], h, slot] = pages[source[b, origin // BLOCK], h, origin % BLOCK]
            else:
                free[target[b, m], h, slot] = True
    return expected, free


def run_compact(bits: Any, dtype: Any, *plan: Any) -> list[Any]:
    pages = [jnp.asarray(array.view(dtype)) for array in bits]
    after = pallas_kernels.compact(pages, *plan, implementation="mosaic_tpu")
    return [np.asarray(array).view(bits.dtype) for array in after]


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_moves_of_any_bits(dtype: Any, per_head: bool) -> None:
    bits, *plan = moves(dtype, per_head)
    with simulated():
        after = run_compact(bits, dtype, *plan)
        assert not races_found()
    for before, got in zip(bits, after, strict=True):
        expected, free = moved(before, *plan)
        np.testing.assert_array_equal(np.where(free, 0, got), np.where(free, 0, expected))


def test_a_window_that_is_being_written_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile also reads the window before its own: nothing of it is used, and the numbers are right."""
    windows = compact_module._windows

    def early(keep: Any, count: Any, slots: int) -> Any:
        keep, found = windows(keep, count, slots)
        return keep, found.at[..., 0].set(jnp.maximum(found[..., 0] - 1, 0))

    monkeypatch.setattr(compact_module, "_windows", early)
    bits, *plan = moves(np.float32, True)
    with simulated(dma_execution_mode="eager"):
        assert has_race(run_compact, bits, np.float32, *plan)


@pytest.mark.usefixtures("small_tiles")
def test_keys_that_are_not_waited_for_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = attend_module.fetch

    def impatient(action: str, *args: Any, **options: Any) -> None:
        if action == "start":
            fetch(action, *args, **options)

    monkeypatch.setattr(attend_module, "fetch", impatient)
    args = attention(np.float32, 1)
    with simulated(dma_execution_mode="eager"):
        assert has_race(pallas_kernels.attend, *args, implementation="mosaic_tpu")


@pytest.mark.usefixtures("small_tiles")
def test_a_copy_read_before_the_others_are_there_gives_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a tile share a semaphore: waiting once for one of them is not waiting for all."""
    fetch = attend_module.fetch

    def hasty(action: str, table: Any, base: Any, first: Any, last: Any, *args: Any) -> None:
        fetch(action, table, base, first, last if action == "start" else jnp.minimum(first + 1, last), *args)

    monkeypatch.setattr(attend_module, "fetch", hasty)
    args = attention(np.float32, 1)
    expected, _ = paged_attention(*args)
    with simulated():
        out = np.asarray(pallas_kernels.attend(*args, implementation="mosaic_tpu"))
    assert not np.allclose(out, expected, atol=1e-5)
