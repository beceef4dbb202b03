"""What compaction costs: scoring beside a plain sum, a long trace's speed and memory over time, and the spikes.

    python scripts/bench_compaction.py score            # scoring one row against a contiguous sum of the same bytes
    python scripts/bench_compaction.py trace --plot docs/latency.png
    python scripts/bench_compaction.py dtypes           # what bfloat16 weights and pools do to the logits

Each prints one JSON object. The model is the demo model. `block_until_ready` is inside every clock, compile time
outside.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from jaxkv import LLM, CacheConfig, KVPool, SamplingParams, cli, decode, policies
from jaxkv.compact import compact as move
from jaxkv.compact import plan
from jaxkv.compression import CompressionConfig
from jaxkv.policies.base import Cached, Observed
from jaxkv.request import Request
from jaxkv.select import Budgets, select
from jaxkv.stats_packaged import packaged

PROMPT = "Write a very long story about a lighthouse keeper."


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/bench_compaction.py", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("score", "trace", "dtypes"))
    parser.add_argument("--slots", type=int, default=704, help="slots of the row that is scored")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the trace")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--plot", help="draw the trace's step latency to this file")
    return parser


def main() -> int:
    """Run one benchmark and print it."""
    args = parser().parse_args()
    cli.keep_compiled_programs()
    result = {"score": score, "trace": trace, "dtypes": dtypes}[args.what](args)
    print(json.dumps(result))
    return 0


def timed(function: Callable[..., Any], *args: Any, repeats: int = 30) -> dict[str, float]:
    """Return milliseconds of a jitted function: median, 10th and 90th percentile."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    low, median, high = np.percentile(seconds, [10, 50, 90]) * 1e3
    return {"median_ms": float(median), "p10_ms": float(low), "p90_ms": float(high)}


def score(args: argparse.Namespace) -> dict[str, Any]:
    """Time score, select and move of one row over all layers, and a sum over as many contiguous bytes as scoring
    reads.
    """
    llm = LLM()
    config, slots, block = llm.config, args.slots, 16
    width = -(-slots // block)
    cache = CacheConfig(blocks=width, context=slots, rows=1)
    keys = jax.random.split(jax.random.key(0), config.layers)
    pool = KVPool.create(config, cache)
    pool = KVPool(k=tuple(jax.random.normal(key, pool.k[0].shape) for key in keys), v=pool.v)
    rng = np.random.default_rng(0)
    table = 1 + rng.permutation(width)[None].astype(np.int32)
    length, position = np.full(1, slots, np.int32), np.full(1, 4000, np.int32)
    compression = CompressionConfig(method="triattention", budget=slots - 128)
    policy = jax.device_put(policies.make(compression, config, packaged(config)))
    budgets = Budgets.stack([compression.resolve(40, 8000, block)])

    @jax.jit
    def scores(pool: KVPool, policy: Any) -> Any:
        layers = zip(pool.k, pool.v, range(config.layers), strict=True)
        return [policy.score(Cached(k, v, table, length, position, at), Observed()) for k, v, at in layers]

    picked = jax.jit(lambda found: select(found, length, budgets, "per_head"))
    found = scores(pool, policy)
    plans = jax.jit(lambda keep: plan(keep, jnp.minimum(length, budgets.b_row), table))(picked(found)[0])
    moved = jax.jit(move, donate_argnums=0)
    flat = jnp.concatenate([k[1:].reshape(-1) for k in pool.k])
    result = {
        "slots": slots,
        "bytes_scored": int(flat.nbytes),
        "score": timed(scores, pool, policy),
        "sum": timed(jax.jit(jnp.sum), flat),
        "select": timed(picked, found),
    }
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        pool = jax.block_until_ready(moved(pool, plans))
        seconds.append(time.perf_counter() - start)
    return {**result, "move": {"median_ms": float(np.median(seconds[2:]) * 1e3)}}


def trace(args: argparse.Namespace) -> dict[str, Any]:
    """Generate a long text within a budget; return its speed by windows of 500 tokens, the spikes, and resident
    memory.
    """
    compression = CompressionConfig(method="triattention", budget=args.budget)
    llm = LLM(rows=1, context=args.tokens + 256, compression=compression)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0.7)
    request = Request(llm.encode(PROMPT), params)
    engine = llm.engine([request])
    engine.add(request)
    engine.step()
    process, steps, memory, report = psutil.Process(), [], [], None
    while engine.has_work:
        start = time.perf_counter()
        events = engine.step(1)
        steps.append(time.perf_counter() - start)
        report = events[-1].report or report
        if len(steps) % 500 == 0:
            memory.append(process.memory_info().rss)
    assert report is not None
    milliseconds = np.asarray(steps) * 1e3
    windows = [float(1e3 / np.median(milliseconds[at : at + 500])) for at in range(1000, args.tokens - 1, 500)]
    means = [float(1e3 / np.mean(milliseconds[at : at + 500])) for at in range(1000, args.tokens - 1, 500)]
    if args.plot:
        plot(milliseconds, args.plot)
    return {
        "tokens": args.tokens,
        "budget": args.budget,
        "window_tokens_per_second": windows,
        "window_spread": (max(windows) - min(windows)) / float(np.median(windows)),
        "window_mean_tokens_per_second": means,
        "step_ms": {"median": float(np.median(milliseconds)), "p99": float(np.percentile(milliseconds, 99))},
        "worst_ms": float(milliseconds.max()),
        "compactions": report.compactions,
        "compaction_ms": 1e3 * report.compaction_seconds / report.compactions,
        "compaction_share": report.compaction_seconds / (report.compaction_seconds + report.decode_seconds),
        "blocks_peak": report.blocks_peak,
        "blocks_peak_uncompressed": report.blocks_peak_uncompressed,
        "resident_mib": [value / 2**20 for value in memory],
    }


