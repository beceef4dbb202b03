"""Query statistics of a model from its own forward pass over token windows, in bounded memory.

TriAttention (arXiv 2604.04921) needs two means a query head and band, over queries after q-norm and before RoPE. They
are taken where ``model.forward`` hands a layer's queries to attention, so a model with biases or a q-norm needs no
code here, and nothing is projected a second time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import decode, model
from jaxkv.config import CacheConfig, ModelConfig
from jaxkv.dims import Array, Int
from jaxkv.pool import KVPool
from jaxkv.stats import QueryStats, QuerySums, StatsInfo

CONTEXT = 2048
"""Tokens of a window that nobody chose; fewer where the model was made for fewer."""

CONCENTRATED = 0.95
"""R above this counts as concentrated: the paper's threshold."""


def calibrate(
    weights: model.Weights,
    config: ModelConfig,
    windows: Iterable[Sequence[int]],
    *,
    context: int | None = None,
    bos: int | None = None,
    chunk: int | None = None,
    revision: str = "",
    progress: Callable[[int], None] | None = None,
) -> QueryStats:
    """Return the mean queries of a model over windows of tokens.

    Each window is a text of its own: its positions begin at 0, and its tokens see each other and nothing else. Windows
    are taken one at a time and forgotten. Memory is that of one window's keys and values, whatever the number of
    windows; one program is compiled, whatever their lengths.

    Args:
      weights: the model's weights, on the device. Keys and values have their dtype, or float32 on a CPU.
      config: its shapes.
      windows: token ids, at least one and at most ``context`` a window, ``bos`` not among them.
      context: most tokens of a window, ``bos`` included. None: ``default_context``.
      bos: put before each window and not counted. The first token of a text collects attention that has nowhere to
        go, and its query is like no later one's; without ``bos`` that falls on a word of the text.
      chunk: tokens of a forward pass; it changes sums by rounding only. None: 128 on a CPU and 512 elsewhere.
      revision: of the weights, for the file.
      progress: called after each chunk with the number of tokens counted so far.

    Returns:
      Statistics with float32 means on the host, of sums kept to about 48 bits.

    Raises:
      ValueError: there is no token, a window is empty or too long, an id is not in the vocabulary, or the forward pass
        gave values that are not finite.
    """
    dtype = weights.embedding.dtype.name
    context = default_context(config) if context is None else context
    cache = _one_row(context, chunk, dtype)
    before = [] if bos is None else [bos]
    pool = KVPool.create(config, cache)
    sums = tuple(QuerySums.create(1, config.heads, config.frequencies) for _ in range(config.layers))
    counted = 0
    for window in windows:
        ids = _checked(before, window, config, context)
        for start in range(0, ids.size, cache.prefill_chunk):
            piece = ids[start : start + cache.prefill_chunk]
            tokens = np.zeros((1, cache.prefill_chunk), np.int32)
            tokens[0, : piece.size] = piece
            bounds = np.array([start, piece.size, len(before)], np.int32)
            pool, sums = _add_chunk(weights, pool, sums, tokens, bounds, config=config)
            # Work that is queued but not done would make the progress a lie and Ctrl-C slow.
            jax.block_until_ready(sums)
            counted += piece.size - (len(before) if start == 0 else 0)
            if progress is not None:
                progress(counted)
    info = StatsInfo.of_model(config, revision=revision, tokens=counted, dtype=dtype)
    stats = QueryStats.from_sums(sums, info)
    if not all(np.isfinite(array).all() for array in jax.tree.leaves(stats)):
        raise ValueError(f"the forward pass in {dtype} gave queries that are not finite; use float32 weights")
    return stats


