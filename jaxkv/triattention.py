"""TriAttention (arXiv 2604.04921): how much future queries will want a cached key, from the geometry of the queries.

With a key ``k`` of a token at p, mean queries ``mu`` and mean magnitudes ``nu`` before RoPE, and t tokens seen:

    S(k) = mean over d of sum_f s^2 |mu_f| |k_f| cos(omega_f (t + d - p) + arg mu_f - arg k_f)
           + sum_f s^2 (nu_f - |mu_f|) |k_f|

over the future offsets d = 1, 2, 4, .. (the paper's trigonometric and norm terms). The pool holds keys after RoPE,
``s k exp(i omega p)``, so p cancels, and the mean over d goes into the query: ``S(k) = k . w + |k| . c`` with one real
vector w and one c a head. The phases that w needs are made on the host in float64, once a model: float32 phases are
off by 3e-4 at 100,000 tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

import pallas_kernels
from jaxkv import rope
from jaxkv.compression import Aggregation
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float, Int, ceil_div
from jaxkv.stats import LayerMeans

_FINE_BITS = 7
_FINE = 2**_FINE_BITS


def future_offsets(largest: int = 2**16) -> np.ndarray:
    """Return the offsets 1, 2, 4, .. up to ``largest``, a power of two: int64."""
    return 2 ** np.arange(int(largest).bit_length())


@struct.dataclass
class Phases:
    """exp(i omega t) for every t up to a limit, as products of two small tables: t = 128 a + b.

    Made from float64, stored as float32. Nothing on the device ever computes a phase.
    """

    coarse_real: Float[Array, "A F"]
    """exp(i omega 128 a)."""
    coarse_imag: Float[Array, "A F"]
    fine_real: Float[Array, "128 F"]
    """exp(i omega b)."""
    fine_imag: Float[Array, "128 F"]
    offset_real: Float[Array, "O F"]
    """The mean over offsets d of exp(i omega d), or one row an offset where the maximum is wanted."""
    offset_imag: Float[Array, "O F"]
    scaling: Float[Array, ""]
    """s of the rotary embedding: cached keys carry it once, and the score twice."""

    @classmethod
    def create(
        cls,
        omega: np.ndarray,
        scaling: float,
        context: int,
        *,
        offsets: int = 2**16,
        aggregation: Aggregation = "mean",
    ) -> Phases:
        """Return the tables of frequencies ``omega`` [F] for positions up to ``context`` and a table row beyond.

        The row beyond is for the look-ahead of a round: 128 positions at least.
        """
        omega = np.asarray(omega, np.float64)

        def turn(steps: np.ndarray) -> np.ndarray:
            return np.exp(1j * omega * steps[:, None])

        ahead = turn(future_offsets(offsets))
        if aggregation == "mean":
            ahead = ahead.mean(axis=0, keepdims=True)
        coarse = turn(_FINE * np.arange(ceil_div(context + 1, _FINE) + 1))
        tables = {"coarse": coarse, "fine": turn(np.arange(_FINE)), "offset": ahead}
        real = {f"{name}_real": table.real.astype(np.float32) for name, table in tables.items()}
        imag = {f"{name}_imag": table.imag.astype(np.float32) for name, table in tables.items()}
        return cls(**real, **imag, scaling=np.float32(scaling))  # type: ignore[arg-type]

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        context: int | None = None,
        *,
        offsets: int = 2**16,
        aggregation: Aggregation = "mean",
    ) -> Phases:
        """Return the tables of a model, for ``context`` tokens or as many as it was made for."""
        omega, scaling = rope.inverse_frequencies(config.rope, config.head_dim), rope.attention_scaling(config.rope)
        return cls.create(omega, scaling, context or config.context, offsets=offsets, aggregation=aggregation)

    @property
    def limit(self) -> int:
        """Positions that the tables serve: 0 to ``limit - 1``."""
        return _FINE * self.coarse_real.shape[0]

    def check(self, position: int) -> None:
        """Refuse a position past the tables, on the host; on the device it would be read as the last one.

        Raises:
          ValueError: with both numbers.
        """
        if not 0 <= position < self.limit:
            raise ValueError(f"position={position} is past the {self.limit} that the phase tables serve; raise context")


def virtual_query(
    phases: Phases, means: LayerMeans, position: Int[Array, "B"]
) -> tuple[Float[Array, "B O H D"], Float[Array, "B H F"]]:
    """Return w and c of every query head of a layer, at ``position`` tokens a row.

    ``w = s mu E(t)`` as [real, imaginary], with E(t) the mean over offsets d of exp(i omega (t + d)), and
    ``c = s max(nu - |mu|, 0)``.
    Everything that scores keys calls this one function, and the barriers keep a compiler from rounding it otherwise
    in one program than in another, so a score has the same bits wherever it is made.
    """
    phases, means, position = lax.optimization_barrier((phases, means, position))
    coarse, fine = position >> _FINE_BITS, position & (_FINE - 1)
    turn = _times(_rows(phases, "coarse", coarse), _rows(phases, "fine", fine))
    ahead = tuple(part[None] for part in (phases.offset_real, phases.offset_imag))
    turn = _times(tuple(part[:, None] for part in turn), ahead)
    mean = tuple(phases.scaling * part[:, None] for part in (means.real, means.imag))
    w = jnp.concatenate(_times(tuple(part[:, :, None] for part in turn), mean), axis=-1)
    centre = jnp.sqrt(means.real**2 + means.imag**2)
    c = phases.scaling * jnp.maximum(means.magnitude - centre, 0)
    c = jnp.broadcast_to(c, (w.shape[0], *c.shape[1:]))
    return lax.optimization_barrier((w, c))


def score(
    k_pages: Float[Array, "N K P D"],
    block_table: Int[Array, "B M"],
    length: Int[Array, "B"],
    position: Int[Array, "B"],
    means: LayerMeans,
    phases: Phases,
    implementation: pallas_kernels.Implementation | None = None,
) -> Float[Array, "B K G S"]:
    """Return TriAttention's score of every cached key for every query head, float32.

    Args:
      k_pages: one layer's keys after RoPE.
      block_table, length: where a row's slots are, and how many it holds; scores from ``length`` on are unspecified.
      position: t, tokens of the row whose K and V are computed.
      means: the layer's query statistics, for all rows or row by row.
      phases: the model's tables.
      implementation: as for ``pallas_kernels.score``.
    """
    w, c = virtual_query(phases, means, position)
    return pallas_kernels.score(k_pages, block_table, length, w, c, implementation=implementation)


def _rows(phases: Phases, table: str, index: Int[Array, "B"]) -> tuple[Array, Array]:
    real, imag = getattr(phases, f"{table}_real"), getattr(phases, f"{table}_imag")
    return jnp.take(real, index, axis=0, mode="clip"), jnp.take(imag, index, axis=0, mode="clip")


def _times(x: tuple[Array, ...], y: tuple[Array, ...]) -> tuple[Array, Array]:
    """Complex product of (real, imaginary) pairs."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]
