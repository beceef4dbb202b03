"""What blending does to a model's answers: teacher-forced, against a full prefill of the same tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv import blend, blend_segment, model, rope
from jaxkv.blend_layout import FIRST, Layout, Piece, padded
from jaxkv.config import ModelConfig
from jaxkv.dims import Array, Float, Int

Chooser = Literal["deviation", "random", "first"]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to answer from cached KV.

    Attributes:
      ratio: of cached tokens that are recomputed; of no use to ``first``.
      chooser: which: those that are furthest off, as ``blend_prefill`` has it; as many at random; or the first one of
        each passage and no other.
      rotated: whether keys are turned to where they now stand. False is a mistake, made to see what it costs.
    """

    ratio: float
    chooser: Chooser = "deviation"
    rotated: bool = True

    @property
    def name(self) -> str:
        """For tables and lines of results."""
        what = "first tokens" if self.chooser == "first" else f"{self.ratio:g}"
        return what + (" at random" if self.chooser == "random" else "") + ("" if self.rotated else ", not rotated")


@dataclasses.dataclass(frozen=True)
class Score:
    """How far answers are from those of a full prefill, over the tokens that were scored.

    Attributes:
      kl: mean KL(full || blended) in nats.
      top1: share of tokens after which both have the same best token.
      recomputed: cached tokens that were recomputed.
      eligible: cached tokens that could have been.
    """

    kl: float
    top1: float
    recomputed: int
    eligible: int


