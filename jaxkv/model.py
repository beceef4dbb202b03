"""The decoder: weights as pytrees, and one pure forward pass for every architecture of the Llama family.

What differs between architectures is data in ``ModelConfig`` (a bias here, a norm there): ``forward`` asks
whether an array is there, never which model it belongs to. Attention is a callback, so that prefill, decoding,
calibration and document reuse share this file and each decides what becomes of the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxkv import rope
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float, Int
from jaxkv.quant import Matrix, linear

State = TypeVar("State")


@struct.dataclass
class Layer:
    """Weights of one decoder layer. Matrices are ``[out, in]``, as checkpoints keep them, plain, packed or lying the
    other way (see ``jaxkv.quant``); None is absent.
    """

    attention_norm: Float[Array, "E"]
    q: Matrix  # [H*D, E]
    k: Matrix  # [K*D, E]
    v: Matrix  # [K*D, E]
    o: Matrix  # [E, H*D]
    mlp_norm: Float[Array, "E"]
    gate: Matrix  # [I, E]
    up: Matrix  # [I, E]
    down: Matrix  # [E, I]
    q_bias: Float[Array, "H*D"] | None = None
    k_bias: Float[Array, "K*D"] | None = None
    v_bias: Float[Array, "K*D"] | None = None
    o_bias: Float[Array, "E"] | None = None
    gate_bias: Float[Array, "I"] | None = None
    up_bias: Float[Array, "I"] | None = None
    down_bias: Float[Array, "E"] | None = None
    q_norm: Float[Array, "D"] | None = None
    k_norm: Float[Array, "D"] | None = None


@struct.dataclass
class Weights:
    """All weights of a model. ``head`` is None where the output head is the embedding."""

    embedding: Float[Array, "V E"]
    layers: tuple[Layer, ...]
    final_norm: Float[Array, "E"]
    head: Float[Array, "V E"] | None = None


@struct.dataclass
class Heads:
    """A layer's projections before RoPE, after q-norm and k-norm, and the rotation their positions ask for."""

    q: Float[Array, "B T H D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]

    def rotated(self) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
        """Return q and k after RoPE."""
        return rope.rotate(self.q, self.cos, self.sin), rope.rotate(self.k, self.cos, self.sin)


Attend = Callable[[State, int, Heads], tuple[State, Float[Array, "B T H D"]]]


def weight_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Weights:
    """Return the weights as ``jax.ShapeDtypeStruct``: the one description that loaders and tests go by."""

    def array(*shape: int, when: bool = True) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype) if when else None

    e, i, d = config.width, config.mlp_width, config.head_dim
    q, kv = config.heads * d, config.kv_heads * d
    layer = Layer(
        attention_norm=array(e),
        q=array(q, e),
        k=array(kv, e),
        v=array(kv, e),
        o=array(e, q),
        mlp_norm=array(e),
        gate=array(i, e),
        up=array(i, e),
        down=array(e, i),
        q_bias=array(q, when=config.qkv_bias),
        k_bias=array(kv, when=config.qkv_bias),
        v_bias=array(kv, when=config.qkv_bias),
        o_bias=array(e, when=config.output_bias),
        gate_bias=array(i, when=config.mlp_bias),
        up_bias=array(i, when=config.mlp_bias),
        down_bias=array(e, when=config.mlp_bias),
        q_norm=array(d, when=config.qk_norm),
        k_norm=array(d, when=config.qk_norm),
    )
    return Weights(
        embedding=array(config.vocab_size, e),
        layers=(layer,) * config.layers,
        final_norm=array(e),
        head=array(config.vocab_size, e, when=not config.tied_head),
    )


def init_weights(config: ModelConfig, seed: int = 0, dtype: Any = np.float32) -> Weights:
    """Return seeded random weights as NumPy arrays: norms near 1, matrices of variance 1 / in, small biases.

    NumPy's generator is the same everywhere, so a test and the script that made its expected values agree.
    """
    generator = np.random.default_rng(seed)

    def draw(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].name
        values = generator.standard_normal(shape.shape, dtype=np.float32)
        if name.endswith("norm"):
            values = 1 + 0.1 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        else:
            values = values / np.sqrt(np.float32(shape.shape[-1]))
        return values.astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, weight_shapes(config))


