"""How near to the memory bus each op comes: a copy, attention, scores and moves, each by itself.

One call takes tens of microseconds, so a program makes many, one after another, each waiting for the one before. Short
cases go round several copies of their data, or the second-level cache would answer in memory's place.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_cases import BLOCK, NVIDIA, Heads, pages, tables
from device_timing import Report, Times, clock, compiled
from jax import lax

import pallas_kernels
from jaxkv.dims import ceil_div

FAR = 512 * 2**20
"""Bytes between two readings of the same array: several times any chip's second-level cache."""
MOST_COPIES = 8
TARGET_SECONDS = 0.02
"""Length of a timed program if the floor were reached."""
SLOWER = 8
"""XLA's own paths are given fewer calls: they are this much slower or more."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Rows that all hold as many slots."""

    rows: int
    slots: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.slots}"


def copy_bandwidth(report: Report, dry: bool) -> None:
    """Measure bytes a second of an update of an array in place, read and written, and of a sum, read."""
    size = 2**20 if dry else 2**30
    calls = 2 if dry else 10
    x = jnp.ones(size // 4, jnp.int32)
    update, _ = compiled(lambda x: x ^ 1, x, donate=(0,))
    total, _ = compiled(jnp.sum, x)
    held = [x]

    def copy() -> Any:
        for _ in range(calls):
            held[0] = update(held[0])
        return held[0]

    updates = clock(copy, calls, 0)
    sums = clock(lambda: [total(held[0]) for _ in range(calls)], calls, 0)
    found = {"bytes": size, "copy_seconds": dataclasses.asdict(updates), "read_seconds": dataclasses.asdict(sums)}
    found |= {"copy_gb_per_second": 2 * size / updates.median / 1e9, "read_gb_per_second": size / sums.median / 1e9}
    report.put("copy", found)
    report.say(f"copy {found['copy_gb_per_second']:.0f} GB/s, read {found['read_gb_per_second']:.0f} GB/s")


def attention(report: Report, heads: Heads, load: Load, dry: bool) -> None:
    """Time one layer's attention of one query a row, paged by every implementation, and contiguous by JAX's own."""
    size = heads.kv_bytes(load.rows * load.slots)
    copies = _copies(size, dry)
    rng = np.random.default_rng(load.rows)
    table = tables(rng, load.rows, load.slots, copies)
    k, v = (pages(i, heads, table.size, "bfloat16") for i in (1, 2))
    q = jax.random.normal(jax.random.key(3), (load.rows, 1, heads.heads, heads.dim), jnp.bfloat16)
    own = jnp.full((load.rows, 1), load.slots - 1, jnp.int32)
    for implementation in NVIDIA:

        def once(q: Any, index: int, k: Any, v: Any, table: Any, own: Any, name: Any = implementation) -> Any:
            return pallas_kernels.attend(q, k, v, table[index], own, implementation=name)

        entry = {"heads": heads.name, "load": str(load), "implementation": implementation}
        _time(report, "attention", entry, once, q, (k, v, jnp.asarray(table), own), size, copies, dry)
    del k, v
    _contiguous(report, heads, load, q, copies, dry)


def _contiguous(report: Report, heads: Heads, load: Load, q: Any, copies: int, dry: bool) -> None:
    shape = (load.rows, load.slots, heads.kv_heads, heads.dim)
    made = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    keys, values = ([made(jax.random.key(2 * i + j)) for i in range(copies)] for j in (0, 1))
    refused: dict[str, str] = {}
    for implementation in ("cudnn", "xla"):

        def once(q: Any, index: int, keys: Any, values: Any, name: Any = implementation) -> Any:
            return jax.nn.dot_product_attention(q, keys[index], values[index], implementation=name)

        entry = {"heads": heads.name, "load": str(load), "implementation": f"contiguous {implementation}", **refused}
        size = heads.kv_bytes(load.rows * load.slots)
        try:
            if _time(report, "attention", entry, once, q, (keys, values), size, copies, dry):
                return
        except Exception as error:
            # The library names no one type: a shape that it does not take can be any error, up to the compiler's.
            refused[f"{implementation}_refused"] = f"{type(error).__name__}: {str(error)[:200]}"
    report.add("attention", {"heads": heads.name, "load": str(load), "implementation": "contiguous", **refused})


def scoring(report: Report, heads: Heads, load: Load, dry: bool) -> None:
    """Time one layer's scores, whose floor is one reading of K."""
    size = heads.kv_bytes(load.rows * load.slots) // 2
    copies = _copies(size, dry)
    table = tables(np.random.default_rng(load.rows), load.rows, load.slots, copies)
    k = pages(1, heads, table.size, "bfloat16")
    w = jax.random.normal(jax.random.key(4), (load.rows, 1, heads.heads, heads.dim))
    c = jax.random.uniform(jax.random.key(5), (load.rows, heads.heads, heads.dim // 2))
    length = jnp.full(load.rows, load.slots, jnp.int32)
    for implementation in NVIDIA:

        def once(length: Any, index: int, k: Any, table: Any, w: Any, c: Any, name: Any = implementation) -> Any:
            scores = pallas_kernels.score(k, table[index], length, w, c, implementation=name)
            # The next call waits for this one; no score is infinite.
            return jnp.where(jnp.isinf(scores[:, 0, 0, 0]), 0, length)

        entry = {"heads": heads.name, "load": str(load), "implementation": implementation}
        _time(report, "scoring", entry, once, length, (k, jnp.asarray(table), w, c), size, copies, dry)


def moving(report: Report, heads: Heads, sizes: tuple[int, int, int], dry: bool) -> None:
    """Time one layer's move of the survivors, whose floor is to read and to write those that change their slots.

    ``sizes`` are rows, slots of each before, and slots after.
    """
    rows, length, budget = sizes
    rng = np.random.default_rng(rows)
    width = ceil_div(length, BLOCK)
    keep = np.full((rows, heads.kv_heads, width * BLOCK), width * BLOCK, np.int32)
    for row, head in np.ndindex(*keep.shape[:2]):
        keep[row, head, :budget] = np.sort(rng.choice(length, budget, replace=False))
    moved = int(np.sum(keep[..., :budget] != np.arange(budget)))
    size = 2 * 2 * moved * heads.dim * 2
    copies = _copies(size // 2, dry)
    table = tables(rng, rows, length, copies)
    count = jnp.full(rows, budget, jnp.int32)
    used = np.arange(width) < ceil_div(budget, BLOCK)
    target = jnp.asarray(np.where(used, table, -1).astype(np.int32))
    for implementation in NVIDIA:

        def once(
            held: Any, index: int, keep: Any, count: Any, source: Any, target: Any, name: Any = implementation
        ) -> Any:
            return pallas_kernels.compact(held, keep, count, source[index], target[index], implementation=name)

        entry = {"heads": heads.name, "load": f"{rows} x {length} to {budget}", "implementation": implementation}
        held = tuple(pages(i, heads, table.size, "bfloat16") for i in (1, 2))
        args = (jnp.asarray(keep), count, jnp.asarray(table), target)
        _time(report, "moving", entry, once, held, args, size, copies, dry)


def _copies(size: int, dry: bool) -> int:
    return 2 if dry else min(MOST_COPIES, max(1, ceil_div(FAR, size)))


def _turns(seconds: float, implementation: str, dry: bool) -> int:
    """Return how often to go through all copies, which takes so many seconds at best."""
    if dry:
        return 1
    turns = math.ceil(TARGET_SECONDS / seconds)
    return ceil_div(turns, SLOWER) if implementation.endswith("xla") else turns


def _time(
    report: Report,
    section: str,
    entry: dict[str, Any],
    once: Callable[..., Any],
    carry: Any,
    args: Sequence[Any],
    size: int,
    copies: int,
    dry: bool,
) -> bool:
    """Time ``carry = once(carry, index, *args)`` over all copies, again and again, and report its share of a copy.

    Returns:
      Whether it ran: False where the implementation does not serve.
    """
    floor = size / (1e9 * report.found["copy"]["copy_gb_per_second"])
    turns = _turns(floor * copies, entry["implementation"], dry)

    def program(carry: Any, *args: Any) -> Any:
        def turn(_: Any, carry: Any) -> Any:
            for index in range(copies):
                carry = once(carry, index, *args)
            return carry

        # A known number of turns, or the host would be asked after each whether there is another.
        return lax.fori_loop(0, turns, turn, carry)

    try:
        run, seconds = compiled(program, carry, *args, donate=(0,))
    except NotImplementedError as error:
        report.add(section, {**entry, "refused": str(error)[:200]})
        return False
    # The first argument is given away, and the caller has a use for it.
    held = [jax.tree.map(jnp.copy, carry)]

    def call() -> Any:
        held[0] = run(held[0], *args)
        return held[0]

    start = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - start
    # A path that is far slower than was thought has fewer repeats, not none.
    times: Times = clock(call, turns * copies, seconds, repeats=7 if first < 0.5 and not dry else 3)
    report.add(
        section,
        {
            **entry,
            "bytes": size,
            "seconds": dataclasses.asdict(times),
            "floor_seconds": floor,
            "share": floor / times.median,
            "turns": turns,
            "copies": copies,
        },
    )
    label = f"{section} {entry['heads']} {entry['load']} {entry['implementation']}"
    report.say(f"{label}: {1e6 * times.median:.1f} us, floor {1e6 * floor:.1f}, {floor / times.median:.0%} of a copy")
    return True
