"""What goes into the jitted steps and comes out of them: chunks of prompts, decoding rows, and what they generate."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxkv.config import CacheConfig
from jaxkv.dims import Array, Bool, Float, Int, host_array
from jaxkv.policies.base import Observed
from jaxkv.sampling import Sampling, Seen


@struct.dataclass
class Chunk:
    """The next tokens of B prompts, left-aligned and padded to T."""

    tokens: Int[Array, "B T"]
    count: Int[Array, "B"]
    """How many of the T tokens are real; 0 for a row that nobody uses."""
    table: Int[Array, "B M"]
    """Blocks of each row, those that this chunk fills included; padded with 0."""
    length: Int[Array, "B"]
    """Slots that the row holds before this chunk."""
    position: Int[Array, "B"]
    """RoPE position of the chunk's first token."""
    sampling: Sampling
    row: Int[Array, "B"]
    """Which row of ``observed`` each prompt is; one past the last for a row that nobody uses."""
    observed: Observed | None = None
    """What is gathered about all rows of the engine, where the policy asks for it."""
    seen: Seen | None = None
    """Which tokens all rows of the engine have had; None where no row has a penalty."""

    @classmethod
    def idle(cls, cache: CacheConfig) -> Chunk:
        """Return NumPy arrays of a chunk without a token."""
        rows = cache.prefill_rows
        return cls(
            tokens=host_array(rows, cache.prefill_chunk),
            count=host_array(rows),
            table=host_array(rows, cache.table_width),
            length=host_array(rows),
            position=host_array(rows),
            sampling=Sampling.idle(rows),
            row=host_array(rows, fill=cache.rows),
        )


@struct.dataclass
class PrefillOutput:
    """What follows each row's last real token."""

    logits: Float[Array, "B V"]
    token: Int[Array, "B"]
    """The next token, drawn as the row asks for."""
    logprob: Float[Array, "B"]
    observed: Observed | None
    """The chunk's ``observed`` with its queries added; that of a prompt's first chunk began at zero."""


@struct.dataclass
class Rows:
    """What B decoding rows are at: everything the next step needs but the pool."""

    token: Int[Array, "B"]
    """The row's newest token, whose K and V are not computed yet."""
    table: Int[Array, "B M"]
    """Blocks of each row, with room for the steps to come; padded with 0."""
    length: Int[Array, "B"]
    """Slots held. The newest token is written to slot ``length``."""
    position: Int[Array, "B"]
    """RoPE position of the newest token."""
    active: Bool[Array, "B"]
    """Whether the row decodes. A row that does not writes to the null block."""
    sampling: Sampling
    observed: Observed | None = None
    """What is gathered about the rows, where the policy asks for it."""
    seen: Seen | None = None
    """Which tokens the rows have had; None where no row has a penalty."""

    @classmethod
    def idle(cls, cache: CacheConfig) -> Rows:
        """Return NumPy arrays of rows that nobody uses."""
        rows = cache.rows
        return cls(
            token=host_array(rows),
            table=host_array(rows, cache.table_width),
            length=host_array(rows),
            position=host_array(rows),
            active=host_array(rows, dtype=bool, fill=False),
            sampling=Sampling.idle(rows),
        )


@struct.dataclass
class RoundOutput:
    """What a round generated. ``tokens[b, :count[b]]`` are row b's, a stop token that ended it included."""

    tokens: Int[Array, "B R"]
    logprobs: Float[Array, "B R"]
    count: Int[Array, "B"]

    @classmethod
    def empty(cls, rows: int, width: int) -> RoundOutput:
        """Return room for ``width`` tokens a row."""
        return cls(
            tokens=jnp.zeros((rows, width), jnp.int32),
            logprobs=jnp.zeros((rows, width), jnp.float32),
            count=jnp.zeros(rows, jnp.int32),
        )
