"""Kernels over a paged KV pool. One entry an op; ``implementation=None`` picks by platform.

Pages are ``[N, K, P, D]``: N blocks of P slots for K KV heads of dimension D, heads before slots, block 0 the null
block. They may be wider than the heads, as a TPU wants them: then slots that are held have zeros from D on.
Nothing in here knows about models or engines, and nothing imports jaxkv.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, Shaped, UInt8

from pallas_kernels import compact_reference, device, int4_reference, int8_reference, reference, score_reference

Implementation = Literal["xla", "triton", "mosaic_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

Pages = TypeVar("Pages")

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "attend",
    "candidates",
    "compact",
    "int4_matmul",
    "int8_matmul",
    "score",
]

_XLA: dict[str, Callable[..., Any]] = {
    "attend": reference.attend,
    "compact": compact_reference.compact,
    "int4_matmul": int4_reference.int4_matmul,
    "int8_matmul": int8_reference.int8_matmul,
    "score": score_reference.score,
}


def candidates(implementation: Implementation | None = None) -> tuple[Implementation, ...]:
    """Return the implementations to try, best first: the named one alone, or those for the chip that are installed.

    Raises:
      ValueError: the name is unknown.
    """
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation={implementation!r} is unknown; one of {', '.join(IMPLEMENTATIONS)} is")
        return (implementation,)
    chip = device.current()
    wanted: list[Implementation] = ["xla"]
    if chip.platform == "tpu":
        wanted.insert(0, "mosaic_tpu")
    if chip.platform == "gpu" and chip.capability >= (8, 0):
        wanted.insert(0, "triton")
    if chip.platform == "gpu" and chip.capability >= (9, 0):
        wanted.insert(0, "mosaic_gpu")
    return tuple(name for name in wanted if _installed(name))


def attend(
    q: Float[Array, "B T H D"],
    k_pages: Float[Array, "N K P D"],
    v_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    query_slots: Int[Array, "B T"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: Float[Array, "H"] | None = None,
    k_scale: Float[Array, "N K P"] | None = None,
    v_scale: Float[Array, "N K P"] | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Paged grouped-query attention: each query sees the slots of its row up to its own.

    Slots, never RoPE positions, decide what is seen: query t of row b attends to slots
    ``max(0, s - window + 1) .. s`` where ``s = query_slots[b, t]``. Decoding is T = 1 with ``s = length - 1``.

    Args:
      q: queries after RoPE. Head h reads KV head ``h // (H // K)``.
      k_pages, v_pages: the pool of one layer, as wide as q or wider. Slots that no query may see can hold anything,
        NaN included.
      block_table: slot s of row b is in block ``block_table[b, s // P]``. Entries past a row's end are not read
        unmasked; 0 is the custom.
      query_slots: the slot of every query; -1 is padding, and its output is zero.
      scale: factor of the logits; None is ``D ** -0.5``.
      window: how many slots a query sees, its own included; None is all.
      softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
      sink_logits: one more logit a head in the denominator, with no value (GPT-OSS).
      k_scale, v_scale: scales of quantised pages, one a slot and KV head.
      return_lse: also return the log-sum-exp of each query's logits, float32 ``[B, T, H]``; -inf for padding.
      implementation: None picks; a name insists.

    Returns:
      ``[B, T, H, D]`` in q's dtype, and the log-sum-exp if asked for.

    Raises:
      ValueError: shapes do not fit, or the implementation's name is unknown.
      NotImplementedError: no implementation can serve this call; the message carries each one's reason.
    """
    _check(q, k_pages, v_pages, block_table, query_slots)
    return _dispatch(
        "attend",
        implementation,
        (q, k_pages, v_pages, block_table, query_slots),
        {
            "scale": q.shape[-1] ** -0.5 if scale is None else scale,
            "window": window,
            "softcap": softcap,
            "sink_logits": sink_logits,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "return_lse": return_lse,
        },
    )


