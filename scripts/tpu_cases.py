"""Calls of every TPU kernel, as shapes: what the ahead-of-time tests compile and the kernel report lists."""

from __future__ import annotations

import functools
from typing import Any

from ahead_of_time import TPU_TARGETS
from kernel_cases import Case, array

import pallas_kernels
from jaxkv.pool import page_dim

KV_HEADS = 8
CONTEXT = 4096


def cases() -> list[Case]:
    """Return all of them."""
    return [*_attend_cases(), *_score_cases(), *_compact_cases()]


def _pages(dim: int, block: int, dtype: str, kv_heads: int = KV_HEADS, blocks: int = 500) -> Any:
    return array(blocks, kv_heads, block, page_dim(dim, "tpu"), dtype=dtype)


def _attend_cases() -> list[Case]:
    made = []
    for queries in (1, 128):
        for groups, dim, block, dtype, kv_heads in (
            # SmolLM2, Llama and Qwen3, Qwen2.5-7B, Phi, Phi-3, Gemma, and the corners.
            (3, 64, 16, "bfloat16", 3),
            (4, 128, 16, "bfloat16", 8),
            (7, 128, 64, "bfloat16", 4),
            (1, 80, 16, "bfloat16", 32),
            (1, 96, 32, "bfloat16", 32),
            (2, 256, 16, "bfloat16", 8),
            (16, 128, 256, "bfloat16", 1),
            (3, 64, 8, "float32", 3),
            (4, 128, 16, "float32", 8),
            (16, 256, 64, "float32", 2),
        ):
            made.append(_attend(queries, groups, dim, block, dtype, kv_heads))
        every: dict[str, Any] = {"window": 1000, "softcap": 30.0, "sinks": True, "return_lse": True}
        made.append(_attend(queries, 4, 128, 16, "bfloat16", KV_HEADS, **every))
        made.append(_attend(queries, 4, 128, 16, "bfloat16", KV_HEADS, wider=True))
    return made


def _attend(
    queries: int,
    groups: int,
    dim: int,
    block: int,
    dtype: str,
    kv_heads: int,
    *,
    sinks: bool = False,
    wider: bool = False,
    **options: Any,
) -> Case:
    rows, heads = 8 if queries == 1 else 2, kv_heads * groups
    pages = _pages(dim, block, dtype, kv_heads)
    q = array(rows, queries, heads, dim, dtype="float32" if wider else dtype)
    integers = array(rows, CONTEXT // block, dtype="int32"), array(rows, queries, dtype="int32")
    args = (q, pages, pages, *integers, *([array(heads)] if sinks else []))

    def function(q: Any, k: Any, v: Any, table: Any, slots: Any, *sinks: Any) -> Any:
        named = {"sink_logits": sinks[0]} if sinks else {}
        return pallas_kernels.attend(q, k, v, table, slots, implementation="mosaic_tpu", **named, **options)

    name = f"K={kv_heads} G={groups} D={dim} P={block} {dtype}" + " options" * bool(options) + " float32 q" * wider
    return Case("attend_decode" if queries == 1 else "attend_chunk", name, function, args, targets=TPU_TARGETS)


def _score_cases() -> list[Case]:
    made = []
    for groups, dim, block, dtype, offsets in (
        (3, 64, 16, "bfloat16", 1),
        (4, 128, 16, "bfloat16", 1),
        (7, 128, 64, "bfloat16", 17),
        (1, 80, 16, "bfloat16", 1),
        (16, 256, 256, "float32", 1),
        (4, 128, 8, "float32", 17),
    ):
        heads = KV_HEADS * groups
        args = (
            _pages(dim, block, dtype),
            array(8, CONTEXT // block, dtype="int32"),
            array(8, dtype="int32"),
            array(8, offsets, heads, dim),
            array(8, heads, dim // 2),
        )
        function = functools.partial(pallas_kernels.score, implementation="mosaic_tpu")
        name = f"G={groups} D={dim} P={block} {dtype} O={offsets}"
        made.append(Case("score", name, function, args, targets=TPU_TARGETS))
    return made


def _compact_cases() -> list[Case]:
    made = []
    for dim, block, dtype, keepers in (
        (64, 16, "bfloat16", 8),
        (128, 16, "bfloat16", 8),
        (128, 64, "bfloat16", 1),
        (256, 256, "bfloat16", 8),
        (128, 8, "float32", 8),
        (256, 64, "float32", 1),
    ):
        # Arrays of 150 MiB and more: a smaller one may be copied to vector memory, and no count of bytes shows it.
        pages = (_pages(dim, block, dtype, blocks=160_000 // block),) * 2
        tables = (array(8, CONTEXT // block, dtype="int32"),) * 2
        args = (pages, array(8, keepers, CONTEXT, dtype="int32"), array(8, dtype="int32"), *tables)
        function = functools.partial(pallas_kernels.compact, implementation="mosaic_tpu")
        made.append(Case("compact", f"D={dim} P={block} {dtype} X={keepers}", function, args, (0,), TPU_TARGETS))
    return made
