"""Moves the kept slots of a row to its front, bit for bit, in place or into fresh blocks.

Grid: ``(B, K)``, in any order. A program owns one row and one KV head of one or two arrays, and walks the kept slots
forward in tiles of 128, each whole blocks. The sources of a tile lie in a few windows of as many slots; while one is at
work the next is on its way, and so are the writes of the tile before.

Rows are gathered by the matrix unit, and without rounding: a window's bits are taken as integers, their bytes as
bfloat16 numbers from 0 to 255, and multiplied by a matrix with a single 1 for each slot. NaN and -0.0 are bytes like
all others, and bytes that are not wanted are times 0.

Why there is no race, in place:

* Between programs: two of them never touch the same element of a row's own blocks, which are this row's alone where
  they are written. A block with other holders is only read, and copied into one that is nobody's source.
* Between the tiles of a program: slot j receives slot ``keep[j] >= j``, so the sources of tile i are in windows from i
  on. A window and a tile are of one size, so what is on its way while tile i is written lies behind it.
* Between the copies of a window: it is read when all of them have been waited for.

Bytes: each window is read once, and once more where two tiles have sources in it; each tile is written once. For one
layer that is up to ``6 n K D`` elements for K and V, in pieces of ``P D``: 4 KiB for P = 16, D = 128 in bfloat16.
The floor for B = 8, K = 8, n = 3200, D = 128 is 315 MB, 0.4 ms on a v5e; larger blocks come nearer to it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.compact_reference import _has_heads
from pallas_kernels.device import Device
from pallas_kernels.mosaic_tpu import tiles
from pallas_kernels.mosaic_tpu.transfer import fetch

Pages = TypeVar("Pages")


def compact_kernel(
    source_ref: Any,
    target_ref: Any,
    window_ref: Any,
    span_ref: Any,
    keep_ref: Any,
    *refs: Any,
    block: int,
    width: int,
    keepers: int,
) -> None:
    """One program: see the module's docstring. ``refs`` are the pages as inputs, unused, and as outputs, a buffer of
    two windows and one of a tile for each, the sums, and the semaphores.
    """
    arrays = (len(refs) - 3) // 4
    pages, buffers, results = (refs[arrays * part : arrays * (part + 1)] for part in (1, 2, 3))
    sums, reading, writing = refs[4 * arrays :]
    row, head = pl.program_id(0), pl.program_id(1)
    count_of_tiles, slots = keep_ref.shape[2:]
    blocks = slots // block
    first, last = span_ref[2 * row], span_ref[2 * row + 1]
    lists = (row * keepers + (head if keepers > 1 else 0)) * count_of_tiles

    def windows(tile: Any) -> tuple[Any, Any]:
        tile = lists + jnp.minimum(tile, count_of_tiles - 1)
        return window_ref[2 * tile], window_ref[2 * tile + 1]

    def read(action: Any, window: Any, place: Any) -> None:
        begin = window * blocks
        into = [buffer.at[place] for buffer in buffers]
        end = jnp.minimum(begin + blocks, width)
        fetch(action, source_ref, row * width, begin, end, begin, pages, into, reading.at[place], head)

    def write(action: Any, tile: Any) -> None:
        def one(index: Any, carry: Any) -> Any:
            to = target_ref[row * width + tile * blocks + index]

            @pl.when(to >= 0)
            def _() -> None:
                for page, result in zip(pages, results, strict=True):
                    getattr(pltpu.make_async_copy(result.at[index], page.at[to, head], writing), action)()

            return carry

        lax.fori_loop(0, jnp.minimum(blocks, width - tile * blocks), one, None)

    @pl.when(first < last)
    def _() -> None:
        read("start", windows(first)[0], 0)

    def move(tile: Any, place: Any) -> Any:
        begin, end = windows(tile)
        sums[...] = jnp.zeros_like(sums)

        def gather(window: Any, place: Any) -> Any:
            more = window + 1 < end

            @pl.when(more | (tile + 1 < last))
            def _() -> None:
                read("start", jnp.where(more, window + 1, windows(tile + 1)[0]), 1 - place)

            read("wait", window, place)
            wanted = keep_ref[0, 0, pl.ds(tile, 1), :] - window * slots
            slot = lax.broadcasted_iota(jnp.int32, (slots, slots), 0)
            hits = jnp.where(slot == wanted, 1.0, 0.0).astype(jnp.bfloat16)
            planes = [plane for buffer in buffers for plane in byte_planes(buffer[place])]
            sums[...] += lax.dot_general(
                hits,
                jnp.concatenate(planes, axis=1),
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            return 1 - place

        place = lax.fori_loop(begin, end, gather, place)

        @pl.when(tile > first)
        def _() -> None:
            write("wait", tile - 1)

        columns = sums.shape[1] // arrays
        for index, result in enumerate(results):
            part = sums[:, index * columns : (index + 1) * columns]
            result[...] = from_planes(part, result.dtype).reshape(result.shape)
        write("start", tile)
        return place

    lax.fori_loop(first, last, move, jnp.int32(0))

    @pl.when(first < last)
    def _() -> None:
        write("wait", last - 1)


def byte_planes(x: Any) -> list[Any]:
    """Return the bytes of ``[R, P, D]``, lowest first, as arrays ``[R * P, D]`` of bfloat16."""
    integers = jnp.int32 if x.dtype == jnp.float32 else jnp.int16
    words = pltpu.bitcast(x.reshape(-1, x.shape[-1]), integers).astype(jnp.int32)
    # By way of float32: there is no conversion of 32-bit integers to bfloat16.
    return [
        (lax.shift_right_logical(words, jnp.int32(8 * index)) & 255).astype(jnp.float32).astype(jnp.bfloat16)
        for index in range(x.dtype.itemsize)
    ]


def from_planes(sums: Any, dtype: Any) -> Any:
    """Return ``[T, D]`` of a dtype from its bytes side by side, ``[T, bytes * D]``."""
    size = jnp.dtype(dtype).itemsize
    dim = sums.shape[1] // size
    words: Any = jnp.zeros((sums.shape[0], dim), jnp.int32)
    for index in range(size):
        words |= lax.shift_left(sums[:, index * dim : (index + 1) * dim].astype(jnp.int32), jnp.int32(8 * index))
    return pltpu.bitcast(words if size == 4 else words.astype(jnp.int16), dtype)


def compact(
    pages: Pages,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
    device: Device,
) -> Pages:
    """See ``pallas_kernels.compact``; arrays of one shape and dtype that follow one another are moved in pairs."""
    block = keep.shape[2] // source.shape[1]
    leaves, tree = jax.tree.flatten(pages)
    for leaf in leaves:
        _has_heads(leaf, keep.shape[1], block)
        tiles.check_pages(leaf)
    moved: list[Any] = []
    while len(moved) < len(leaves):
        pair = leaves[len(moved) : len(moved) + 2]
        if len(pair) == 2 and (pair[0].shape, pair[0].dtype) != (pair[1].shape, pair[1].dtype):
            pair = pair[:1]
        moved += _move(pair, keep, count, source, target, block, device)
    return jax.tree.unflatten(tree, moved)


def _move(
    pages: Sequence[Array],
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
    block: int,
    device: Device,
) -> list[Array]:
    pool, heads, _, dim = pages[0].shape
    rows, width = source.shape
    slots, size = tiles.move_slots(block), pages[0].dtype.itemsize
    keep, windows = _windows(keep, count, slots)
    count_of_tiles = keep.shape[2] // slots
    target = jnp.where((jnp.arange(width) * block < count[:, None]) & (target < pool), target, -1)
    tables = [jnp.clip(source, 0, pool - 1), target, windows, _span(target, slots // block)]
    tiles.check_tables(sum(table.size for table in tables))
    columns = len(pages) * size * dim
    tiles.check_vectors(2 * 4 * keep.shape[2] + 2 * 4 * slots * columns, f"{keep.shape[2]} slots of {dim} columns")
    keep = keep.reshape(rows, -1, count_of_tiles, slots)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    keepers = keep.shape[1]
    shape = (slots // block, block, dim)
    # The pages are read and written through the outputs, which are the inputs' own memory.
    return pl.pallas_call(
        functools.partial(compact_kernel, block=block, width=width, keepers=keepers),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(rows, heads),
            in_specs=[
                pl.BlockSpec((1, 1, *keep.shape[2:]), lambda row, head, *_: (row, head if keepers > 1 else 0, 0, 0)),
                *[hbm] * len(pages),
            ],
            out_specs=[hbm] * len(pages),
            scratch_shapes=[
                *[pltpu.VMEM((2, *shape), page.dtype) for page in pages],
                *[pltpu.VMEM(shape, page.dtype) for page in pages],
                pltpu.VMEM((slots, columns), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages],
        input_output_aliases={5 + index: index for index in range(len(pages))},
        compiler_params=tiles.compiler_params(device, "parallel", "parallel"),
        interpret=device.interpret,
        name="compact",
    )(*(table.astype(jnp.int32).reshape(-1) for table in tables), keep, *pages)


def _windows(
    keep: Int[Array, "B X S"], count: Int[Array, "B"], slots: int
) -> tuple[Int[Array, "B X S"], Int[Array, "B X C 2"]]:
    """Return keep in whole tiles, -1 where nothing is kept, and the windows of each tile: the first, and one past."""
    keep = jnp.pad(keep, ((0, 0), (0, 0), (0, -keep.shape[2] % slots)))
    keep = jnp.where(jnp.arange(keep.shape[2]) < count[:, None, None], keep, -1)
    cut = keep.reshape(*keep.shape[:2], -1, slots)
    last = jnp.max(cut, axis=-1)
    first = jnp.min(jnp.where(cut < 0, last[..., None], cut), axis=-1)
    return keep, jnp.stack([first // slots, last // slots + 1], axis=-1)


def _span(target: Int[Array, "B M"], blocks: int) -> Int[Array, "B 2"]:
    """Return the first of a row's tiles that has a block to write, and one past the last."""
    tile = jnp.arange(target.shape[1]) // blocks
    written = target >= 0
    first = jnp.min(jnp.where(written, tile, target.shape[1]), axis=1)
    return jnp.stack([first, jnp.max(jnp.where(written, tile + 1, 0), axis=1)], axis=1)