def rms_norm(x: Float[Array, "*R E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "*R E"]:
    """Root-mean-square norm (arXiv 1910.07467), computed in float32."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def forward(
    weights: Weights,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend[State],
    state: State,
) -> tuple[State, Float[Array, "B T E"]]:
    """Run the decoder over T tokens a row and return the state that attention left, and the normed hidden vectors.

    Args:
      weights: the model's weights; their dtype is the dtype of the hidden vectors.
      config: its shapes.
      tokens: token ids, in range.
      positions: RoPE positions. They reach nothing but RoPE.
      attend: called once a layer, in order, as ``attend(state, layer, heads) -> (state, out)``. It rotates,
        stores and attends as it sees fit; ``out`` is ``[B, T, H, D]``.
      state: what the first call gets; usually the pool.
    """
    x = embed(weights, tokens)
    cos, sin = rope.rotation(config.rope, config.head_dim, positions)
    for index, layer in enumerate(weights.layers):
        with jax.named_scope(f"layer{index}"):
            state, x = decoder_layer(layer, config, x, cos, sin, attend, state, index)
    return state, rms_norm(x, weights.final_norm, config.norm_eps)


def embed(weights: Weights, tokens: Int[Array, "*R"]) -> Float[Array, "*R E"]:
    """Return the hidden vectors that the first layer gets."""
    return jnp.take(weights.embedding, tokens, axis=0, mode="clip")


def decoder_layer(
    layer: Layer,
    config: ModelConfig,
    x: Float[Array, "B T E"],
    cos: Float[Array, "B T F"],
    sin: Float[Array, "B T F"],
    attend: Attend[State],
    state: State,
    index: int,
) -> tuple[State, Float[Array, "B T E"]]:
    """Run one layer: a step of ``forward``, for those who go through a model layer by layer.

    Args:
      layer: its weights.
      config: the model's shapes.
      x: hidden vectors, as the layer before left them.
      cos, sin: of ``rope.rotation``.
      attend, state: as for ``forward``.
      index: what ``attend`` is told that the layer's number is.
    """
    heads = _project(layer, config, rms_norm(x, layer.attention_norm, config.norm_eps), cos, sin)
    with jax.named_scope("attend"):
        state, out = attend(state, index, heads)
    out = out.reshape(*x.shape[:-1], config.heads * config.head_dim).astype(x.dtype)
    x = x + _affine(layer.o, layer.o_bias, out)
    return state, x + _mlp(layer, rms_norm(x, layer.mlp_norm, config.norm_eps))


def logits(weights: Weights, hidden: Float[Array, "*R E"]) -> Float[Array, "*R V"]:
    """Return float32 logits of normed hidden vectors."""
    head = weights.embedding if weights.head is None else weights.head
    with jax.named_scope("head"):
        return linear(head, hidden, jnp.float32)


def _project(layer: Layer, config: ModelConfig, x: Array, cos: Array, sin: Array) -> Heads:
    def split(weight: Matrix, bias: Array | None, heads: int) -> Array:
        return _affine(weight, bias, x).reshape(*x.shape[:-1], heads, config.head_dim)

    q = split(layer.q, layer.q_bias, config.heads)
    k = split(layer.k, layer.k_bias, config.kv_heads)
    v = split(layer.v, layer.v_bias, config.kv_heads)
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, config.norm_eps)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, config.norm_eps)
    return Heads(q=q, k=k, v=v, cos=cos, sin=sin)


def _mlp(layer: Layer, x: Array) -> Array:
    with jax.named_scope("mlp"):
        gated = jax.nn.silu(_affine(layer.gate, layer.gate_bias, x)) * _affine(layer.up, layer.up_bias, x)
        return _affine(layer.down, layer.down_bias, gated)


def _affine(weight: Matrix, bias: Array | None, x: Array) -> Array:
    out = linear(weight, x)
    return out if bias is None else out + bias.astype(out.dtype)
