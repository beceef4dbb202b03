"""A tiny seeded decoder, and an engine run over it, for tests of everything above the model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import monitor
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.engine import Engine
from jaxkv.model import init_weights

MODEL = ModelConfig("llama", 97, 48, 64, 2, 6, 2, 8, context=256, tied_head=True, name="tiny")
CACHE = CacheConfig(blocks=200, context=256, rows=8, prefill_chunk=16, block_size=4, round_steps=8)


@functools.cache
def weights(dtype="float32", model=MODEL):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), init_weights(model, seed=3))


def engine(cache=CACHE, poison=False, model=MODEL, **options):
    """Return a warm engine whose pool is NaN throughout if ``poison``."""
    made = Engine(weights(model=model), model, cache, **{"eos_token_ids": (5,), **options})
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


def run(made, requests, after_step=lambda made: None):
    """As ``drain``, for requests with n > 1 too: return ``{(request, choice): tokens}``, and the reports likewise."""
    ids = {made.add(request): at for at, request in enumerate(requests)}
    tokens, reports = {}, {}
    while made.has_work:
        for event in made.step():
            name = ids[event.request_id], event.choice
            tokens[name] = [*tokens.get(name, []), *event.token_ids]
            if event.report is not None:
                reports[name] = event.report
        after_step(made)
    return tokens, reports


def poison_what_nobody_may_read(made):
    """Put NaN into free blocks and into every slot at or past a row's length, and check who holds what."""
    names = np.asarray(["free", *made.blocks.states()])
    mask = np.broadcast_to((names == "free")[:, None], (len(names), made.cache.block_size)).copy()
    holders = [0] * len(names)
    for row in made.rows:
        for at, block in enumerate(row.blocks):
            holders[block] += 1
            if made.blocks.holders(block) == 1:
                mask[block] = np.arange(at * mask.shape[1], (at + 1) * mask.shape[1]) >= row.length
    for kept in made.memory.kept.values():
        for block in kept.blocks:
            holders[block] += 1
    if made.documents is not None:
        for job in made.documents._jobs.values():
            for block in job.blocks:
                holders[block] += 1
    assert holders[1:] == [made.blocks.holders(block) for block in range(1, len(names))]
    pages = jnp.asarray(mask)[:, None, :, None]
    made.device.pool = jax.tree.map(lambda page: jnp.where(pages, jnp.nan, page), made.device.pool)


def counted(function):
    """Return what a function returns, and how many programs were compiled meanwhile."""
    with monitor.compiles() as compiled:
        result = function()
    return result, compiled.programs
