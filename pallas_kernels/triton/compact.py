"""Moves the kept slots of a row to its front, bit for bit, in place or into fresh blocks.

Grid: ``(column slices, K, B)``. A program owns one row, one KV head and one slice of a slot's columns (128 bytes of
them) in one or two arrays, and walks the kept slots forward in tiles: it reads tile i + 1, then writes tile i.

Why there is no race, in place:

* Between programs: two of them never touch the same element of a row's own blocks, which are this row's alone where
  they are written. A block with other holders is only read, and copied into one that is nobody's source.
* Between the tiles of a program: slot j receives slot ``keep[j] >= j``, so tile i + 1 reads slots from
  ``(i + 1) * slots`` on, and all that was written when it is read, tiles up to i, lies below.
* Between the threads of a program: what one thread writes another may still have to read, but only within a tile. So
  tile i + 1 is read before tile i is written, with one barrier between: it holds every thread's writes of a tile back
  until all have read it. An interpreter cannot see that barrier missing; ``tests/aot`` looks for it in the PTX.

Bytes: what moves is read once and written once; slots that stay where they are cost their entry in ``keep``. That is
``4 * moved * K * D`` elements for K and V. The floor is not the bandwidth but the walk, one trip to memory a tile: 2048
kept slots in tiles of 128 are 16 trips of about 1.5 us, 24 us a layer on any card, with ``B * K * D / 64`` programs of
512 threads at it in 16 bits: one a multiprocessor for B = 8, K = 8, D = 128, with 32 KiB in flight in each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

from pallas_kernels.compact_reference import _has_heads
from pallas_kernels.triton import tiles

Pages = TypeVar("Pages")
MOST_BYTES = 2**31
"""Triton's offsets are of 32 bits for arrays under 4 GiB, and count elements: a signed one must reach all of them."""


def compact_kernel(
    keep_ref: Any,
    count_ref: Any,
    source_ref: Any,
    target_ref: Any,
    *refs: Any,
    block: int,
    width: int,
    config: tiles.TileConfig,
    barrier: bool,
) -> None:
    """One program: see the module's docstring. ``refs`` are the pages as inputs, unused, and as outputs."""
    pages = refs[len(refs) // 2 :]
    piece, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    keeper = head if keep_ref.shape[1] > 1 else 0
    count = count_ref[row]
    column = piece * config.columns + jnp.arange(config.columns)
    inside = (column < width)[None, :]

    def address(blocks: Any, slot: Any) -> tuple[Any, ...]:
        return blocks[:, None], head, lax.rem(slot, block)[:, None], column[None, :]

    def read(tile: Any) -> tuple[Any, ...]:
        slot = tile * config.slots + jnp.arange(config.slots)
        kept = slot < count
        origin = pltriton.load(keep_ref.at[row, keeper, slot], mask=kept, other=0)
        to = pltriton.load(target_ref.at[row, lax.div(slot, block)], mask=kept, other=-1)
        # Block 0 for masked lanes: the interpreter writes there what it finds there.
        blocks = pltriton.load(source_ref.at[row, lax.div(origin, block)], mask=to >= 0, other=0)
        moved = (to >= 0) & ((to != blocks) | (lax.rem(origin, block) != lax.rem(slot, block)))
        mask = moved[:, None] & inside
        values = tuple(pltriton.load(ref.at[address(blocks, origin)], mask=mask, other=0) for ref in pages)
        return jnp.where(moved, to, -1), *values

    def step(tile: Any, held: tuple[Any, ...]) -> tuple[Any, ...]:
        following = read(tile + 1)
        if barrier:
            pltriton.debug_barrier()
        to, *values = held
        slot = tile * config.slots + jnp.arange(config.slots)
        where = address(jnp.maximum(to, 0), slot)
        for ref, value in zip(pages, values, strict=True):
            pltriton.store(ref.at[where], value, mask=(to >= 0)[:, None] & inside)
        return following

    lax.fori_loop(0, lax.div(count + config.slots - 1, config.slots), step, read(0))


def compact(
    pages: Pages,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
    *,
    interpret: bool = False,
) -> Pages:
    """See ``pallas_kernels.compact``; arrays of one shape and dtype that follow one another are moved in pairs.

    Raises:
      NotImplementedError: an array of one byte an element has 2 GiB or more, or one of more than four bytes.
    """
    block = keep.shape[2] // source.shape[1]
    leaves, tree = jax.tree.flatten(pages)
    views = [_view(leaf, keep.shape[1], block) for leaf in leaves]
    moved: list[Any] = []
    while len(moved) < len(views):
        pair = views[len(moved) : len(moved) + 2]
        if len(pair) == 2 and (pair[0].shape, pair[0].dtype) != (pair[1].shape, pair[1].dtype):
            pair = pair[:1]
        moved += _move(pair, keep, count, source, target, block, interpret)
    return jax.tree.unflatten(tree, [new.reshape(leaf.shape) for new, leaf in zip(moved, leaves, strict=True)])


def _view(leaf: Array, keepers: int, block: int) -> Array:
    """Return the array as ``[N, K, P, columns]``."""
    if leaf.dtype.itemsize > 4 or (leaf.dtype.itemsize == 1 and leaf.size >= MOST_BYTES):
        raise NotImplementedError(f"pages of {leaf.dtype} {leaf.shape} are more than a kernel's offsets reach")
    heads = leaf.shape[1] if _has_heads(leaf, keepers, block) else 1
    return leaf.reshape(leaf.shape[0], heads, block, -1)


def _move(
    pages: Sequence[Array],
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
    block: int,
    interpret: bool,
) -> list[Array]:
    _, heads, _, width = pages[0].shape
    config = tiles.compact(pages[0].dtype.itemsize, width)
    body = functools.partial(compact_kernel, block=block, width=width, config=config, barrier=not interpret)
    # The pages are read and written through the outputs, which are the inputs' own memory.
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(width, config.columns), heads, keep.shape[0]),
        in_specs=[pl.no_block_spec] * (4 + len(pages)),
        out_specs=[pl.no_block_spec] * len(pages),
        out_shape=[jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages],
        input_output_aliases={4 + index: index for index in range(len(pages))},
        compiler_params=pltriton.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="compact",
    )(keep, count, source, target, *pages)
