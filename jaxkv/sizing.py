"""How large a pool may be on this machine. Bytes in, blocks out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from jaxkv import decode
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.model import Weights
from jaxkv.pool import KVPool, block_bytes

HOST_SHARE = 0.5
"""Share of the free host memory that a pool takes at most."""
DEVICE_SHARE = 0.85
"""Share of the free accelerator memory that a pool and the temporaries take at most."""
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


def most_blocks(weights: Weights, model: ModelConfig, cache: CacheConfig) -> int:
    """Return how many blocks the free memory has room for, besides the null block; may be 0.

    Args:
      weights: the loaded weights, whose memory is already taken.
      model: the decoder.
      cache: the shapes to compile for; its ``blocks`` is not looked at.
    """
    if jax.default_backend() == "cpu":
        free = psutil.virtual_memory().available * HOST_SHARE
    else:
        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ValueError(
                f"the {jax.default_backend()} device does not tell its memory; give pool_blocks or pool_memory"
            )
        free = (stats["bytes_limit"] - stats["bytes_in_use"]) * DEVICE_SHARE - temporaries(weights, model, cache)
    return max(0, int(free // block_bytes(model, cache.block_size, cache.dtype)) - 1)


def temporaries(weights: Weights, model: ModelConfig, cache: CacheConfig) -> int:
    """Return the bytes that the larger of the two steps takes beside weights and pool, as the compiler plans them."""
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    pool = KVPool.shapes(model, cache)
    chunk, rows = shapes(decode.Chunk.idle(cache)), shapes(decode.Rows.idle(cache))
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    lowered: list[Any] = [
        decode.prefill_sample.lower(shapes(weights), pool, chunk, config=model),
        decode.decode_round.lower(shapes(weights), pool, rows, steps, config=model, max_steps=cache.round_steps),
    ]
    return max(step.compile().memory_analysis().temp_size_in_bytes for step in lowered)


def rounded_up(blocks: int) -> int:
    """Round up to a number with three leading bits, so that requests of like size share one compiled program."""
    unit = 1 << max(0, blocks.bit_length() - 3)
    return -(-blocks // unit) * unit
