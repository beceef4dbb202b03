"""A tiny seeded decoder, and an engine run over it, for tests of everything above the model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxkv import monitor
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.engine import Engine
from jaxkv.model import init_weights

MODEL = ModelConfig("llama", 97, 48, 64, 2, 6, 2, 8, context=256, tied_head=True, name="tiny")
CACHE = CacheConfig(blocks=200, context=256, rows=8, prefill_chunk=16, block_size=4, round_steps=8)


@functools.cache
def weights(dtype="float32"):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), init_weights(MODEL, seed=3))


def engine(cache=CACHE, poison=False, **options):
    """Return a warm engine whose pool is NaN throughout if ``poison``."""
    made = Engine(weights(), MODEL, cache, **{"eos_token_ids": (5,), **options})
    made.warmup()
    if poison:
        made.device.pool = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), made.device.pool)
    return made


def drain(made, requests):
    """Add requests, run them to their ends, and return their tokens and reports in order."""
    ids = [made.add(request) for request in requests]
    tokens, reports = {i: [] for i in ids}, {}
    while made.has_work:
        for event in made.step():
            tokens[event.request_id] += event.token_ids
            if event.report is not None:
                reports[event.request_id] = event.report
    return [tokens[i] for i in ids], [reports[i] for i in ids]


def counted(function):
    """Return what a function returns, and how many programs were compiled meanwhile."""
    with monitor.compiles() as compiled:
        result = function()
    return result, compiled.programs
