"""What a blended prompt is made of, token by token: plain NumPy on the host, settled before anything is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxkv.config import ModelConfig
from jaxkv.dims import Int

FRESH, FIRST, CACHED, EXACT = range(4)
"""What a token is: without cached KV; the first of a cached segment; any other of one; of an exact prefix."""

CHECK_LAYER = 1
"""c: the layer whose values say how far a token's cached KV is off. The layers before it are exact for every token."""

_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of RoPE whose angle is a matter of the position alone."""


def check_model(config: ModelConfig) -> None:
    """Refuse a model whose KV cannot be moved to another place and blended there.

    Raises:
      NotImplementedError: its RoPE depends on more than the position, or it has no layer after the check layer.
    """
    if config.rope.kind not in _ROPES:
        raise NotImplementedError(
            f"rope kind={config.rope.kind!r} cannot be blended, only {', '.join(sorted(_ROPES))} can; "
            "compute the segments afresh"
        )
    if config.layers <= CHECK_LAYER:
        raise NotImplementedError(
            f"layers={config.layers}: blending checks layer {CHECK_LAYER} and recomputes from there on; "
            "compute the segments afresh"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A part of a prompt.

    Attributes:
      tokens: its ids; none is allowed.
      cached: whether there is KV of it, computed from it alone.
      exact: whether that KV is what a prefill of this prompt would compute: the piece is behind the very tokens that it
        was prefilled behind. It is then used as it is.
    """

    tokens: Sequence[int] | np.ndarray
    cached: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if self.exact and not self.cached:
            raise ValueError("a piece without cached KV cannot be exact; give cached=True, or exact=False")


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of a prompt that are not in the pool yet, and what each of them is. Make one with ``of``.

    Attributes:
      tokens: T ids.
      kind: FRESH, FIRST, CACHED or EXACT, of every token.
      spans: where each cached piece begins and ends, in the order in which their KV is given. Empty ones have none.
      start: slots that the row holds in the pool already, exactly as a prefill leaves them.
    """

    tokens: Int[np.ndarray, "T"]
    kind: Int[np.ndarray, "T"]
    spans: tuple[tuple[int, int], ...]
    start: int = 0

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        suffix: Sequence[int] | np.ndarray = (),
        *,
        start: int = 0,
        first_tokens: bool = True,
    ) -> Layout:
        """Lay pieces and what follows them out.

        Where everything has cached KV, the last token counts as fresh: somebody has to give the logits.

        Args:
          pieces: in order. Before an exact one stand none but exact and fresh ones.
          suffix: what follows them, all of it computed afresh.
          start: slots in the pool already.
          first_tokens: whether the first token of a cached piece that is not exact comes before all others when tokens
            are chosen to be recomputed. It was an attention sink where the piece was prefilled with nothing before it.

        Raises:
          ValueError: there is no token, start is negative, or an exact piece stands behind a blended one.
        """
        if start < 0:
            raise ValueError(f"start={start} must be at least 0 slots")
        tokens: list[np.ndarray] = []
        kinds: list[np.ndarray] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for piece in (*pieces, Piece(suffix)):
            ids = np.asarray(piece.tokens, np.int32)
            if piece.exact and ids.size and any(np.isin(kind, (FIRST, CACHED)).any() for kind in kinds):
                raise ValueError("an exact piece stands behind a blended one, in whose KV it had no part; exact=False")
            kind = np.full(ids.size, EXACT if piece.exact else CACHED if piece.cached else FRESH, np.int8)
            if piece.cached and not piece.exact and first_tokens and at + start:
                # The prompt's very first token is a sink wherever it was computed.
                kind[:1] = FIRST
            if piece.cached and ids.size:
                spans.append((at, at + ids.size))
            tokens.append(ids)
            kinds.append(kind)
            at += ids.size
        if not at:
            raise ValueError("a prompt without a token gives no logits; give a suffix of at least one")
        kind = np.concatenate(kinds)
        kind[-1] = FRESH
        return cls(np.concatenate(tokens), kind, tuple(spans), start)

    @property
    def size(self) -> int:
        """T."""
        return self.tokens.size

    @property
    def exact(self) -> int:
        """How many tokens are of an exact prefix whose KV is given."""
        return int((self.kind == EXACT).sum())

    @property
    def skipped(self) -> int:
        """How many exact tokens stand at the front: no layer is computed for them."""
        return int(np.argmax(self.kind != EXACT))

    @property
    def clean(self) -> int:
        """How many tokens at the front have the KV that a prefill gives them: all before the first one that may be
        reused in another place. A row is dirty behind them.
        """
        blended = np.flatnonzero(np.isin(self.kind, (FIRST, CACHED)))
        return int(blended[0]) if blended.size else self.size

    @property
    def fresh(self) -> int:
        """How many tokens are computed whatever the ratio."""
        return int((self.kind == FRESH).sum())

    @property
    def eligible(self) -> int:
        """How many tokens have cached KV that may have to be recomputed."""
        return int(((self.kind == CACHED) | (self.kind == FIRST)).sum())

    def recomputed(self, ratio: float) -> int:
        """Return how many eligible tokens are recomputed: ``ceil(ratio * eligible)``, the ratio as it is written.

        Raises:
          ValueError: it is not from 0 to 1.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"recompute ratio={ratio} must be from 0 to 1")
        # In binary 0.07 * 100 is above 7.
        return math.ceil(Fraction(repr(float(ratio))) * self.eligible)

    def slots(self, width: int, *kinds: int) -> Int[np.ndarray, "W"]:
        """Return the slot of every token of some kinds, and -1 for the others, padded to ``width``."""
        out = np.full(width, -1, np.int32)
        where = np.flatnonzero(np.isin(self.kind, kinds))
        out[where] = self.start + where
        return out


def widths(most: int, chunk: int) -> list[int]:
    """Return the lengths that prompts of up to ``most`` tokens are padded to: multiples of a chunk, each about twice
    the one before. Only buffers grow with it; what is computed goes by the tokens that are there.
    """
    last = -(-most // chunk) * chunk
    out = []
    width = 4 * chunk
    while width < last:
        out.append(width)
        width *= 2
    return [*out, last]


def padded(values: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
    """Return values with ``fill`` behind them, ``width`` in all."""
    return np.concatenate([values, np.full(width - values.size, fill, values.dtype)])
