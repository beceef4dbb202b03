"""Sampling: what a request asks for, the same as arrays over rows, and the draw itself.

A row's token depends on its logits, its seed and how many tokens it has generated: never on its neighbours, nor on
the round or the engine's row in which it happens to be drawn.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxkv.dims import Array, Bool, Float, Int, UInt32, host_array

STOP_IDS = 8
"""Most stop tokens a row can watch for on the device."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
      max_tokens: most tokens to generate, at least 1.
      temperature: 0 is greedy.
      top_p: keep the smallest set of likeliest tokens whose probability reaches this (arXiv 1904.09751).
      top_k: keep this many likeliest tokens; 0 keeps all.
      min_p: drop tokens below this share of the likeliest one's probability (arXiv 2407.01082).
      seed: the request's own random stream.
      stop: strings that end the text; they are not part of it.
      stop_token_ids: tokens that end the text, besides the model's own.
      ignore_eos: do not stop at the model's end-of-text tokens.
      logprobs: report the log probability of each token under the model, before temperature and truncation.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or above, and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps every token")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k} must be 0 (every token) or above, and below 2**31")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 and 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        wrong = [token for token in self.stop_token_ids if not 0 <= token < 2**31]
        if wrong:
            raise ValueError(f"stop_token_ids has {wrong[0]}, which is no token id")
        if "" in self.stop:
            raise ValueError("a stop string is empty; it would end every text before its first token")


@struct.dataclass
class Sampling:
    """``SamplingParams`` of B rows as arrays. All are traced: a change recompiles nothing."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]
    seed: UInt32[Array, "B"]
    generated: Int[Array, "B"]
    """Tokens that the row has generated so far; with the seed it makes the key of the next draw."""
    stop_ids: Int[Array, "B S"]
    """Tokens that end the row, padded with -1."""

    @classmethod
    def idle(cls, rows: int) -> Sampling:
        """Return NumPy arrays for rows that nobody uses: greedy, no stop."""
        return cls(
            temperature=host_array(rows, dtype=np.float32),
            top_p=host_array(rows, dtype=np.float32, fill=1),
            top_k=host_array(rows),
            min_p=host_array(rows, dtype=np.float32),
            seed=host_array(rows, dtype=np.uint32),
            generated=host_array(rows),
            stop_ids=host_array(rows, STOP_IDS, fill=-1),
        )

    def is_stop(self, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return which rows a token ends."""
        return jnp.any(tokens[:, None] == self.stop_ids, axis=1)


def sample(logits: Float[Array, "B V"], rows: Sampling) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw one token a row; return it and its log probability under ``logits``, before temperature and truncation.

    Drawing is by the Gumbel trick, an argmax over logits plus noise in vocabulary order, so truncation (which sorts)
    can be left out when no row wants it without changing what the others draw.
    """
    greedy = jnp.argmax(logits, axis=-1)
    tokens = lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(logits, rows, greedy), lambda: greedy)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def _draw(logits: Array, rows: Sampling, greedy: Array) -> Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    truncating = (rows.temperature > 0) & ((rows.top_p < 1) | (rows.top_k > 0))
    scaled = lax.cond(jnp.any(truncating), lambda: _truncate(scaled, rows), lambda: scaled)
    with_min_p = rows.min_p[:, None] > 0
    floor = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(jnp.where(with_min_p, rows.min_p[:, None], 1))
    scaled = jnp.where(with_min_p & (scaled < floor), -jnp.inf, scaled)

    def noise(seed: Array, index: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), index), logits.shape[1:], jnp.float32)

    drawn = jnp.argmax(scaled + jax.vmap(noise)(rows.seed, rows.generated), axis=-1)
    return jnp.where(rows.temperature > 0, drawn, greedy)


def _truncate(scaled: Float[Array, "B V"], rows: Sampling) -> Float[Array, "B V"]:
    """Set what top-k and then top-p cut off to -inf. Equal logits stand or fall together."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    size = scaled.shape[-1]
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, size), size)
    kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    ordered = jnp.where(ordered >= kth, ordered, -jnp.inf)
    share = jax.nn.softmax(ordered, axis=-1)
    # A token stays while those before it have not yet reached top_p; the likeliest always does.
    before = jnp.cumsum(share, axis=-1) - share
    kept = jnp.where((before < rows.top_p[:, None]) & (ordered >= kth), ordered, jnp.inf)
    threshold = jnp.where(rows.top_p[:, None] < 1, jnp.min(kept, axis=-1, keepdims=True), kth)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)
