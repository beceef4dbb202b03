"""Paged attention in the plainest float64 NumPy, and pages to try it on."""

from __future__ import annotations

import numpy as np


def paged_attention(
    q,
    k_pages,
    v_pages,
    table,
    query_slots,
    scale=None,
    window=None,
    softcap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    """Return outputs [B, T, H, D] and log-sum-exps [B, T, H] by loops over rows, queries and heads."""
    rows, queries, heads, dim = q.shape
    block, groups = k_pages.shape[2], heads // k_pages.shape[1]
    out = np.zeros(q.shape)
    lse = np.full((rows, queries, heads), -np.inf)
    for b, t, h in np.ndindex(rows, queries, heads):
        own = int(query_slots[b, t])
        if own < 0:
            continue
        first = 0 if window is None else max(0, own - window + 1)
        slots = np.arange(first, own + 1)
        where = (table[b, slots // block], h // groups, slots % block)
        k, v = k_pages[where].astype(np.float64), v_pages[where].astype(np.float64)
        logits = k @ q[b, t, h].astype(np.float64) * (dim**-0.5 if scale is None else scale)
        if k_scale is not None:
            logits = logits * k_scale[where]
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        if v_scale is not None:
            v = v * v_scale[where][:, None]
        extra = [] if sinks is None else [float(sinks[h])]
        top = max([*logits, *extra])
        weights, total = np.exp(logits - top), np.exp(np.array([*logits, *extra]) - top).sum()
        out[b, t, h] = weights @ v / total
        lse[b, t, h] = top + np.log(total)
    return out, lse


def shuffled_pages(rng, lengths, kv_heads, block, dim, dtype=np.float32, width=None, blocks=None):
    """Return k and v pages and a table: rows of ``lengths`` slots in shuffled blocks, NaN in every other slot of the
    pool.
    """
    lengths = np.asarray(lengths)
    counts = -(-lengths // block)
    total = int(counts.sum())
    blocks = blocks or total + 4
    ids = rng.permutation(np.arange(1, blocks))[:total]
    table = np.zeros((len(lengths), max(width or 0, int(counts.max()))), np.int32)
    pages = [np.full((blocks, kv_heads, block, dim), np.nan, np.float32) for _ in range(2)]
    start = 0
    for b, count in enumerate(counts):
        table[b, :count] = ids[start : start + count]
        start += count
        for slot in range(lengths[b]):
            for page in pages:
                page[table[b, slot // block], :, slot % block] = rng.standard_normal((kv_heads, dim))
    return pages[0].astype(dtype), pages[1].astype(dtype), table
