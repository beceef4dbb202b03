"""``python -m jaxkv.blend check``: what blending costs on a model and texts of one's own, before it is relied on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv import cli, plots

FAILED = 1
"""Exit code of a verdict against blending."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    top = argparse.ArgumentParser(
        prog="python -m jaxkv.blend", description="Documents reused in any order.", allow_abbrev=False
    )
    parser = top.add_subparsers(dest="command", required=True, metavar="check").add_parser(
        "check",
        help="measure KL and top-1 agreement to full prefill",
        description="Blend your documents and compare with full prefill. Each document is last in one prompt, behind "
        "all others, and its own next tokens are scored. Exit code 0: mean KL is at most --threshold; 1: it is not.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what to measure").add_argument
    add("--model", help="folder with safetensors, .gguf file or hub id (default: SmolLM2-135M-Instruct)")
    add("--documents", "-d", nargs="+", required=True, metavar="FILE", help="UTF-8 texts, two or more; - reads stdin")
    add("--tokens", type=int, default=256, metavar="N", help="of each document, at most (default: 256)")
    add("--continuation", type=int, default=64, metavar="N", help="tokens that are scored (default: 64)")
    add("--ratios", type=float, nargs="+", default=[0.05, 0.15, 0.3, 0.5], metavar="R", help="to measure at, beside 0")
    add("--prepare", choices=("alone", "bos"), default="alone", help="what documents are prefilled behind: nothing, or "
        "a BOS whose KV is dropped (default: alone)")  # fmt: skip
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the weights (default: "
        "float32 on a CPU, else bfloat16)")  # fmt: skip
    add = parser.add_argument_group("verdict").add_argument
    add("--ratio", type=float, default=0.15, metavar="R", help="that you mean to use (default: 0.15)")
    add("--threshold", type=float, default=0.1, metavar="NATS", help="most mean KL there (default: 0.1)")
    add = parser.add_argument_group("output").add_argument
    add("--plot", metavar="FILE", help="draw KL by ratio: .png, .svg, .pdf")
    add("--json", action="store_true", help="the report as one JSON object on stdout, and nothing else there")
    add("--quiet", "-q", action="store_true", help="no progress on stderr")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    ratios = _checked(args)
    from jaxkv import corpus

    texts = corpus.open_texts(args.documents)
    progress = cli.Progress(not args.quiet)
    try:
        report = _measure(args, ratios, texts, progress)
    finally:
        progress.close()
    if args.plot is not None:
        _plot(report, args.plot)
    print(json.dumps(report, ensure_ascii=False) if args.json else _text(report), flush=True)
    return 0 if report["passed"] else FAILED


def _checked(args: argparse.Namespace) -> list[float]:
    """Return the ratios to measure, having refused what cannot be done."""
    for name in ("tokens", "continuation"):
        # Of a continuation all but the last token are answered to.
        least = 2 if name == "continuation" else 1
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least {least}")
    for ratio in (*args.ratios, args.ratio):
        if not 0 <= ratio <= 1:
            raise ValueError(f"recompute ratio {ratio} must be from 0 to 1")
    if not args.threshold > 0:
        raise ValueError(f"--threshold {args.threshold} must be above 0 nats")
    if args.plot is not None:
        plots.check(args.plot)
    return sorted({0.0, args.ratio, *args.ratios})


def _measure(
    args: argparse.Namespace, ratios: list[float], texts: Sequence[Any], progress: cli.Progress
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxkv import blend_quality, corpus, weights
    from jaxkv.blend_layout import check_model
    from jaxkv.tokenizer import Tokenizer

    path = weights.locate(args.model)
    check_model(weights.read_config(path))
    cli.keep_compiled_programs()
    progress.say("loading the model")
    tokenizer = Tokenizer.load(path)
    size = args.tokens + args.continuation
    # An empty text has been refused, so each has a window.
    documents = [np.asarray(next(corpus.windows(tokenizer, [text], size)), np.int32) for text in texts]
    prompts = blend_quality.rotations(documents, args.tokens, args.continuation)
    automatic = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config, loaded = weights.load(path, jnp.dtype(automatic if args.dtype == "auto" else args.dtype))
    bos = corpus.first_token(tokenizer, config)
    most = 1 + max(sum(ids.size for ids in passages) + rest.size for passages, rest in prompts)
    if most > config.context:
        raise ValueError(f"a prompt has {most} tokens, and the model was made for {config.context}; lower --tokens")
    start = time.perf_counter()
    judge = blend_quality.Judge(jax.device_put(loaded), config, most=most, bos=bos, behind_bos=args.prepare == "bos")
    measured = blend_quality.measure(
        judge, prompts, ratios, progress=lambda done: progress.say(f"{done} of {len(prompts)} prompts")
    )
    kl = {one.ratio: one.kl for one in measured}
    return {
        "model": config.name,
        "documents": [
            {"name": text.name, "tokens": int(passages[-1].size)}
            for text, (passages, _) in zip(texts, prompts, strict=True)
        ],
        "prompts": len(prompts),
        "scored_tokens": sum(int(rest.size) - 1 for _, rest in prompts),
        "prepare": args.prepare,
        "bos": bos,
        "ratios": [dataclasses.asdict(one) for one in measured],
        "ratio": args.ratio,
        "threshold": args.threshold,
        "passed": kl[args.ratio] <= args.threshold,
        "least_ratio_that_passes": next((ratio for ratio in ratios if kl[ratio] <= args.threshold), None),
        "seconds": time.perf_counter() - start,
    }


def _text(report: dict[str, Any]) -> str:
    sizes = ", ".join(str(document["tokens"]) for document in report["documents"])
    work = (
        f"{report['model']}: {len(report['documents'])} documents of {sizes} tokens, {report['prompts']} prompts, "
        f"{report['scored_tokens']} tokens scored; {report['seconds']:.1f} s"
    )
    out = [work, "recomputed        KL   top-1   at random: KL   top-1"]
    for row in report["ratios"]:
        line = f"{row['ratio']:>10.0%}  {row['kl']:>8.4f}  {row['top1']:>6.1%}"
        if row["random_kl"] is not None:
            line += f"       {row['random_kl']:>8.4f}  {row['random_top1']:>6.1%}"
        out.append(line + ("   plain reuse" if row["ratio"] == 0 else ""))
    kl = next(row["kl"] for row in report["ratios"] if row["ratio"] == report["ratio"])
    verdict = "at most" if report["passed"] else "above"
    out.append(f"at {report['ratio']:.0%} the mean KL is {kl:.4f}, {verdict} the threshold of {report['threshold']:g}")
    if not report["passed"]:
        least = report["least_ratio_that_passes"]
        none = "no ratio that was measured passes; compute these documents afresh"
        out.append(none if least is None else f"{least:.0%} passes")
    return "\n".join(out)


def _plot(report: dict[str, Any], path: str | Path) -> None:
    """Draw KL by ratio, chosen and at random, and the threshold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    rows = report["ratios"]
    axes.plot([row["ratio"] for row in rows], [row["kl"] for row in rows], "o-", color="#2a6fbb", label="furthest off")
    random = [row for row in rows if row["random_kl"] is not None]
    axes.plot(
        [row["ratio"] for row in random],
        [row["random_kl"] for row in random],
        "s--",
        color="#999999",
        label="at random",
    )
    axes.axhline(report["threshold"], color="#b2452a", linewidth=1, label="threshold")
    axes.set_xlabel("share of cached tokens recomputed")
    axes.set_ylabel("KL to full prefill, nats a token")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(report["model"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
