"""How much to recompute, and whether to blend at all: from measured speeds, without touching a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv.blend_layout import CACHED, CHECK_LAYER, FIRST, FRESH, Layout
from jaxkv.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What a prefill takes on a machine.

    Attributes:
      token_seconds: of a token through all layers, attention aside.
      pair_seconds: of a query and a key that it sees, through all layers.
      restore_seconds: of putting a cached token into all layers of the pool once it is in host memory.
    """

    token_seconds: float
    pair_seconds: float = 0.0
    restore_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.token_seconds > 0 or not min(self.pair_seconds, self.restore_seconds) >= 0:
            raise ValueError(f"{self} has a speed that nothing has; token_seconds is above 0, the others at least 0")

    @classmethod
    def fit(cls, prefills: Sequence[tuple[int, float]], restore_seconds: float = 0.0) -> Speeds:
        """Return the speeds that explain full prefills best, by least squares of relative errors.

        Args:
          prefills: tokens and seconds of each. Two lengths are needed to tell attention from the rest.
          restore_seconds: see above.

        Raises:
          ValueError: there is none, or one has no token or took no time.
        """
        if not prefills or min(min(pair) for pair in prefills) <= 0:
            raise ValueError(f"prefills={list(prefills)} must be of at least one token and take time, at least one")
        tokens, seconds = np.asarray(prefills, np.float64).T
        parts = np.stack([tokens, tokens * (tokens + 1) / 2], axis=1) / seconds[:, None]
        found = [0.0, 0.0]
        if len(set(tokens)) > 1:
            found = np.linalg.lstsq(parts, np.ones(len(tokens)), rcond=None)[0].tolist()
        if min(found) <= 0:
            # Noise, or one length: all of it goes by tokens.
            token = parts[:, 0]
            found = [float(token.sum() / (token @ token)), 0.0]
        return cls(found[0], found[1], restore_seconds)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to do with a prompt.

    Attributes:
      full: whether a full prefill is predicted to be at least as fast.
      ratio: the recompute ratio to blend with.
      blend_seconds, full_seconds: predicted until the first token, at that ratio, and with nothing but an exact prefix
        reused.
    """

    full: bool
    ratio: float
    blend_seconds: float
    full_seconds: float


def choose(layout: Layout, config: ModelConfig, speeds: Speeds, load_seconds: float, *, least: float = 0.15) -> Choice:
    """Return the largest recompute ratio that hides behind the loading of cached KV, and at least ``least``.

    Layers are computed while the next ones are loaded, so recomputing is free up to the ratio at which both take as
    long. Loading begins at once, and the early layers of all tokens are computed meanwhile.

    Args:
      layout: the prompt.
      config: the model's shapes.
      speeds: measured.
      load_seconds: predicted for all cached KV of the prompt; 0 where it is in host memory.
      least: r_min, what quality asks for.

    Raises:
      ValueError: ``least`` is not from 0 to 1, or ``load_seconds`` is negative.
    """
    if not 0 <= least <= 1 or load_seconds < 0:
        raise ValueError(f"least={least} must be from 0 to 1, and load_seconds={load_seconds} at least 0")
    own = _seconds(layout, speeds, FRESH, FIRST, CACHED)
    full = own + layout.exact * speeds.restore_seconds
    late = 1 - CHECK_LAYER / config.layers
    early = own * (CHECK_LAYER + _check_share(config)) / config.layers
    early += (layout.eligible + layout.exact) * speeds.restore_seconds + _seconds(layout, speeds, FRESH) * late
    # Seconds that recomputing every eligible token would add.
    all_of_them = _seconds(layout, speeds, FIRST, CACHED) * late
    hidden = (load_seconds - early) / all_of_them if layout.eligible else 0.0
    ratio = min(1.0, max(hidden, least))
    # The last layer can begin when it is there.
    tail = (early + ratio * all_of_them) / config.layers
    blend = max(early + ratio * all_of_them, load_seconds + tail)
    return Choice(full=full <= blend, ratio=ratio, blend_seconds=blend, full_seconds=full)


def _seconds(layout: Layout, speeds: Speeds, *kinds: int) -> float:
    """Return what tokens of some kinds take through all layers."""
    where = np.flatnonzero(np.isin(layout.kind, kinds))
    keys = float((layout.start + where + 1).sum())
    return where.size * speeds.token_seconds + keys * speeds.pair_seconds


def _check_share(config: ModelConfig) -> float:
    """Return how much of a layer the keys and values of the check layer are, attention aside."""
    kv = 2 * config.kv_heads * config.head_dim
    return kv / (kv + 2 * config.heads * config.head_dim + 3 * config.mlp_width)
