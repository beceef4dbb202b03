"""Throughput of the engine in a pool of fixed bytes: what freed blocks buy when they let more rows in.

    python scripts/bench_engine.py                     # a table on stderr, JSON lines on stdout
    python scripts/bench_engine.py --requests 16 --tokens 256 --rows 4

All requests are there at the start. The pool holds ``--rows`` requests that keep everything. Four cases run one after
another in processes of their own: method none at as many rows as the pool holds; triattention at the same number;
triattention at as many rows as fit by its budget; and none at that number, which has to preempt. tokens/s count
generated tokens over the whole run, prefill, compaction and swaps inside, compilation outside. Latency is the time
between two tokens of a request as its reader sees them, and the time to its first token from the start.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv import cli


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/bench_engine.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for jaxkv.generate (default: the demo model)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens that each generates")
    parser.add_argument("--rows", type=int, default=4, help="requests that the pool holds without compression")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--round-steps", type=int, default=32)
    parser.add_argument("--cases", nargs="+", default=["none", "same", "more", "preempting"], help="of these four")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case in a process of its own; print JSON lines and a table."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _one(args) if args.one else _all(args, list(sys.argv[1:] if argv is None else argv)))


def _all(args: argparse.Namespace, words: list[str]) -> None:
    results = []
    for case in args.cases:
        done = subprocess.run(
            [sys.executable, __file__, *words, "--one", case], stdout=subprocess.PIPE, text=True, check=True
        )
        print(done.stdout, end="", flush=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    print(table(results), file=sys.stderr)


def rows_of(case: str, args: argparse.Namespace) -> int:
    """Return how many rows a case has: what the pool holds, without compression or with it."""
    if case in ("none", "same"):
        return int(args.rows)
    slots = args.rows * (args.prompt + args.tokens)
    return min(args.requests, int(slots // max(args.prompt, args.budget + args.interval)))


def _one(args: argparse.Namespace) -> None:
    from jaxkv.compression import CompressionConfig
    from jaxkv.dims import ceil_div
    from jaxkv.llm import LLM

    cli.keep_compiled_programs()
    compressed = args.one in ("same", "more")
    compression = CompressionConfig(method="triattention", budget=args.budget, interval=args.interval)
    llm = LLM(
        args.model,
        rows=rows_of(args.one, args),
        pool_blocks=args.rows * ceil_div(args.prompt + args.tokens, 16),
        context=args.prompt + args.tokens + 1,
        compression=compression if compressed else None,
    )
    print(json.dumps({"case": args.one, **measure(llm, args)}))


def measure(llm: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run all requests through an engine and return throughput, latencies and counts."""
    import pydoc_data.topics

    from jaxkv.request import Request
    from jaxkv.sampling import SamplingParams

    text = llm.encode("\n".join(pydoc_data.topics.topics.values()), raw=True)
    starts = np.linspace(0, len(text) - args.prompt - 1, args.requests).astype(int)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    requests = [Request(text[start : start + args.prompt], params) for start in starts]
    engine = llm.engine(requests)
    for request in requests:
        engine.add(request)
    start = time.perf_counter()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    gaps: list[float] = []
    stalls: list[float] = []
    while engine.has_work:
        for event in engine.step(args.round_steps):
            now = time.perf_counter() - start
            if event.token_ids:
                if event.request_id in last:
                    gaps += [(now - last[event.request_id]) / len(event.token_ids)] * len(event.token_ids)
                    stalls.append(now - last[event.request_id])
                first.setdefault(event.request_id, now)
                last[event.request_id] = now
    seconds = time.perf_counter() - start
    totals = dataclasses.asdict(engine.totals)
    return {
        "rows": engine.cache.rows,
        "pool_blocks": engine.cache.blocks,
        "tokens_per_second": totals["generated_tokens"] / seconds,
        "seconds": seconds,
        "first_token_seconds": percentiles(list(first.values())),
        "inter_token_seconds": percentiles(gaps),
        "longest_wait_seconds": max(stalls, default=0.0),
        **{name: totals[name] for name in ("preemptions", "compactions", "compaction_seconds", "blocks_returned")},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 90th and 99th percentile."""
    return {f"p{at}": float(np.percentile(values, at)) if values else 0.0 for at in (50, 90, 99)}


def table(results: list[dict[str, Any]]) -> str:
    """Return the cases side by side, with their ratio to method none."""
    base = next((r["tokens_per_second"] for r in results if r["case"] == "none"), None)
    lines = ["case        rows  tokens/s  ratio   ms/token p50, p99   first token p50, p99   preemptions  compactions"]
    for r in results:
        ratio = f"{r['tokens_per_second'] / base:5.2f}" if base else "    -"
        gap, first = r["inter_token_seconds"], r["first_token_seconds"]
        lines.append(
            f"{r['case']:11} {r['rows']:4}  {r['tokens_per_second']:8.1f}  {ratio}   "
            f"{1e3 * gap['p50']:7.1f} {1e3 * gap['p99']:8.1f}   {first['p50']:10.1f} {first['p99']:9.1f} s"
            f"   {r['preemptions']:11}  {r['compactions']:11}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
