"""A decoder of the Llama family in float64 NumPy, one row and one head at a time."""

from __future__ import annotations

import numpy as np


def logits(weights, config, tokens):
    """Return [T, V] for one row of token ids, positions 0 .. T - 1, with the default RoPE and no biases."""
    wide = {name: value for name, value in vars(weights).items() if name != "layers"}
    x = np.asarray(wide["embedding"], np.float64)[tokens]
    for layer in weights.layers:
        x = x + _attention(layer, config, _norm(x, layer.attention_norm, config.norm_eps))
        h = _norm(x, layer.mlp_norm, config.norm_eps)
        gate, up = h @ _t(layer.gate), h @ _t(layer.up)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _t(layer.down)
    head = wide["embedding"] if wide["head"] is None else wide["head"]
    return _norm(x, wide["final_norm"], config.norm_eps) @ _t(head)


def _attention(layer, config, x):
    q, k, v = (x @ _t(matrix) for matrix in (layer.q, layer.k, layer.v))
    dim, out = config.head_dim, np.zeros_like(q)
    for head in range(config.heads):
        own = slice(head * dim, (head + 1) * dim)
        shared = slice(head // config.groups * dim, (head // config.groups + 1) * dim)
        scores = _rope(q[:, own], config.rope.theta) @ _rope(k[:, shared], config.rope.theta).T / np.sqrt(dim)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weight = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, own] = weight / weight.sum(axis=1, keepdims=True) @ v[:, shared]
    return out @ _t(layer.o)


def _rope(x, theta):
    half = x.shape[1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=1)


def _norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def _t(matrix):
    return np.asarray(matrix, np.float64).T
