"""Whether each op's implementations agree with XLA, both on the device: attention, scores, moves, packed products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_timing import Report, compiled

import pallas_kernels
from jaxkv.dims import ceil_div
from pallas_kernels import Implementation

BLOCK = 16
NVIDIA: tuple[Implementation, ...] = ("xla", "triton", "mosaic_gpu")
OPS = ("attend_decode", "attend_chunk", "score", "compact", "int4_matmul", "int8_matmul")
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}
"""Largest error, as a share of the largest result: of sums in another order, and of a result rounded to 8 bits."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of a model: H, K and D."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    def kv_bytes(self, slots: int, item: int = 2) -> int:
        """Return bytes of K and V of one layer."""
        return 2 * slots * self.kv_heads * self.dim * item


QWEN3 = Heads("Qwen3-8B", 32, 8, 128)
SMOLLM2 = Heads("SmolLM2", 9, 3, 64)


def tables(rng: np.random.Generator, rows: int, slots: int, copies: int = 1) -> np.ndarray:
    """Return block tables [copies, B, M] that share no block, in random order: block 0 is in none."""
    width = ceil_div(slots, BLOCK)
    ids = 1 + rng.permutation(copies * rows * width)
    return ids.reshape(copies, rows, width).astype(np.int32)


def pages(seed: int, heads: Heads, blocks: int, dtype: str) -> jax.Array:
    """Return random pages [N, K, P, D], made on the device; block 0 is NaN, for nothing may read it."""
    shape = (blocks + 1, heads.kv_heads, BLOCK, heads.dim)
    made = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(dtype)).at[0].set(jnp.nan))
    return made(jax.random.key(seed))


def run_checks(report: Report, dry: bool) -> None:
    """Check every op for every implementation that serves; each is an entry of ``checks``.

    The reference is XLA in float32 with products in full precision, on the same device.
    """
    kinds = [(heads, dtype) for heads in (QWEN3, SMOLLM2) for dtype in ("float32", "bfloat16")]
    for op in OPS:
        # A matrix has no heads, and a rehearsal takes each of both once.
        for heads, dtype in kinds[:2] if op.endswith("matmul") else kinds[1:3] if dry else kinds:
            name = f"check {op} {heads.name} {dtype}"
            report.run(name, 5, lambda op=op, heads=heads, dtype=dtype: _check(report, op, heads, dtype, dry))  # type: ignore[misc]


def _check(report: Report, op: str, heads: Heads, dtype: str, dry: bool) -> None:
    function, args, differ = _PROBLEMS[op](heads, dtype, dry)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 and op != "compact" else x for x in args]
        expected = np.asarray(_call(function, "xla")(*wide))
    # In float32 XLA is the reference itself: left to its own precision it rounds products to TF32.
    for implementation in NVIDIA if dtype == "bfloat16" else NVIDIA[1:]:
        entry = {"op": op, "heads": heads.name, "dtype": dtype, "implementation": implementation}
        try:
            program, seconds = compiled(_call(function, implementation), *args)
        except NotImplementedError as error:
            report.add("checks", {**entry, "status": "refused", "reason": str(error)[:300]})
            continue
        except Exception as error:
            # The compiler gave up on a kernel that said it serves: that is a failed check of this one.
            report.add("checks", {**entry, "status": "failed", "reason": f"{type(error).__name__}: {str(error)[:300]}"})
            continue
        off, bound = differ(np.asarray(program(*args)), expected)
        status = "passed" if off <= bound else "failed"
        report.add("checks", {**entry, "status": status, "error": off, "bound": bound, "compile_seconds": seconds})
        if status == "failed":
            report.say(f"FAILED: {entry}, error {off:.3g} of at most {bound:.3g}")


Problem = tuple[Callable[..., Any], list[jax.Array], Callable[[np.ndarray, np.ndarray], tuple[float, float]]]


def _call(function: Callable[..., Any], implementation: Implementation) -> Callable[..., Any]:
    return jax.jit(lambda *args: function(*args, implementation=implementation))