class Judge:
    """A model that answers prompts of passages, in full and blended. It has a pool of its own.

    Args:
      weights, config: the model.
      most: tokens of the longest prompt.
      bos: token that every prompt begins with; None for none.
      behind_bos: whether passages are prefilled behind it, its KV dropped. The first one is then an exact prefix. So
        is it where there is no ``bos`` at all.
      chunk: tokens of a forward pass.
    """

    def __init__(
        self,
        weights: model.Weights,
        config: ModelConfig,
        *,
        most: int,
        bos: int | None,
        behind_bos: bool,
        chunk: int = blend.CHUNK,
    ) -> None:
        dtype = "float32" if jax.default_backend() == "cpu" else weights.embedding.dtype.name
        self._weights, self._config, self._chunk = weights, config, chunk
        self._pool, self._table = blend_segment.scratch(config, -(-most // chunk) * chunk, dtype)
        self._head = weights.replace(layers=())  # type: ignore[attr-defined]
        self._bos = [] if bos is None else [bos]
        self._before = self._bos if behind_bos else []
        self._kept: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}

    def full(self, passages: Sequence[np.ndarray], continuation: np.ndarray) -> Float[Array, "T V"]:
        """Return what a full prefill says after each token of the continuation but the last: log probabilities."""
        ids = np.concatenate([self._bos, *passages, continuation]).astype(np.int32)
        first, out = ids.size - continuation.size, []
        for start in range(0, ids.size, self._chunk):
            piece = ids[start : start + self._chunk]
            bounds = np.array([start, piece.size], np.int32)
            self._pool, _, hidden = blend_segment.run_chunk(
                self._weights, self._pool, self._table, padded(piece, self._chunk), bounds, config=self._config
            )
            out.append(np.asarray(hidden, np.float32)[: piece.size])
        rows = np.concatenate(out)[first:-1].astype(self._weights.embedding.dtype)
        return _log_probabilities(self._head, rows)

    def score(
        self,
        passages: Sequence[np.ndarray],
        continuation: np.ndarray,
        full: Float[Array, "T V"],
        way: Way,
        seed: int = 0,
    ) -> Score:
        """Return how far blending takes the answers from ``full``.

        Args:
          passages: ids of each.
          continuation: ids that follow, at least two; all of them are computed afresh.
          full: of the method of that name.
          way: how to answer.
          seed: of the random chooser.
        """
        layout = self._layout(passages, continuation, first_tokens=way.chooser != "random")
        ratio, priority = way.ratio, None
        if way.chooser == "first":
            # Rounded up it is as many as there are first tokens.
            ratio = max(int((layout.kind == FIRST).sum()) - 0.5, 0) / max(layout.eligible, 1)
        if way.chooser == "random":
            priority = np.random.default_rng(seed).permutation(layout.size).astype(np.float32)
        kv = [self._segment(passage) for passage in passages]
        if not way.rotated:
            kv = [(self._unturned(k, begin), v) for (k, v), (begin, _) in zip(kv, layout.spans, strict=True)]
        self._pool, out = blend.blend_prefill(
            self._weights, self._pool, self._table, layout, lambda layer: [(k[layer], v[layer]) for k, v in kv],
            config=self._config, ratio=ratio, chunk=self._chunk, priority=priority,
        )  # fmt: skip
        count = continuation.size - 1
        own = _blended(self._head, out.hidden, np.int32(out.computed - 1), eps=self._config.norm_eps, count=count)
        kl, top1 = (float(x) for x in np.asarray(_compare(full, own), np.float64))
        return Score(kl=kl, top1=top1, recomputed=out.recomputed, eligible=layout.eligible)

    def _layout(self, passages: Sequence[np.ndarray], continuation: np.ndarray, first_tokens: bool) -> Layout:
        pieces = [Piece(self._bos)]
        for number, ids in enumerate(passages):
            pieces.append(Piece(ids, cached=True, exact=number == 0 and self._before == self._bos))
        return Layout.of(pieces, continuation, first_tokens=first_tokens)

    def _segment(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        name = tokens.tobytes()
        if name not in self._kept:
            self._pool, k, v = blend.segment_kv(
                self._weights, self._pool, self._table, tokens, config=self._config, before=self._before,
                chunk=self._chunk,
            )  # fmt: skip
            self._kept[name] = k, v
        return self._kept[name]

    def _unturned(self, k: np.ndarray, begin: int) -> np.ndarray:
        """Return keys [L, T, K, D] that blending will turn back to their places in the passage."""
        back = jnp.full(k.shape[:2], len(self._before) - begin)
        # The scaling of YaRN is no part of the angle.
        cos, sin = rope.rotation(self._config.rope, self._config.head_dim, back)
        scale = rope.attention_scaling(self._config.rope)
        return np.asarray(rope.rotate(jnp.asarray(k), cos / scale, sin / scale))


@jax.jit
def _log_probabilities(weights: model.Weights, hidden: Float[Array, "T E"]) -> Float[Array, "T V"]:
    return jax.nn.log_softmax(model.logits(weights, hidden), axis=-1)


@functools.partial(jax.jit, static_argnames=("eps", "count"))
def _blended(
    weights: model.Weights, hidden: Float[Array, "W E"], end: Int[Array, ""], *, eps: float, count: int
) -> Float[Array, "T V"]:
    """Return the log probabilities behind ``count`` tokens, of which the last is before ``end``."""
    rows = lax.dynamic_slice_in_dim(hidden, end - count, count)
    return _log_probabilities(weights, model.rms_norm(rows, weights.final_norm, eps))


@jax.jit
def _compare(full: Float[Array, "T V"], own: Float[Array, "T V"]) -> Float[Array, "2"]:
    divergence = jnp.sum(jnp.exp(full) * (full - own), axis=-1)
    same = jnp.argmax(own, axis=-1) == jnp.argmax(full, axis=-1)
    return jnp.stack([jnp.mean(divergence), jnp.mean(same.astype(jnp.float32))])


@dataclasses.dataclass(frozen=True)
class Measured:
    """Means over prompts at one ratio.

    Attributes:
      ratio: of cached tokens that were recomputed.
      kl, top1: see ``Score``; every prompt counts alike.
      random_kl, random_top1: with as many tokens at random; None at 0 and 1, where there is nothing to choose.
    """

    ratio: float
    kl: float
    top1: float
    random_kl: float | None = None
    random_top1: float | None = None


def rotations(
    documents: Sequence[np.ndarray], tokens: int, continuation: int
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Return a prompt for each document: the beginnings of all, that document last, and how it goes on.

    Args:
      documents: ids of each.
      tokens: most of each that are put into a prompt.
      continuation: tokens behind these that are scored.

    Raises:
      ValueError: there are fewer than two, or one is too short to be continued.
    """
    if len(documents) < 2:
        raise ValueError(f"{len(documents)} documents have nothing to be blended with; give at least two")
    for number, ids in enumerate(documents):
        if ids.size <= continuation:
            raise ValueError(
                f"document {number + 1} has {ids.size} tokens, and {continuation} are to be scored behind at least "
                "one; give a longer one or a shorter continuation"
            )
    heads = [ids[: min(tokens, ids.size - continuation)] for ids in documents]
    out = []
    for last, ids in enumerate(documents):
        order = [*range(last + 1, len(documents)), *range(last + 1)]
        end = heads[last].size
        out.append(([heads[i] for i in order], ids[end : end + continuation]))
    return out


def measure(
    judge: Judge,
    prompts: Sequence[tuple[Sequence[np.ndarray], np.ndarray]],
    ratios: Sequence[float],
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Measured]:
    """Answer prompts in full and blended at each ratio; return means, in the order of the ratios.

    Args:
      judge: the model.
      prompts: passages and a continuation each; see ``Judge.score``.
      ratios: from 0 to 1.
      progress: called with the number of prompts done.
    """
    ways = [Way(ratio, chooser) for ratio in ratios for chooser in ("deviation", "random")]
    ways = [way for way in ways if way.chooser == "deviation" or 0 < way.ratio < 1]
    scores: dict[Way, list[Score]] = {way: [] for way in ways}
    for number, (passages, continuation) in enumerate(prompts):
        full = judge.full(passages, continuation)
        for way in ways:
            scores[way].append(judge.score(passages, continuation, full, way, seed=number))
        if progress is not None:
            progress(number + 1)

    def means(way: Way) -> tuple[float | None, float | None]:
        found = scores.get(way, [])
        if not found:
            return None, None
        return float(np.mean([score.kl for score in found])), float(np.mean([score.top1 for score in found]))

    out = []
    for ratio in ratios:
        (kl, top1), (random_kl, random_top1) = means(Way(ratio)), means(Way(ratio, "random"))
        assert kl is not None and top1 is not None
        out.append(Measured(ratio, kl, top1, random_kl, random_top1))
    return out
