"""The pool: immutable paged arrays of keys and values, donated to every step that changes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import Array, Float, Int, ceil_div
from pallas_kernels import device

_LANES = 128
"""Columns of a tile of a TPU's memory."""


@struct.dataclass
class KVPool:
    """Keys after RoPE and values, a page array a layer: ``[N, K, P, D]``, heads before slots.

    Block 0 is the null block: padding is written there, and nothing reads it unmasked. Pages are ``page_dim`` wide,
    which on a TPU can be more than D; slots that are held have zeros past D.
    """

    k: tuple[Float[Array, "N K P D"], ...]
    v: tuple[Float[Array, "N K P D"], ...]

    @classmethod
    def shapes(cls, model: ModelConfig, cache: CacheConfig) -> KVPool:
        """Return the pool as ``jax.ShapeDtypeStruct``, for the device that ``pallas_kernels.device.current`` names."""
        width = page_dim(model.head_dim, device.current().platform)
        shape = (cache.blocks + 1, model.kv_heads, cache.block_size, width)
        layer: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(cache.dtype))
        return cls(k=(layer,) * model.layers, v=(layer,) * model.layers)

    @classmethod
    def create(cls, model: ModelConfig, cache: CacheConfig) -> KVPool:
        """Return a pool of zeros on the default device."""
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), cls.shapes(model, cache))

    @property
    def block_size(self) -> int:
        """P: token slots in a block."""
        return self.k[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, the null block included."""
        return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self))

    def write(
        self,
        layer: int,
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        block: Int[Array, "B T"],
        slot: Int[Array, "B T"],
    ) -> KVPool:
        """Return the pool with one layer's new keys and values at (block, slot in the block), and zeros past D.

        Pages are written as flat rows: in a ``while_loop`` a TPU copies the pool for the obvious
        ``k.at[block, :, slot].set`` and not for this. Ids out of range are dropped.
        """
        heads = jnp.arange(self.k[layer].shape[1])
        index = (block[..., None] * heads.size + heads) * self.block_size + slot[..., None]

        def put(pages: Array, new: Array) -> Array:
            flat = pages.reshape(-1, pages.shape[-1])
            new = jnp.pad(new, [(0, 0)] * (new.ndim - 1) + [(0, flat.shape[-1] - new.shape[-1])])
            return flat.at[index].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)

        return self.replace(  # type: ignore[attr-defined]
            k=_replaced(self.k, layer, put(self.k[layer], k)),
            v=_replaced(self.v, layer, put(self.v[layer], v)),
        )


def page_dim(head_dim: int, platform: str) -> int:
    """Return how wide the pages of heads of D are: D, and on a TPU the next multiple of 128.

    XLA lays narrower ones out in another order there, and copies the pool for every call of a kernel. D = 64 takes
    twice the bytes of its keys and values that way, 80 takes 1.6 times and 96 1.33.
    """
    return ceil_div(head_dim, _LANES) * _LANES if platform == "tpu" else head_dim


def block_bytes(model: ModelConfig, block_size: int, dtype: Any) -> int:
    """Bytes that one block takes over all layers on the current device, keys, values and padding together."""
    width = page_dim(model.head_dim, device.current().platform)
    return 2 * model.layers * model.kv_heads * block_size * width * jnp.dtype(dtype).itemsize


def _replaced(arrays: Iterable[Array], index: int, new: Array) -> tuple[Array, ...]:
    return tuple(new if i == index else array for i, array in enumerate(arrays))