def plot(milliseconds: np.ndarray, path: str) -> None:
    """Draw the latency of every step, compactions among them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(milliseconds, linewidth=0.5, color="#2a6fbb")
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("milliseconds a step")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def dtypes(_: argparse.Namespace) -> dict[str, Any]:
    """Return the KL of bfloat16 weights and pools to float32, a token, over 1,024 tokens of Python's manual."""
    import pydoc_data.topics

    base: np.ndarray | None = None
    found = {}
    for weights, kv in (("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        llm = LLM(dtype=weights)
        ids = llm.tokenizer.encode(pydoc_data.topics.topics["execmodel"])[:1024]
        logits = _all_logits(llm, ids, kv)
        if base is None:
            base = logits
            continue
        p = jax.nn.log_softmax(base)
        q = jax.nn.log_softmax(logits)
        kl = np.asarray(jnp.sum(jnp.exp(p) * (p - q), axis=-1))
        same = float(np.mean(np.argmax(logits, -1) == np.argmax(base, -1)))
        found[f"weights {weights}, pool {kv}"] = {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "top1": same}
    return found


def _all_logits(llm: LLM, ids: list[int], kv: str) -> np.ndarray:
    """Return logits after every token, through the pool, 128 tokens at a time."""
    from jaxkv import model

    cache = CacheConfig(blocks=len(ids) // 16, context=len(ids), dtype=kv, rows=1)
    pool = KVPool.create(llm.config, cache)
    table = 1 + np.arange(cache.table_width, dtype=np.int32)[None]

    @jax.jit
    def chunk(weights: Any, pool: KVPool, tokens: Any, start: Any) -> Any:
        slots = start + jnp.arange(tokens.shape[1])[None]
        attend = decode.paged_attend(table, slots)
        pool, hidden = model.forward(weights, llm.config, tokens, slots, attend, pool)
        return pool, model.logits(weights, hidden[0])

    rows = []
    for start in range(0, len(ids), 128):
        tokens = np.asarray([ids[start : start + 128]], np.int32)
        pool, logits = chunk(llm.weights, pool, tokens, np.int32(start))
        rows.append(np.asarray(logits))
    return np.concatenate(rows)


if __name__ == "__main__":
    sys.exit(main())
