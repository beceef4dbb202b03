"""How far the queries of a model point one way, and what follows: R, the trigonometric series, other texts.

    python scripts/concentration.py --text pydoc_data.topics --text anarchism=FOLDER --plot docs/concentration.png

* R = |E q_f| / E|q_f| before RoPE, in the band with the largest E|q_f| of each head, from the packaged statistics.
* Pearson correlation of the trigonometric series with true logits. Queries are those of the 128 tokens after a prefill,
  keys the cached ones but the first (an attention sink, far from all others). *By key*: over all pairs of a query and a
  key, between q . k after RoPE and the series with the mean query in the place of q and the key itself. *By query*: the
  same for each query alone, averaged. *By distance*: between the mean true logit at each distance and the series of the
  mean query and the mean key, which is all that a distance can say.
* Cosines between the mean queries of different texts, head by head, and between those of a file and a row's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from quality import Reader, prefilled
from quality_steps import CHUNK, Row, run
from quality_texts import PYTHON, named

from jaxkv import calibration, corpus, rope
from jaxkv.stats import QueryStats, StatsInfo
from jaxkv.stats_packaged import packaged


def complex_bands(vectors: np.ndarray) -> np.ndarray:
    """Return D-vectors as F complex numbers, half-split: complex128 [.., F]."""
    real, imag = np.split(np.asarray(vectors, np.float64), 2, axis=-1)
    return real + 1j * imag


def pearson(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the correlation of x and y along the last axis."""
    x, y = (z - z.mean(axis=-1, keepdims=True) for z in (x, y))
    return (x * y).sum(axis=-1) / np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))