def score(
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    w: Float[Array, "B O H D"],
    c: Float[Array, "B H F"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B K G S"]:
    """Score every cached key of a row for every query head, in float32: one pass over the keys.

    ``S = max over o of k . w[o] + |k| . c`` with ``|k|_f = hypot(k[f], k[f + F])``: TriAttention (arXiv 2604.04921),
    with the mean over future offsets folded into one w (O = 1), or their maximum (O of them).

    Args:
      k_pages: keys after RoPE of one layer, as wide as w or wider.
      block_table: slot s of row b is in block ``block_table[b, s // P]``.
      length: slots that each row holds. 0 leaves a row out.
      w, c: the virtual queries. Head h reads KV head ``h // G``.
      implementation: None picks; a name insists.

    Returns:
      One score a slot, S = M * P. At and past ``length`` it is unspecified and may be NaN.

    Raises:
      ValueError: shapes do not fit, or the implementation's name is unknown.
      NotImplementedError: no implementation can serve this call; the message carries each one's reason.
    """
    rows, _, heads, dim = w.shape
    if dim > k_pages.shape[3] or heads % k_pages.shape[1] or c.shape != (rows, heads, dim // 2):
        raise ValueError(
            f"score wants pages [N, K, P, D], w [B, O, H, D] and c [B, H, F], "
            f"and got {k_pages.shape}, {w.shape} and {c.shape}"
        )
    if len(block_table) != rows or length.shape != (rows,):
        raise ValueError(
            f"score wants block_table [{rows}, M] and length [{rows}], and got {block_table.shape} and {length.shape}"
        )
    return _dispatch("score", implementation, (k_pages, block_table, length, w, c), {})


def compact(
    pages: Pages,
    keep: Int[Array, "B X S"],
    count: Int[Array, "B"],
    source: Int[Array, "B M"],
    target: Int[Array, "B M"],
    *,
    implementation: Implementation | None = None,
) -> Pages:
    """Give slot j of every row and KV head what its slot ``keep[j]`` holds, bit for bit. Donate the pages.

    Args:
      pages: any pytree of arrays ``[N, K, P, ...]``, or ``[N, P, ...]`` where a slot is one for all heads. An array
        that could be either is taken for the first.
      keep: for each row and KV head the slots to keep, ascending, so ``keep[j] >= j``; X is K, or 1 where all heads
        keep the same. Entries from ``count`` on are not used. S is M * P.
      count: slots that a row keeps; 0 leaves the row as it is.
      source: the row's block table.
      target: the block that slots ``m * P ..`` go to: the source's own, or a fresh one where the source is shared;
        -1 where nothing is to be written. No block may be another row's source and this one's target.
      implementation: None picks; a name insists.

    Returns:
      The pages. Slots of a written block from ``count`` on hold anything.

    Raises:
      ValueError: shapes do not fit, or heads keep different slots of an array without heads.
      NotImplementedError: no implementation can serve this call; the message carries each one's reason.
    """
    rows, width = source.shape
    if target.shape != source.shape or count.shape != (rows,) or keep.shape[0] != rows or keep.shape[2] % width:
        raise ValueError(
            f"compact wants keep [B, X, M * P], count [B] and tables [B, M], "
            f"and got {keep.shape}, {count.shape}, {source.shape} and {target.shape}"
        )
    return _dispatch("compact", implementation, (pages, keep, count, source, target), {})


def int4_matmul(
    x: Float[Array, "R X"],
    packed: UInt8[Array, "O X//2"],
    scale: Shaped[Array, "S O"],
    offset: Shaped[Array, "S O"],
    *,
    units: Float[Array, "2 U O"] | None = None,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, "R O"]:
    """Multiply rows by a matrix ``[O, X]`` of 4-bit weights: ``x @ w.T``, accumulated in float32.

    The inputs lie in S groups of X // S: 32, 64 or 128. A weight is ``scale * q - minimum`` with q from 0 to 15.

    Args:
      x: bfloat16, float16 or float32.
      packed: byte j of a group holds input j in its low half and input ``j + X // S // 2`` in its high half.
      scale: of each group and output.
      offset: integers are zero points, ``minimum = scale * offset``; floats are the minimums themselves.
      units: where scale and offset are small integers, what they count: the scale is ``units[0] * scale``, the minimum
        ``units[1] * offset``, and S // U groups share a unit.
      dtype: of the result; None is x's.
      implementation: None picks; a name insists.

    Raises:
      ValueError: shapes do not fit, or the implementation's name is unknown.
      NotImplementedError: no implementation can serve this call; the message carries each one's reason.
    """
    groups, outputs = scale.shape
    if x.ndim != 2 or packed.shape != (outputs, x.shape[1] // 2) or offset.shape != scale.shape:
        raise ValueError(
            f"int4_matmul wants x [R, X], packed [O, X // 2], scale and offset [S, O], "
            f"and got {x.shape}, {packed.shape}, {scale.shape} and {offset.shape}"
        )
    if x.shape[1] not in (32 * groups, 64 * groups, 128 * groups):
        raise ValueError(f"{groups} groups of {x.shape[1]} inputs; groups have 32, 64 or 128 inputs")
    if units is not None and (units.ndim != 3 or units.shape[::2] != (2, outputs) or groups % units.shape[1]):
        raise ValueError(f"units is [2, U, {outputs}], U a divisor of {groups} groups, and got {units.shape}")
    options = {"units": units, "dtype": jnp.dtype(dtype or x.dtype)}
    return _dispatch("int4_matmul", implementation, (x, packed, scale, offset), options)


def int8_matmul(
    x: Float[Array, "R X"],
    q: Int8[Array, "O X"],
    scale: Shaped[Array, "S O"],
    *,
    units: Float[Array, "U O"] | None = None,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, "R O"]:
    """Multiply rows by a matrix ``[O, X]`` of 8-bit weights ``scale * q``: ``x @ w.T``, accumulated in float32.

    Args:
      x: bfloat16, float16 or float32.
      q: integers from -128 to 127.
      scale: of each group of X // S inputs and output; S = 1 is a scale a row.
      units: where scales are small integers, what they count, for S // U groups each.
      dtype: of the result; None is x's.
      implementation: None picks; a name insists.

    Raises:
      ValueError: shapes do not fit, or the implementation's name is unknown.
      NotImplementedError: no implementation can serve this call; the message carries each one's reason.
    """
    groups, outputs = scale.shape
    if x.ndim != 2 or q.shape != (outputs, x.shape[1]) or x.shape[1] % groups:
        raise ValueError(
            f"int8_matmul wants x [R, X], q [O, X] and scale [S, O], S a divisor of X, "
            f"and got {x.shape}, {q.shape} and {scale.shape}"
        )
    if units is not None and (units.ndim != 2 or units.shape[1] != outputs or groups % units.shape[0]):
        raise ValueError(f"units is [U, {outputs}], U a divisor of {groups} groups, and got {units.shape}")
    options = {"units": units, "dtype": jnp.dtype(dtype or x.dtype)}
    return _dispatch("int8_matmul", implementation, (x, q, scale), options)


def _installed(name: str) -> bool:
    return name == "xla" or importlib.util.find_spec(f"pallas_kernels.{name}") is not None


def _function(op: str, name: str) -> Callable[..., Any]:
    if name == "xla":
        return _XLA[op]
    if not _installed(name):
        raise NotImplementedError("not installed")
    try:
        # Loaded at first use: a folder may ask for more of JAX than this one has.
        module = importlib.import_module(f"pallas_kernels.{name}")
    except ImportError as error:
        raise NotImplementedError(f"cannot be imported with JAX {jax.__version__} ({error})") from error
    if not hasattr(module, op):
        raise NotImplementedError(f"has no {op}")
    return getattr(module, op)


def _dispatch(op: str, implementation: Implementation | None, args: Any, options: dict[str, Any]) -> Any:
    reasons = []
    for name in candidates(implementation):
        try:
            function = _function(op, name)
            with jax.named_scope(f"{op}_{name}"):
                return function(*args, **options)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"{op} has no implementation for this call: " + "; ".join(reasons))


def _check(q: Any, k_pages: Any, v_pages: Any, block_table: Any, query_slots: Any) -> None:
    if q.ndim != 4 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape or q.shape[-1] > k_pages.shape[-1]:
        raise ValueError(
            f"attend wants q [B, T, H, D] and pages [N, K, P, D], and got {q.shape}, {k_pages.shape}, {v_pages.shape}"
        )
    if q.shape[2] % k_pages.shape[1]:
        raise ValueError(f"heads={q.shape[2]} is not a multiple of kv_heads={k_pages.shape[1]}")
    if block_table.ndim != 2 or block_table.shape[0] != q.shape[0] or query_slots.shape != q.shape[:2]:
        raise ValueError(
            f"attend wants block_table [B, M] and query_slots [B, T] for q {q.shape}, "
            f"and got {block_table.shape} and {query_slots.shape}"
        )
    if not jnp.issubdtype(block_table.dtype, jnp.integer) or not jnp.issubdtype(query_slots.dtype, jnp.integer):
        raise ValueError("block_table and query_slots must be integers")