def _relative(dtype: str) -> Callable[[np.ndarray, np.ndarray], tuple[float, float]]:
    def differ(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
        error = np.abs(got.astype(np.float64) - expected.astype(np.float64)).max()
        # A NaN compares as false, which is a failure.
        return float(error / np.abs(expected.astype(np.float64)).max()), TOLERANCE[dtype]

    return differ


def _rows(dry: bool) -> list[int]:
    return [1, 50, 37] if dry else [1, 4096, 777, 2049, 33]


def _attend(heads: Heads, dtype: str, dry: bool, queries: int) -> Problem:
    rng = np.random.default_rng(queries)
    lengths = np.asarray(_rows(dry), np.int32)
    table = tables(rng, len(lengths), int(lengths.max()))
    # Blocks past a row's end are named by its table here, so NaN in all slots that no row holds has to stay unread.
    slots = np.arange(table.shape[2] * BLOCK)
    k, v = (pages(i, heads, table.size, dtype) for i in (1, 2))
    k, v = (_poisoned(x, table[0], slots >= lengths[:, None]) for x in (k, v))
    own = lengths[:, None] - queries + np.arange(queries)
    q = jax.random.normal(jax.random.key(3), (len(lengths), queries, heads.heads, heads.dim), jnp.dtype(dtype))
    args = [q, k, v, jnp.asarray(table[0]), jnp.asarray(np.maximum(own, -1).astype(np.int32))]
    return pallas_kernels.attend, args, _relative(dtype)


def _poisoned(x: jax.Array, table: np.ndarray, free: np.ndarray) -> jax.Array:
    row, slot = np.nonzero(free)
    return jax.jit(lambda x, block, at: x.at[block, :, at].set(jnp.nan))(x, table[row, slot // BLOCK], slot % BLOCK)


def _score(heads: Heads, dtype: str, dry: bool) -> Problem:
    rng = np.random.default_rng(5)
    lengths = np.asarray(_rows(dry), np.int32)
    table = tables(rng, len(lengths), int(lengths.max()))
    keys = jax.random.split(jax.random.key(6))
    w = jax.random.normal(keys[0], (len(lengths), 1, heads.heads, heads.dim))
    c = jax.random.uniform(keys[1], (len(lengths), heads.heads, heads.dim // 2))
    args = [pages(7, heads, table.size, dtype), jnp.asarray(table[0]), jnp.asarray(lengths), w, c]

    def score(*args: Any, implementation: Implementation) -> Any:
        scores = pallas_kernels.score(*args, implementation=implementation)
        return jnp.where(jnp.arange(scores.shape[-1]) < args[2][:, None, None, None], scores, 0)

    # Scores are float32 whatever the keys are.
    return score, args, _relative("float32")


def _compact(heads: Heads, dtype: str, dry: bool) -> Problem:
    rng = np.random.default_rng(8)
    lengths, budget = np.asarray([48, 40] if dry else [3200, 3200, 3100], np.int32), 32 if dry else 3072
    table = tables(rng, len(lengths), int(lengths.max()))[0]
    slots = table.shape[1] * BLOCK
    keep = np.full((len(lengths), heads.kv_heads, slots), slots, np.int32)
    for row, head in np.ndindex(*keep.shape[:2]):
        keep[row, head, :budget] = np.sort(rng.choice(lengths[row], budget, replace=False))
    target = np.where(np.arange(table.shape[1]) < ceil_div(budget, BLOCK), table, -1).astype(np.int32)
    count = np.full(len(lengths), budget, np.int32)
    args = [pages(9, heads, table.size, dtype), *(jnp.asarray(x) for x in (keep, count, table, target))]

    def compact(*args: Any, implementation: Implementation) -> Any:
        moved = pallas_kernels.compact(*args, implementation=implementation)
        # The bits of the slots that are kept, and of the blocks that nothing was written to.
        own = args[3][:, : ceil_div(budget, BLOCK)]
        kept = moved[own].swapaxes(2, 3).reshape(own.shape[0], -1, *moved.shape[1::2])[:, :budget]
        rest = moved[args[3][:, ceil_div(budget, BLOCK) :]].reshape(own.shape[0], -1, *moved.shape[1::2])
        bits = {2: jnp.uint16, 4: jnp.uint32}[moved.dtype.itemsize]
        return jax.lax.bitcast_convert_type(jnp.concatenate([kept, rest], axis=1), bits)

    return compact, args, lambda got, expected: (float(np.sum(got != expected)), 0.0)


def _matmul(dtype: str, dry: bool, bits: int) -> Problem:
    rng = np.random.default_rng(bits)
    rows, outputs, inputs = (3, 128, 256) if dry else (8, 4096, 4096)
    groups = inputs // 128
    x = jax.random.normal(jax.random.key(10), (rows, inputs), jnp.dtype(dtype))
    scale = jnp.asarray(rng.uniform(0.01, 0.1, (groups, outputs)), jnp.float16)
    if bits == 8:
        q = jnp.asarray(rng.integers(-128, 128, (outputs, inputs), np.int8))
        return pallas_kernels.int8_matmul, [x, q, scale], _relative(dtype)
    packed = jnp.asarray(rng.integers(0, 256, (outputs, inputs // 2), np.uint8))
    offset = jnp.asarray(rng.integers(0, 17, scale.shape), jnp.uint8)
    return pallas_kernels.int4_matmul, [x, packed, scale, offset], _relative(dtype)


_PROBLEMS: dict[str, Callable[[Heads, str, bool], Problem]] = {
    "attend_decode": lambda heads, dtype, dry: _attend(heads, dtype, dry, 1),
    "attend_chunk": lambda heads, dtype, dry: _attend(heads, dtype, dry, 8 if dry else 128),
    "score": _score,
    "compact": _compact,
    "int4_matmul": lambda heads, dtype, dry: _matmul(dtype, dry, 4),
    "int8_matmul": lambda heads, dtype, dry: _matmul(dtype, dry, 8),
}