def correlations(q: np.ndarray, k: np.ndarray, mean: np.ndarray, omega: np.ndarray) -> dict[str, np.ndarray]:
    """Return the correlations of one layer, each [H].

    Args:
      q: [H, Q, D], queries after RoPE at positions T to T + Q - 1.
      k: [K, T, D], keys after RoPE at positions 0 to T - 1. The first is left out.
      mean: complex [H, F], the mean query before RoPE.
      omega: [F], radians a token.
    """
    heads, count, _ = q.shape
    keys, positions = complex_bands(k[:, 1:]), np.arange(1, k.shape[1])
    at = k.shape[1] + np.arange(count)
    series = mean[:, None] * np.exp(1j * np.outer(at, omega))
    # The real part of conj(q) k, summed over bands, is the dot product of the D-vectors.
    own = np.repeat(keys, heads // keys.shape[0], axis=0).swapaxes(1, 2)
    true = (complex_bands(q).conj() @ own).real
    predicted = (series.conj() @ own).real
    distance = at[:, None] - positions
    centre = np.repeat((keys * np.exp(-1j * np.outer(positions, omega))).mean(axis=1), heads // len(keys), axis=0)
    pairs = np.bincount(distance.ravel())
    far = np.flatnonzero(pairs >= count // 2)
    by_distance = np.stack([np.bincount(distance.ravel(), row.ravel())[far] / pairs[far] for row in true])
    curve = ((mean.conj() * centre)[:, None] * np.exp(-1j * np.outer(far, omega))).sum(axis=-1).real
    return {
        "by_key": pearson(true.reshape(heads, -1), predicted.reshape(heads, -1)),
        "by_query": pearson(true, predicted).mean(axis=1),
        "by_distance": pearson(by_distance, curve),
    }


def mean_queries(stats: QueryStats) -> np.ndarray:
    """Return mu, complex [L, H, F]."""
    return np.asarray(stats.q_mean_real, np.float64) + 1j * np.asarray(stats.q_mean_imag, np.float64)


def cosines(one: QueryStats, other: QueryStats) -> np.ndarray:
    """Return the cosine between the mean queries of every head, [L, H]."""
    x, y = mean_queries(one), mean_queries(other)
    return (x.conj() * y).real.sum(-1) / (np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1))


def summary(values: np.ndarray) -> dict[str, float]:
    """Return what a table says of the heads of a model."""
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "tenth percentile": float(np.percentile(values, 10)),
        "least": float(values.min()),
    }


def series(reader: Reader, row: Row, ids: np.ndarray, mean: np.ndarray) -> dict[str, np.ndarray]:
    """Return the correlations of a passage, each [L, H]. ``ids`` are the 128 tokens after those in ``row``."""
    after, _ = run(reader.weights, reader.config, row, ids)
    omega = rope.inverse_frequencies(reader.config.rope, reader.config.head_dim)
    layers = []
    assert after.observed.last_queries is not None
    for layer, queries in enumerate(after.observed.last_queries):
        pages = np.asarray(row.pool.k[layer])[row.table[0]].swapaxes(0, 1)
        keys = pages.reshape(pages.shape[0], -1, pages.shape[-1])[:, : row.length]
        layers.append(correlations(np.asarray(queries)[0], keys, mean[layer], omega))
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


def measure(reader: Reader, texts: dict[str, str], passages: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summaries for ``json.dumps``, and the arrays [L, H] that are drawn."""
    stats = packaged(reader.config)
    if stats is None:
        raise ValueError("no query statistics of this model come with the package")
    mean = mean_queries(stats)
    found: dict[str, list[np.ndarray]] = {}
    online, own = [], {}
    info = StatsInfo.of_model(reader.config)
    for name, text in texts.items():
        windows = []
        for index in range(passages):
            ids = reader.passage(text, index, passages, tokens + CHUNK)
            row = prefilled(reader, ids[:tokens], CHUNK, mass=False)
            for kind, values in series(reader, row, ids[tokens:], mean).items():
                found.setdefault(kind, []).append(values)
            assert row.observed.query_sums is not None
            online.append(cosines(stats, QueryStats.from_sums(row.observed.query_sums, info)))
            windows.append(ids[1:tokens].tolist())
        bos = corpus.first_token(reader.tokenizer, reader.config)
        own[name] = calibration.calibrate(reader.weights, reader.config, windows, context=tokens, bos=bos)
    strongest = calibration.Concentration.of(stats).strongest
    own = {"packaged": stats, **own}
    means = {kind: np.mean(values, axis=0) for kind, values in found.items()}
    report = {
        "R in the strongest band": {**summary(strongest), "above 0.9": float((strongest > 0.9).mean())},
        "Pearson r": {kind: summary(values) for kind, values in means.items()},
        "cosine of two texts": {
            f"{one}, {other}": summary(cosines(own[one], own[other])) for one, other in itertools.combinations(own, 2)
        },
        "cosine of packaged and a row's own": summary(np.stack(online)),
        "passages": len(online),
    }
    return report, {"R": strongest, **means}


def plot(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Draw R and the correlations by layer and head."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    titles = {"R": "R, strongest band", "by_key": "r by key", "by_query": "r by query", "by_distance": "r by distance"}
    grid = figure.subplots(1, len(arrays), sharey=True)
    for axes, (name, values) in zip(grid, arrays.items(), strict=True):
        image = axes.imshow(values, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axes.set_title(f"{titles[name]}\nmean {values.mean():.2f}", fontsize=9)
        axes.set_xlabel("query head")
        axes.set_xticks(range(0, values.shape[1], 2))
    grid[0].set_ylabel("layer")
    figure.colorbar(image, ax=grid)
    figure.savefig(path, dpi=100)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="python scripts/concentration.py", description=__doc__.splitlines()[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="bfloat16", help="of the weights; the pool is float32")
    made.add_argument("--text", action="append", help="as for quality.py")
    made.add_argument("--passages", type=int, default=4, help="of each text")
    made.add_argument("--tokens", type=int, default=2048, help="tokens of a passage before the queries")
    made.add_argument("--plot", type=Path, help="draw to this file")
    return made


def main() -> int:
    """Measure, draw and print JSON."""
    args = parser().parse_args()
    texts = named(args.text or [PYTHON])
    report, arrays = measure(Reader.load(args.model, args.dtype), texts, args.passages, args.tokens)
    if args.plot is not None:
        plot(arrays, args.plot)
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
