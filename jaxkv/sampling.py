"""Sampling: what a request asks for, the same as arrays over rows, and the draw itself.

A row's token depends on its logits, its seed and how many tokens it has generated: never on its neighbours, nor on
the round or the engine's row in which it happens to be drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxkv.dims import Array, Bool, Float, Int, UInt32, host_array

STOP_IDS = 8
"""Most stop tokens a row can watch for on the device."""
MOST_CHOICES = 128
"""Most continuations of one request."""


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
      logprobs: report the log probability of each token under the model: before penalties, temperature and truncation.
      n: how many continuations. They share the prompt's blocks; number i draws as one alone would with seed + i.
      min_tokens: tokens before which no stop token and no stop string ends the text.
      presence_penalty: taken from the logit of every token that was generated before.
      frequency_penalty: taken from a token's logit for each time that it was generated.
      repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that stand in the prompt or
        were generated (arXiv 1909.05858); 1 is none.
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
    n: int = 1
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def penalised(self) -> bool:
        """Whether tokens that were seen before are less likely, or more."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

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
        if not 1 <= self.n <= MOST_CHOICES:
            raise ValueError(f"n={self.n} must be from 1 to {MOST_CHOICES}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be from 0 to max_tokens={self.max_tokens}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}={getattr(self, name)} must be between -2 and 2; 0 is none")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 and finite; 1 is none")
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
    min_tokens: Int[Array, "B"]
    """Tokens before which no stop token is drawn."""
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    repetition: Float[Array, "B"]
    """The three penalties: 0, 0 and 1 where a row has none."""

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
            min_tokens=host_array(rows),
            presence=host_array(rows, dtype=np.float32),
            frequency=host_array(rows, dtype=np.float32),
            repetition=host_array(rows, dtype=np.float32, fill=1),
        )

    def put(self, at: int, params: SamplingParams, choice: int, generated: int, stop_ids: Sequence[int]) -> None:
        """Set one row of NumPy arrays, those of ``idle``."""
        for field in ("temperature", "top_p", "top_k", "min_p", "min_tokens"):
            getattr(self, field)[at] = getattr(params, field)
        for field in ("presence", "frequency", "repetition"):
            getattr(self, field)[at] = getattr(params, f"{field}_penalty")
        self.seed[at] = (params.seed + choice) % 2**32
        self.generated[at] = generated
        self.stop_ids[at, : len(stop_ids)] = stop_ids

    def is_stop(self, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return which rows a token ends."""
        return jnp.any(tokens[:, None] == self.stop_ids, axis=1)


@struct.dataclass
class Seen:
    """Which tokens rows have had, for penalties. Rows that have none need not be right in here."""

    prompt: Bool[Array, "B V"]
    generated: Int[Array, "B V"]
    """How often each token was generated, the row's newest not counted yet."""

    @classmethod
    def create(cls, rows: int, vocabulary: int) -> Seen:
        """Return that of rows that have seen nothing."""
        return cls(jnp.zeros((rows, vocabulary), bool), jnp.zeros((rows, vocabulary), jnp.int32))

    def add(self, tokens: Int[Array, "B"], active: Bool[Array, "B"]) -> Seen:
        """Return it with one more token of each active row."""
        rows = jnp.arange(tokens.shape[0])
        return self.replace(generated=self.generated.at[rows, tokens].add(active.astype(jnp.int32)))  # type: ignore[attr-defined]

    def at(self, rows: Int[Array, "R"]) -> Seen:
        """Return that of some rows."""
        return jax.tree.map(lambda x: x[rows], self)


def sample(
    logits: Float[Array, "B V"], rows: Sampling, seen: Seen | None = None
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """Draw one token a row; return it and its log probability under ``logits``, as the model gave them.

    Penalties come first, then the stop tokens that a row may not draw yet go, then temperature and truncation.
    Without ``seen`` there are no penalties. Drawing is by the Gumbel trick, an argmax over logits plus noise in
    vocabulary order, so truncation (which sorts) can be left out when no row wants it without changing what the others
    draw.
    """
    wanted = logits
    if seen is not None:
        neutral = (rows.presence == 0) & (rows.frequency == 0) & (rows.repetition == 1)
        wanted = lax.cond(jnp.all(neutral), lambda: logits, lambda: _penalised(logits, rows, seen))
    early = rows.generated < rows.min_tokens
    wanted = lax.cond(jnp.any(early), lambda: _without_stops(wanted, rows, early), lambda: wanted)
    greedy = jnp.argmax(wanted, axis=-1)
    tokens = lax.cond(jnp.any(rows.temperature > 0), lambda: _draw(wanted, rows, greedy), lambda: greedy)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def _penalised(logits: Array, rows: Sampling, seen: Seen) -> Array:
    repetition = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen.prompt | (seen.generated > 0), repeated, logits)
    return logits - rows.frequency[:, None] * seen.generated - rows.presence[:, None] * (seen.generated > 0)


def _without_stops(logits: Array, rows: Sampling, early: Array) -> Array:
    # A stop id of -1 is none: it is sent past the vocabulary, where it is dropped.
    gone = jnp.where(early[:, None] & (rows.stop_ids >= 0), rows.stop_ids, logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], gone].set(-jnp.inf, mode="drop")


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
