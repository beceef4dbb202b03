"""How large a pool may be on this machine. Bytes in, blocks out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import psutil

import pallas_kernels
from jaxkv import decode
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.model import Weights
from jaxkv.pool import KVPool, block_bytes
from jaxkv.request import Request, RequestError
from jaxkv.terms import Terms

HOST_SHARE = 0.5
"""Share of the free host memory that a pool takes at most."""
DEVICE_SHARE = 0.85
"""Share of the free accelerator memory that a pool and the temporaries take at most."""
_PLENTY = 2**31
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Return bytes from ``512M``, ``1.5GiB``, ``2g`` or a plain number; units are powers of 1024.

    Raises:
      ValueError: the text is none of these.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"{text!r} is not a memory size; write 512M, 1.5G or a number of bytes")
    return size


def choose_blocks(
    weights: Weights,
    terms: Terms,
    requests: Sequence[Request],
    *,
    present: int = 0,
    replaced: int = 0,
    implementation: pallas_kernels.Implementation | None = None,
) -> int:
    """Return the blocks of a pool that serves the largest requests, one a row, at once, as far as memory goes.

    Args:
      weights, replaced, implementation: as for ``most_blocks``.
      terms: model, compression and shapes to compile for; the number of blocks in there is not looked at.
      requests: what is to be served.
      present: blocks of a pool that is there and compiled for. It is kept where it will do.

    Raises:
      RequestError: free memory has no room for the largest request.
    """
    wanted, _ = _needed(terms, requests, _PLENTY)
    if present >= wanted:
        return present
    room = most_blocks(weights, terms.model, terms.cache, replaced=replaced, implementation=implementation)
    # In a small pool a long prompt is compacted between its chunks, and needs less.
    _, least = _needed(terms, requests, max(room, 1))
    # Free memory is never twice the same: when it is the limit, a little more is not worth a compile.
    if present >= least and room < min(wanted, 1.25 * present):
        return present
    if room < least:
        raise RequestError(
            f"the largest request needs {least} blocks of {terms.cache.block_size} and free memory has room for "
            f"{room}; lower max_tokens, or give the pool's size yourself"
        )
    return min(wanted, room)


def _needed(terms: Terms, requests: Sequence[Request], blocks: int) -> tuple[int, int]:
    """Return what the requests need together in a pool of so many blocks, rounded up, and the largest alone."""
    terms = dataclasses.replace(terms, cache=dataclasses.replace(terms.cache, blocks=blocks))
    needs = [max(1, terms.worst_case(one)) for one in requests for _ in range(one.params.n)]
    needs = sorted(needs, reverse=True)[: terms.cache.rows]
    return rounded_up(sum(needs)), needs[0]


def most_blocks(
    weights: Weights,
    model: ModelConfig,
    cache: CacheConfig,
    *,
    replaced: int = 0,
    implementation: pallas_kernels.Implementation | None = None,
) -> int:
    """Return how many blocks the free memory has room for, besides the null block; may be 0.

    Args:
      weights: the loaded weights, whose memory is already taken.
      model: the decoder.
      cache: the shapes to compile for; its ``blocks`` is not looked at.
      replaced: bytes of a pool that goes before the new one comes.
      implementation: as for ``pallas_kernels.attend``.
    """
    if jax.default_backend() == "cpu":
        free = (psutil.virtual_memory().available + replaced) * HOST_SHARE
    else:
        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(
                f"the {jax.default_backend()} device does not tell its memory; give pool_blocks or pool_memory"
            )
        free = (stats["bytes_limit"] - stats["bytes_in_use"] + replaced) * DEVICE_SHARE
        free -= temporaries(weights, model, cache, implementation)
    return max(0, int(free // block_bytes(model, cache.block_size, cache.dtype)) - 1)


def temporaries(
    weights: Weights,
    model: ModelConfig,
    cache: CacheConfig,
    implementation: pallas_kernels.Implementation | None = None,
) -> int:
    """Return the bytes that the larger of the two steps takes beside weights and pool, as the compiler plans them."""
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    pool = KVPool.shapes(model, cache)
    chunk, rows = shapes(decode.Chunk.idle(cache)), shapes(decode.Rows.idle(cache))
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    options: dict[str, Any] = {"config": model, "implementation": implementation}
    lowered: list[Any] = [
        decode.prefill_chunk.lower(shapes(weights), pool, chunk, **options),
        decode.decode_round.lower(shapes(weights), pool, rows, steps, max_steps=cache.round_steps, **options),
    ]
    return max(step.compile().memory_analysis().temp_size_in_bytes for step in lowered)


def rounded_up(blocks: int) -> int:
    """Round up to a number with three leading bits, so that requests of like size share one compiled program."""
    unit = 1 << max(0, blocks.bit_length() - 3)
    return -(-blocks // unit) * unit
