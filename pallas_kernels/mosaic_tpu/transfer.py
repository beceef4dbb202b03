"""Copies of whole blocks between the pool in HBM and vector memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jax import lax
from jax.experimental.pallas import tpu as pltpu


def fetch(
    action: Literal["start", "wait"],
    table_ref: Any,
    base: Any,
    first: Any,
    last: Any,
    origin: Any,
    pages: Sequence[Any],
    buffers: Sequence[Any],
    semaphore: Any,
    head: Any = None,
) -> None:
    """Start the copies of blocks ``first .. last - 1`` of a row into ``buffers``, or wait for them.

    Copies of one tile share a semaphore, so one that is waited for is not yet known to be there: read nothing before
    all of them have been.

    Args:
      action: which of the two; both with the same values otherwise.
      table_ref: the flat table of all rows, in scalar memory.
      base: where the row begins in it.
      first, last: of the row's blocks.
      origin: the block that goes to the buffers' first place.
      pages: arrays ``[N, K, P, D]``.
      buffers: for each of them ``[R, K, P, D]``, or ``[R, P, D]`` for one head.
      semaphore: of these buffers.
      head: the one to copy; None copies all.
    """

    def one(index: Any, carry: Any) -> Any:
        block = table_ref[base + index]
        for page, buffer in zip(pages, buffers, strict=True):
            source = page.at[block] if head is None else page.at[block, head]
            getattr(pltpu.make_async_copy(source, buffer.at[index - origin], semaphore), action)()
        return carry

    lax.fori_loop(first, last, one, None)
