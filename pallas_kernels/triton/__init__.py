"""Kernels for NVIDIA GPUs from Ampere on, through Pallas' Triton lowering: the only one that reaches the A100 and the
RTX 3090 and 4090. The folder stands alone: without it ``pallas_kernels`` goes on to the next implementation.
"""

from __future__ import annotations

import warnings
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.triton import attend_chunk as _chunk
from pallas_kernels.triton import attend_decode as _decode
from pallas_kernels.triton import compact as _compact
from pallas_kernels.triton import int4_matmul as _int4
from pallas_kernels.triton import int8_matmul as _int8
from pallas_kernels.triton import score as _score
from pallas_kernels.triton import tiles
from pallas_kernels.triton.online_softmax import Spec

__all__ = ["attend", "compact", "int4_matmul", "int8_matmul", "score"]

warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


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
    rows, queries, heads, dim = q.shape
    kv_heads, block = k_pages.shape[1], k_pages.shape[2]
    groups = heads // kv_heads
    tiles.check_groups(groups)
    if queries == 1:
        config = tiles.attend_decode(device, k_pages.dtype, dim, groups, rows * kv_heads)
        kernel: Any = _decode.attend_decode
    else:
        config = tiles.attend_chunk(k_pages.dtype, dim, groups, queries)
        kernel = _chunk.attend_chunk
    spec = Spec(block, groups, dim, float(scale), window, softcap, config)
    args = (q, k_pages, v_pages, block_table, query_slots, spec, sink_logits)
    out, lse = kernel(*args, interpret=device.interpret)
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
    tiles.check_groups(w.shape[2] // k_pages.shape[1])
    config = tiles.score(k_pages.shape[3])
    return _score.score(k_pages, block_table, length, w, c, config, interpret=device.interpret)


def compact(
    pages: Any,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
) -> Any:
    """See ``pallas_kernels.compact``."""
    device = tiles.check_device()
    return _compact.compact(pages, keep, count, source, target, interpret=device.interpret)


int4_matmul, int8_matmul = _int4.int4_matmul, _int8.int8_matmul
