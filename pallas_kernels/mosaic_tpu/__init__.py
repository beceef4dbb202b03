"""Kernels for TPUs, through Pallas' Mosaic lowering. The folder stands alone: without it ``pallas_kernels`` goes on to
the next implementation.

Pages are wider than a head where its dimension is no multiple of 128, and hold zeros there.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_tpu import attend as _attend
from pallas_kernels.mosaic_tpu import compact as _compact
from pallas_kernels.mosaic_tpu import int4_matmul as _int4
from pallas_kernels.mosaic_tpu import score as _score
from pallas_kernels.mosaic_tpu import tiles

__all__ = ["attend", "compact", "int4_matmul", "score"]

int4_matmul = _int4.int4_matmul


def attend(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Float[Array, "H"] | None = None,
    k_scale: Float[Array, "N K P"] | None = None,
    v_scale: Float[Array, "N K P"] | None = None,
    return_lse: bool = False,
) -> Any:
    """See ``pallas_kernels.attend``."""
    device = tiles.check_device()
    tiles.check_pages(k_pages)
    if v_pages.dtype != k_pages.dtype:
        raise NotImplementedError(f"k pages of {k_pages.dtype} with v pages of {v_pages.dtype}")
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("k_scale and v_scale; these kernels read pages that are not quantised")
    if str(q.dtype) not in tiles.PAGE_DTYPES:
        raise NotImplementedError(f"queries of {q.dtype}; these kernels take {', '.join(tiles.PAGE_DTYPES)}")
    tiles.check_tables(block_table.size + 2 * query_slots.size)
    kv_heads, block = k_pages.shape[1:3]
    config = tiles.attend(k_pages, q.shape[2] // kv_heads, q.shape[1])
    unrolled = tiles.unrolled(kv_heads, device)
    spec = _attend.Spec(block, kv_heads, block_table.shape[1], float(scale), window, softcap, config, unrolled)
    args = (q, k_pages, v_pages, block_table, query_slots, spec, sink_logits, return_lse, device)
    out, lse = _attend.attend(*args)
    return (out, lse) if return_lse else out


def score(
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    w: Float[Array, "B O H D"],
    c: Float[Array, "B H F"],
) -> Float[Array, "B K G S"]:
    """See ``pallas_kernels.score``."""
    device = tiles.check_device()
    tiles.check_pages(k_pages)
    tiles.check_tables(block_table.size + length.size)
    config = tiles.score(k_pages, w.shape[2] // k_pages.shape[1], w.shape[1])
    return _score.score(k_pages, block_table, length, w, c, config, device)


def compact(
    pages: Any,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
) -> Any:
    """See ``pallas_kernels.compact``."""
    return _compact.compact(pages, keep, count, source, target, tiles.check_device())