def _one_row(context: int, chunk: int | None, dtype: str) -> CacheConfig:
    on_cpu = jax.default_backend() == "cpu"
    return CacheConfig(
        blocks=-(-context // CacheConfig.block_size),
        context=context,
        dtype="float32" if on_cpu else dtype,
        prefill_chunk=min(context, (128 if on_cpu else 512) if chunk is None else chunk),
    )


def default_context(config: ModelConfig) -> int:
    """Return the tokens of a window that nobody chose: 2048, or the model's own context where that is shorter."""
    return min(config.context, CONTEXT)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pool")
def _add_chunk(
    weights: model.Weights,
    pool: KVPool,
    sums: tuple[QuerySums, ...],
    tokens: Int[Array, "1 T"],
    bounds: Int[Array, "3"],
    *,
    config: ModelConfig,
) -> tuple[KVPool, tuple[QuerySums, ...]]:
    """Run the next tokens of a window. ``bounds``: their first position, how many are real, positions not to count."""
    start, count, skipped = bounds
    steps = jnp.arange(tokens.shape[1])
    positions = (start + steps)[None]
    real = (steps < count)[None]
    table = jnp.arange(1, pool.k[0].shape[0])[None]
    paged = decode.paged_attend(table, jnp.where(real, positions, -1))

    def attend(state: tuple[KVPool, tuple[QuerySums, ...]], layer: int, heads: model.Heads) -> Any:
        pool, sums = state
        pool, out = paged(pool, layer, heads)
        added = sums[layer].add(heads.q, real & (positions >= skipped))
        return (pool, (*sums[:layer], added, *sums[layer + 1 :])), out

    state, _ = model.forward(weights, config, tokens, positions, attend, (pool, sums))
    return state


def _checked(before: list[int], window: Sequence[int], config: ModelConfig, context: int) -> np.ndarray:
    """Return a window's ids after those before it; the model would take an id out of range for another."""
    ids = np.concatenate([before, np.asarray(window)]).astype(np.int64)
    if ids.size == len(before):
        raise ValueError("a window has no token; leave empty windows out")
    if ids.size > context:
        raise ValueError(f"a window has {ids.size} tokens, BOS included, and context={context}; cut it or raise that")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"token {wrong} is not in the vocabulary of {config.vocab_size}; check the tokenizer")
    return ids


@dataclasses.dataclass(frozen=True)
class Concentration:
    """How far the queries of each head point one way: R, from 0 (any way) to 1 (always the same).

    Attributes:
      strongest: float64 [L, H], ``|mu_f| / nu_f`` in the band f whose ``nu_f = E[|q_f|]`` is the head's largest.
      whole: float64 [L, H], over all bands together: the length of the mean query, ``|mu|``, over that of the vector
        of mean magnitudes, ``|nu|``, both Euclidean. So it follows from a file of statistics alone. ``|nu|`` is at
        most the mean length of a query, so the mean resultant length ``|E[q]| / E[|q|]`` is lower: on the demo model
        0.89 where this is 0.92, in the median head.
    """

    strongest: np.ndarray
    whole: np.ndarray

    @classmethod
    def of(cls, stats: QueryStats) -> Concentration:
        """Return the concentration of every head."""
        magnitude = np.asarray(stats.q_abs_mean, np.float64)
        by_band = stats.concentration()
        band = magnitude.argmax(axis=-1)[..., None]
        length = np.linalg.norm(by_band * magnitude, axis=-1)
        return cls(
            strongest=np.take_along_axis(by_band, band, axis=-1)[..., 0],
            whole=length / np.maximum(np.linalg.norm(magnitude, axis=-1), np.finfo(np.float64).tiny),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the shares of heads above 0.95, of the model and layer by layer, for ``json.dumps``."""
        named = {"strongest_band": self.strongest, "whole_vector": self.whole}
        layers = [
            {"layer": layer, **{name: _share(r[layer]) for name, r in named.items()}}
            for layer in range(len(self.whole))
        ]
        return {"threshold": CONCENTRATED, **{name: _share(r) for name, r in named.items()}, "layers": layers}

    def plot(self, path: str | Path, title: str = "", **options: Any) -> None:
        """Draw R by layer and head.

        Args:
          path: the picture; its ending says the format.
          title: stands above.
          options: for matplotlib's ``Figure.savefig``.

        Raises:
          ImportError: matplotlib, of the extra ``plot``, is not installed.
        """
        from matplotlib.figure import Figure

        height = 1.6 + min(8, 0.16 * len(self.whole))
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, r, name in zip(axes, (self.strongest, self.whole), ("strongest band", "whole vectors"), strict=True):
            image = axis.imshow(r, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
            axis.set_title(f"{name}: {_share(r):.0%} above {CONCENTRATED}")
            axis.set_xlabel("query head")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.yaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("layer")
        figure.colorbar(image, ax=axes, label="concentration R")
        figure.suptitle(title)
        figure.savefig(path, **options)


def _share(r: np.ndarray) -> float:
    return float(np.mean(r > CONCENTRATED))
