"""``python -m jaxkv.plan``: what fits on a device, before anyone runs anything."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxkv import cli

if TYPE_CHECKING:
    from jaxkv.compression import CompressionConfig
    from jaxkv.planner import Plan

GIB, MIB = 2**30, 2**20


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxkv.plan",
        description="Say what a model takes of a device's memory: weights, KV pool, temporaries and reserve; "
        "when it is full without compression, how many rows and how long a trace fit with it. Nothing is loaded.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("what is planned").add_argument
    add("--model", required=True, metavar="ID", help="a known model, a config.json, a folder, .gguf file or hub id")
    add(
        "--device",
        required=True,
        metavar="NAME",
        help="rtx4090, rtx3090, a100-80g, h100, h200, v5e, v6e, or a GPU's size",
    )
    add("--weights", default="bfloat16", metavar="TYPE", help="int4, int8, bfloat16 (default), float16 or float32")
    add("--kv-dtype", default="bfloat16", metavar="TYPE", help="of the pool (default: %(default)s)")
    add("--batch", type=int, default=1, metavar="N", help="rows at once (default: %(default)s)")
    add("--context", type=int, metavar="N", help="tokens of a row at most (default: the model's context)")
    add("--reserve", metavar="SIZE", help="memory that is left alone, as 640M or 0 (default: by the device)")
    add = parser.add_argument_group("compression").add_argument
    add("--method", default="none", metavar="NAME", help="none (default), triattention or another of jaxkv.generate's")
    add("--budget", type=_budget, metavar="N", help="slots a row keeps, or a ratio of it as 0.25 (default: 2048)")
    add("--interval", type=int, metavar="N", help="decoded tokens between two compactions (default: 128)")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object on stdout in place of the table")
    add("--plot", metavar="FILE", help="draw memory against tokens: .png, .svg or .pdf")
    return parser


def _budget(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    compression = _compression(args)
    from jaxkv import facts, planner, plots

    if args.plot is not None:
        plots.check(args.plot)
    plan = planner.Plan(
        model=facts.read(args.model),
        device=planner.device(args.device, _reserve(args.reserve)),
        weights=args.weights,
        kv_dtype=args.kv_dtype,
        compression=compression,
        rows=args.batch,
        context=args.context,
    )
    report = plan.to_json()
    if args.plot is not None:
        plots.memory_of_tokens(plan, args.plot)
    print(json.dumps(report, ensure_ascii=False) if args.json else table(plan))


def _compression(args: argparse.Namespace) -> CompressionConfig:
    from jaxkv.compression import CompressionConfig

    given = {name: getattr(args, name) for name in ("budget", "interval") if getattr(args, name) is not None}
    if given and args.method == "none":
        raise ValueError(f"--{next(iter(given))} is for a method that compresses; give --method triattention as well")
    return CompressionConfig(method=args.method, **given)


def _reserve(text: str | None) -> int | None:
    if text is None or text.strip() == "0":
        return None if text is None else 0
    from jaxkv.sizing import parse_bytes

    return parse_bytes(text)


def table(plan: Plan) -> str:
    """Return a plan as lines of text."""
    from jaxkv import planner

    device, sizes, held = plan.device, plan.sizes(plan.rows, plan.tokens), plan.cache
    largest = max(sizes.temporaries, key=sizes.temporaries.__getitem__)
    entries = [
        ("weights", sizes.weights, f"{plan.weights}, {plan.model.parameters / 1e9:.2f} billion parameters"),
        ("pool", sizes.pool, f"{plan.rows} x {_slots(plan)} in {sizes.blocks + 1} blocks, {plan.kv_dtype}"),
        ("temporaries", sizes.scratch, f"of the largest program, {largest}"),
        ("reserve", sizes.reserve, "driver, the process's context and its code"),
        ("in all", sizes.total, "fits" if sizes.total <= device.memory else "does not fit"),
        ("memory", device.memory, device.name),
    ]
    lines = [f"{plan.model.name} on {device.name}, batch {plan.rows}, {plan.tokens:,} tokens of context", ""]
    lines += [f"  {name:<12}{size / GIB:>9.3f} GiB   {what}" for name, size, what in entries]
    lines += ["", f"a token: {held.per_token:,} bytes{_padding(plan)}"]
    lines += _answers(plan)
    lines += [*planner.without_help(plan), *_preallocation(plan)]
    return "\n".join(lines)


def _slots(plan: Plan) -> str:
    budget = plan.budget
    if budget is None or plan.tokens < budget.trigger:
        return f"{plan.tokens:,} slots"
    return f"{budget.trigger:,} slots (budget {budget.b_row:,} and interval {budget.interval:,})"


def _padding(plan: Plan) -> str:
    padding = plan.cache.padding
    return f", {padding:,} of them padding to the 128 columns of a TPU's pages" if padding else ""


def _answers(plan: Plan) -> list[str]:
    full, longest = plan.tokens_until_full, plan.max_trace_tokens
    ends = "never: no layer keeps its tokens" if full is None else f"at {full:,} tokens a row"
    if full is not None and full >= plan.tokens:
        ends += f", beyond the context of {plan.tokens:,}"
    trace = "the context ends it" if longest is None else f"{longest:,} tokens"
    kept = "every token kept" if plan.budget is None else f"{plan.compression.method}"
    return [
        f"full without compression: {ends}",
        f"longest trace ({kept}): {trace}",
        f"largest batch ({kept}, {plan.tokens:,} tokens each): {plan.max_batch}",
    ]


def _preallocation(plan: Plan) -> list[str]:
    from jaxkv import planner

    if plan.device.platform != "gpu":
        return []
    share, taken = planner.memory_fraction(plan), planner.PREALLOCATED
    size = f"{taken * plan.device.memory / GIB:.1f} GiB"
    lines = [
        f"JAX takes {taken:.0%} of the card at its first operation: nvidia-smi shows {size} from then on, used or not"
    ]
    if share is not None:
        lines.append(f"this plan needs more than that: set XLA_CLIENT_MEM_FRACTION={share}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
