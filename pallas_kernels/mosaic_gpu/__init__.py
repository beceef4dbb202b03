"""Kernels for NVIDIA's Hopper (compute capability 9.x) through Pallas' Mosaic GPU lowering. The folder stands alone:
without it, and for every call that it refuses, ``pallas_kernels`` goes on to the next implementation.

It is complete a call, not an op: ``attend`` of one query a row over 16-bit pages is served here, and so is picked
first on a Hopper; chunks, float32 and 8-bit pages, other head dimensions, ``score`` and ``compact`` are refused by
name, and Triton serves them. Scores are bound by reading K and by float32 arithmetic, and compaction by moving rows:
neither has a product for wgmma.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu import attend_decode as _decode
from pallas_kernels.mosaic_gpu import tiles

__all__ = ["attend", "compact", "score"]


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
    rows, queries, heads, _ = q.shape
    kv_heads, block, dim = k_pages.shape[1:]
    groups = heads // kv_heads
    tiles.check_groups(groups)
    if queries != 1:
        raise NotImplementedError(f"{queries} queries a row; this kernel decodes one")
    interpret = tiles.interpreter(device)
    config = tiles.attend_decode(device, dim, rows * kv_heads)
    spec = _decode.Spec(block, kv_heads, groups, dim, float(scale), window, softcap, config)
    args = (q, k_pages, v_pages, block_table, query_slots, spec, sink_logits)
    out, lse = _decode.attend_decode(*args, interpret=interpret)
    return (out, lse) if return_lse else out


def score(
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    w: Float[Array, "B O H D"],
    c: Float[Array, "B H F"],
) -> Float[Array, "B K G S"]:
    """Refuse: there is no such kernel here.

    Raises:
      NotImplementedError: always.
    """
    tiles.check_device()
    raise NotImplementedError("scores have no kernel of Hopper's own; implementation='triton' has one")


def compact(
    pages: Any,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
) -> Any:
    """Refuse: there is no such kernel here.

    Raises:
      NotImplementedError: always.
    """
    tiles.check_device()
    raise NotImplementedError("compaction has no kernel of Hopper's own; implementation='triton' has one")
