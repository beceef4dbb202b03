"""TriAttention in plain float64: the cosine formula with positions, selection by sorting tuples, attention by softmax.

Nothing here knows of blocks, tables, virtual queries or phase tables.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


def golden(name):
    """Return an archive of golden data; skip where this checkout has none. JAXKV_GOLDEN names another folder."""
    path = Path(os.environ.get("JAXKV_GOLDEN", GOLDEN)) / name
    if not path.exists():
        pytest.skip(f"no golden data at {path.name}")
    return np.load(path)


def split(x):
    """Return a D-vector's F complex numbers, half-split."""
    x = np.asarray(x, np.float64)
    bands = x.shape[-1] // 2
    return x[..., :bands] + 1j * x[..., bands:]


def join(z):
    return np.concatenate([z.real, z.imag], axis=-1)


def roped(k, positions, omega, scaling=1.0):
    """Return k [.., T, D] at positions [T] after RoPE."""
    return join(scaling * split(k) * np.exp(1j * np.outer(positions, omega)))


def cosine_scores(k, positions, mu, nu, omega, scaling, t, offsets, aggregation):
    """Return scores [H, T] of keys before RoPE k [K, T, D], by the formula, one cosine a token, band and offset.

    mu is complex [H, F], nu [H, F].
    """
    heads, groups = mu.shape[0], mu.shape[0] // k.shape[0]
    out = np.zeros((heads, k.shape[1]))
    for h in range(heads):
        z = split(k[h // groups])
        trig = []
        for d in offsets:
            phase = omega * (t + d - positions[:, None]) + np.angle(mu[h]) - np.angle(z)
            trig.append((scaling**2 * np.abs(mu[h]) * np.abs(z) * np.cos(phase)).sum(-1))
        pooled = np.mean(trig, axis=0) if aggregation == "mean" else np.max(trig, axis=0)
        out[h] = pooled + (scaling**2 * np.maximum(nu[h] - np.abs(mu[h]), 0) * np.abs(z)).sum(-1)
    return out


def z_scores(scores, length, oldest):
    """Return z-scores of scores [.., S] over slots oldest to length, NaN for a slot that has none."""
    out = np.full(scores.shape, np.nan)
    for index in np.ndindex(scores.shape[:-1]):
        row = scores[index][:length].astype(np.float64)
        counted = row[oldest:][np.isfinite(row[oldest:])]
        mean, sigma = (counted.mean(), counted.std()) if counted.size else (0.0, 0.0)
        out[index][:length] = (row - mean) / max(sigma, 1e-6)
    return out


def ranks(scores, length, oldest, mode):
    """Return what scores [L, K, G, S] rank slots by, [L, K, S]."""
    z = z_scores(scores, length, oldest)
    z = np.where(np.isnan(z), -np.inf, z).max(axis=2)
    if mode == "per_head":
        return np.broadcast_to(z.mean(axis=0, keepdims=True), z.shape)
    if mode == "union":
        return np.broadcast_to(z.max(axis=(0, 1), keepdims=True), z.shape)
    if mode == "shared":
        return np.broadcast_to(z.mean(axis=(0, 1), keepdims=True), z.shape)
    return z


def pick(rank, length, b_row, window, oldest):
    """Return the slots kept of rank [S]: the pinned ones first, then the best, the lowest of equals."""
    pinned = [j < oldest or j >= length - window for j in range(length)]
    order = sorted(range(length), key=lambda j: (not pinned[j], -rank[j], j))
    return sorted(order[: min(length, b_row)])


def attention(q, k, v):
    """Return softmax attention [H, D] of q [H, D] over k, v [K, T, D]."""
    groups = q.shape[0] // k.shape[0]
    out = np.zeros(q.shape)
    for h in range(q.shape[0]):
        logits = k[h // groups].astype(np.float64) @ q[h].astype(np.float64) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max())
        out[h] = weights @ v[h // groups].astype(np.float64) / weights.sum()
    return out


def paged(values, table, blocks, block_size, fill=np.nan):
    """Return pages [N, K, P, ..] that hold values [K, T, ..] in the blocks of one row's table."""
    heads, tokens = values.shape[:2]
    pages = np.full((blocks, heads, block_size, *values.shape[2:]), fill, values.dtype)
    for t in range(tokens):
        pages[table[t // block_size], :, t % block_size] = values[:, t]
    return pages


def unpaged(pages, table, length):
    """Return the [K, length, ..] that one row's table holds."""
    block = pages.shape[2]
    return np.stack([pages[table[t // block], :, t % block] for t in range(length)], axis=1)
