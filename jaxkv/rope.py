"""Rotary position embedding: frequencies in float64 on the host, rotation in float32 on the device.

A D-vector x holds F = D / 2 complex numbers in half-split order, ``x_f = x[f] + i x[f + F]``. At position
p band f is multiplied by ``s exp(i omega_f p)``: RoFormer (arXiv 2104.09864, eq. 34), with the frequencies
rescaled by linear interpolation (arXiv 2306.15595), by Llama 3.1's rule, or by YaRN (arXiv 2309.00071,
eqs. 17 to 23), whose attention scaling is s. Elsewhere s = 1.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jaxkv.config import RopeConfig
from jaxkv.dims import Array, Float, Int


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return omega, the radians a token turns each band by: float64 [F]."""
    bands = np.arange(0, head_dim, 2, dtype=np.float64)
    omega = rope.theta ** (-bands / head_dim)
    if rope.kind == "linear":
        return omega / rope.factor
    if rope.kind == "llama3":
        return _llama3(omega, rope)
    if rope.kind == "yarn":
        return _yarn(omega, rope, head_dim)
    return omega


def attention_scaling(rope: RopeConfig) -> float:
    """Return s, the factor that q and k both carry: 1 but for YaRN (its eq. 22)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _llama3(omega: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Slow bands are divided by the factor, fast ones kept, those between blended by wavelength."""
    wavelength = 2 * np.pi / omega
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return (1 - blend) * omega / rope.factor + blend * omega


def _yarn(omega: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """As Llama 3's rule, but the blend is linear in the band's index."""

    def band_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = band_of(rope.beta_fast), band_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(omega.size) - low) / max(high - low, 1e-3)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    return omega / rope.factor * (1 - keep) + omega * keep


def rotation(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """Return s cos and s sin of every band at every position, float32."""
    omega = jnp.asarray(inverse_frequencies(rope, head_dim), jnp.float32)
    phase = positions[..., None].astype(jnp.float32) * omega
    scale = attention_scaling(rope)
    return jnp.cos(phase) * scale, jnp.sin(phase) * scale


def rotate(
    x: Float[Array, "B T X D"], cos: Float[Array, "B T F"], sin: Float[Array, "B T F"]
) -> Float[Array, "B T X D"]:
    """Turn every head of ``x`` (X is H or K) by the angles of ``rotation``; computed in float32, returned as x's
    dtype.
    """
    real, imag = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([real * cos - imag * sin, real * sin + imag * cos], axis=-1)
    return turned.astype(x.dtype)
