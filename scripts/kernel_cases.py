"""Calls of every kernel, as shapes: what the ahead-of-time tests compile and the kernel report lists.

A case is a name, a function and its arguments; those at ``donate`` are given away.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one kernel, on the chips named, or on all NVIDIA ones where none is."""

    kernel: str
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: Sequence[int] = ()
    targets: Sequence[str] = ()


def array(*shape: int, dtype: Any = jnp.float32) -> Any:
    """Return a shape and a dtype in place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def cases() -> list[Case]:
    """Return all of them."""
    return [*_attend_cases(), *_hopper_cases(), *_score_cases(), *_compact_cases()]


def _attend_cases() -> list[Case]:
    shapes: list[tuple[Any, ...]] = [
        # G, D, P, dtype: SmolLM2, Llama and Qwen3, Qwen2.5-7B, Phi, Phi-3, Gemma, and the corners.
        (3, 64, 16, "bfloat16"),
        (4, 128, 16, "bfloat16"),
        (7, 128, 16, "bfloat16"),
        (7, 128, 64, "float16"),
        (1, 80, 16, "bfloat16"),
        (1, 96, 32, "float16"),
        (2, 256, 16, "bfloat16"),
        (16, 128, 128, "bfloat16"),
        (16, 256, 8, "bfloat16"),
        (8, 64, 256, "bfloat16"),
        (3, 64, 16, "float32"),
        (4, 128, 16, "float32"),
        (5, 80, 8, "float32"),
        (16, 256, 64, "float32"),
    ]
    made = [_attend(queries, *shape) for queries in (1, 128) for shape in shapes]
    every: dict[str, Any] = {"window": 1000, "softcap": 30.0, "sinks": True, "return_lse": True}
    made += [_attend(queries, 4, 128, 16, "bfloat16", **every) for queries in (1, 128)]
    # Queries in a wider type than the pages are split in two.
    made += [_attend(queries, 4, 128, 16, "bfloat16", wider=True) for queries in (1, 128)]
    return made


def _attend(
    queries: int,
    groups: int,
    dim: int,
    block: int,
    dtype: str,
    *,
    sinks: bool = False,
    wider: bool = False,
    implementation: pallas_kernels.Implementation = "triton",
    **options: Any,
) -> Case:
    rows, kv_heads = (8, 8) if queries == 1 else (2, 8)
    pages = array(500, kv_heads, block, dim, dtype=dtype)
    q = array(rows, queries, kv_heads * groups, dim, dtype="float32" if wider else dtype)
    integers = array(rows, 4096 // block, dtype="int32"), array(rows, queries, dtype="int32")
    args = (q, pages, pages, *integers, *([array(kv_heads * groups)] if sinks else []))

    def function(q: Any, k: Any, v: Any, table: Any, slots: Any, *sinks: Any) -> Any:
        named = {"sink_logits": sinks[0]} if sinks else {}
        return pallas_kernels.attend(q, k, v, table, slots, implementation=implementation, **named, **options)

    name = f"G={groups} D={dim} P={block} {dtype}" + " options" * bool(options) + " float32 queries" * wider
    return Case("attend_decode" if queries == 1 else "attend_chunk", name, function, args)


def _hopper_cases() -> list[Case]:
    shapes: list[tuple[Any, ...]] = [
        (3, 64, 16, "bfloat16"),
        (8, 64, 256, "float16"),
        (4, 128, 16, "bfloat16"),
        (32, 128, 8, "bfloat16"),
    ]
    made = [_attend(1, *shape, implementation="mosaic_gpu") for shape in shapes]
    every: dict[str, Any] = {"window": 1000, "softcap": 30.0, "sinks": True, "return_lse": True}
    for shape in ((3, 64, 16, "bfloat16"), (4, 128, 16, "bfloat16")):
        made += [_attend(1, *shape, wider=wider, implementation="mosaic_gpu", **every) for wider in (False, True)]
    return [dataclasses.replace(case, kernel="attend_hopper", targets=("NVIDIA H200",)) for case in made]


def _score_cases() -> list[Case]:
    made = []
    for groups, dim, block, dtype, offsets in (
        (3, 64, 16, "bfloat16", 1),
        (4, 128, 16, "bfloat16", 1),
        (7, 128, 16, "bfloat16", 1),
        (7, 128, 64, "float16", 17),
        (1, 80, 16, "bfloat16", 1),
        (1, 96, 16, "bfloat16", 17),
        (16, 256, 8, "bfloat16", 1),
        (16, 256, 256, "float32", 17),
        (4, 128, 16, "float32", 1),
        (3, 64, 16, "float32", 1),
    ):
        heads = 8 * groups
        args = (
            array(500, 8, block, dim, dtype=dtype),
            array(8, 4096 // block, dtype="int32"),
            array(8, dtype="int32"),
            array(8, offsets, heads, dim),
            array(8, heads, dim // 2),
        )
        function = functools.partial(pallas_kernels.score, implementation="triton")
        made.append(Case("score", f"G={groups} D={dim} P={block} {dtype} O={offsets}", function, args))
    return made


def _compact_cases() -> list[Case]:
    made = []
    for shape, dtype, keepers in (
        ((8, 16, 64), "bfloat16", 8),
        ((8, 16, 128), "bfloat16", 8),
        ((8, 64, 128), "bfloat16", 1),
        ((8, 16, 80), "float16", 8),
        ((8, 8, 96), "bfloat16", 8),
        ((8, 256, 256), "bfloat16", 8),
        ((8, 16, 128), "float32", 8),
        ((8, 16, 128), "int8", 8),
        ((8, 16), "float32", 8),
        ((8, 16), "bfloat16", 8),
        ((16,), "int32", 1),
    ):
        block = shape[1] if len(shape) > 1 else shape[0]
        width = 4096 // block
        pages = (array(4000, *shape, dtype=dtype),) * 2
        tables = (array(8, width, dtype="int32"),) * 2
        args = (pages, array(8, keepers, width * block, dtype="int32"), array(8, dtype="int32"), *tables)
        function = functools.partial(pallas_kernels.compact, implementation="triton")
        made.append(Case("compact", f"[N, {', '.join(map(str, shape))}] {dtype} X={keepers}", function, args, (0,)))
    return made
