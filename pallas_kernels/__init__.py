"""Kernels over a paged KV pool. One entry an op; ``implementation=None`` picks by platform.

Pages are ``[N, K, P, D]``: N blocks of P slots for K KV heads of dimension D, heads before slots, block 0 the null
block. Nothing in here knows about models or engines, and nothing imports jaxkv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import reference

Implementation = Literal["xla", "triton", "mosaic_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

__all__ = ["IMPLEMENTATIONS", "Implementation", "attend", "candidates"]

_ATTEND: dict[str, Callable[..., Any]] = {"xla": reference.attend}


def candidates(implementation: Implementation | None = None) -> tuple[Implementation, ...]:
    """Return the implementations to try, best first: the named one alone, or those of the default platform.

    Raises:
      ValueError: the name is unknown.
    """
    if implementation is None:
        return ("xla",)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; one of {', '.join(IMPLEMENTATIONS)} is")
    return (implementation,)


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
      k_pages, v_pages: the pool of one layer. Slots that no query may see can hold anything, NaN included.
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
        _ATTEND,
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


def _dispatch(
    op: str, table: dict[str, Callable[..., Any]], implementation: Implementation | None, args: Any, options: Any
) -> Any:
    reasons = []
    for name in candidates(implementation):
        if name not in table:
            reasons.append(f"{name}: not part of this release")
            continue
        try:
            with jax.named_scope(f"{op}_{name}"):
                return table[name](*args, **options)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"{op} has no implementation for this call: " + "; ".join(reasons))


def _check(q: Any, k_pages: Any, v_pages: Any, block_table: Any, query_slots: Any) -> None:
    if q.ndim != 4 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape or q.shape[-1] != k_pages.shape[-1]:
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
