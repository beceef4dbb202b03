"""Decode speed of Qwen3-8B in bfloat16 on chips that are not there: bytes and operations over what a chip does of them.

    python scripts/roofline.py                                              # by the shapes of arrays
    scripts/aot_env.sh .venv-aot && .venv-aot/bin/python scripts/roofline.py    # by what compilers count

A prediction, which no device has confirmed: the time of each part of a round is that of its bytes or that of its
operations, whichever is longer, and the parts run one after another. Launches, and whatever a kernel falls short of
the chip's public figures, are not in it. What the compilers' counts are worth is in ``roofline_compiled.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
from typing import Any

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1])]


def _installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


COMPILERS = _installed("nvidia", "jax_plugins") and _installed("nvidia.cu13", "jax_plugins.xla_cuda13")
if COMPILERS:
    # Before anything that imports JAX.
    import roofline_compiled

import roofline_arithmetic as arithmetic  # noqa: E402
from roofline_arithmetic import CHIPS, QWEN3_8B, Case, Chip  # noqa: E402

CONTEXT, BUDGET, INTERVAL = 32768, 3072, 128
BATCHES = (1, 8, 32)
MODES = ("compiled", "arithmetic")


def main() -> int:
    """Print the predictions, by chip and batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", action="append", choices=list(CHIPS), help="a chip (default: all)")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--mode", choices=MODES, help="default: compiled where the compilers are, else arithmetic")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write all that was counted")
    args = parser.parse_args()
    chips = args.chip or list(CHIPS)
    absent = [name for name in chips if not compiler(CHIPS[name])]
    if args.mode == "compiled" and absent:
        parser.error(
            f"no compiler for {', '.join(absent)}: scripts/aot_env.sh makes the environment that has them; "
            "--mode arithmetic needs none"
        )
    print(f"{QWEN3_8B.name} bfloat16, rounds of {INTERVAL} steps: predictions, no measurements")
    results: list[dict[str, Any]] = []
    limits: list[dict[str, Any]] = []
    for name in chips:
        mode = args.mode or ("arithmetic" if name in absent else "compiled")
        print(header(name, mode))
        for rows in args.batch:
            pair = [one(mode, CHIPS[name], case, results) for case in cases(rows)]
            print("\n".join(lines(pair)), flush=True)
            results += pair
        most = largest(CHIPS[name])
        print(most["text"], flush=True)
        limits.append(most)
        if args.json:
            args.json.write_text(
                json.dumps({"model": QWEN3_8B.name, "results": results, "most_rows": limits}, indent=1)
            )
    return 0


def compiler(chip: Chip) -> bool:
    """Return whether a compiler for a chip is installed here."""
    # The way to libtpu leads through the module that needs NVIDIA's assembler too.
    return COMPILERS and (not chip.kind.startswith("TPU") or _installed("libtpu"))


def cases(rows: int) -> list[Case]:
    """Return a round at the whole context, and one within the budget."""
    return [Case(rows, CONTEXT, INTERVAL), Case(rows, BUDGET, INTERVAL, BUDGET)]


def one(mode: str, chip: Chip, case: Case, before: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the prediction of one case; what was counted for a chip that stands for this one is not counted again."""
    found = by_shapes = arithmetic.parts(QWEN3_8B, case)
    counted = None
    # What no chip can hold is not worth minutes of compiling.
    if mode == "compiled" and any(fits(chip, other) for other in cases(case.rows)):
        key = chip.compiled_as or chip.kind, case.rows
        counted = next((r["counted"] for r in before if r["counted"] and r["counted"]["key"] == key), None)
        counted = counted or {"key": key, **_counted(*key)}
        found = {**by_shapes, **_of_case(counted, case)}
    return {
        "chip": chip.name,
        "mode": mode,
        "rows": case.rows,
        "method": "none" if case.budget is None else "budget",
        "held_bytes": arithmetic.held_bytes(QWEN3_8B, case),
        "fits": fits(chip, case),
        "bytes": {name: part.bytes for name, part in found.items()},
        "operations": {name: part.operations for name, part in found.items()},
        "by_shapes": {name: part.bytes for name, part in by_shapes.items()},
        "counted": counted,
        **arithmetic.predict(chip, case, found),
    }


def fits(chip: Chip, case: Case) -> bool:
    """Return whether a chip has memory for the weights and the rows' blocks, and nothing else."""
    return arithmetic.held_bytes(QWEN3_8B, case) <= chip.memory


def _counted(kind: str, rows: int) -> dict[str, Any]:
    counts = roofline_compiled.counts(kind, QWEN3_8B, *cases(rows))
    return {name: dataclasses.asdict(count) for name, count in counts.items()}


def _of_case(counted: dict[str, Any], case: Case) -> dict[str, arithmetic.Part]:
    step, compaction = counted["step"], counted["compaction"]
    made = {"model": arithmetic.Part(case.steps * step["bytes"], case.steps * step["operations"])}
    if case.budget is not None:
        made["selection"] = arithmetic.Part(compaction["bytes"], compaction["operations"], "float32")
    return made


def largest(chip: Chip) -> dict[str, Any]:
    """Return how many rows fit with and without a budget, and tokens/s by shapes there."""
    found: dict[str, Any] = {"chip": chip.name, "largest": {}}
    for case in cases(1):
        rows = arithmetic.most_rows(QWEN3_8B, chip, case)
        rate = 0.0
        if rows:
            case = Case(rows, case.start, case.steps, case.budget)
            rate = arithmetic.predict(chip, case, arithmetic.parts(QWEN3_8B, case))["tokens_per_second"]
        found["largest"]["none" if case.budget is None else "budget"] = {"rows": rows, "tokens_per_second": rate}
    none, budget = found["largest"]["none"], found["largest"]["budget"]
    ratio = f", {budget['tokens_per_second'] / none['tokens_per_second']:.1f} times" if none["rows"] else ""
    found["text"] = (
        f"{'':<20} most rows, by shapes: {none['rows']} without a budget ({none['tokens_per_second']:,.0f} tok/s), "
        f"{budget['rows']} with ({budget['tokens_per_second']:,.0f} tok/s){ratio}"
    )
    return found


def header(chip: str, mode: str) -> str:
    """Return the first line of a chip's table."""
    text = (
        f"\n{chip + ', ' + mode:<20} {'rows':>4} {'method':<7} {'GB held':>8} {'tok/s':>9} {'x none':>7} {'ms/step':>8}"
    )
    text += f" {'model':>6} {'attend':>7} {'compact':>8}  bound by"
    return text + ("   model bytes: compiler / shapes; its seconds" if mode == "compiled" else "")


def lines(pair: list[dict[str, Any]]) -> list[str]:
    """Return a table row for each of two results: without a budget and with one.

    Shares of time are of the model's matrices and sampling, of attention, and of the compaction.
    """
    made = []
    for result in pair:
        seconds, whole = result["seconds"], sum(result["seconds"].values())
        start = f"{'':<20} {result['rows']:>4} {result['method']:<7} {result['held_bytes'] / 1e9:>8.1f} "
        if not result["fits"]:
            made.append(f"{start}does not fit into one chip")
            continue
        ratio = (
            f"{result['tokens_per_second'] / pair[0]['tokens_per_second']:>7.2f}" if pair[0]["fits"] else f"{'-':>7}"
        )
        text = f"{start}{result['tokens_per_second']:>9,.1f} {ratio} {1e3 * whole / INTERVAL:>8.2f} "
        text += f"{seconds['model'] / whole:>6.1%} {seconds['attention'] / whole:>7.1%} "
        text += f"{result['compaction_share']:>8.2%}  {_bounds(result['bound'])}"
        made.append(text + _beside(result))
    return made


def _bounds(bound: dict[str, str]) -> str:
    late = [name for name, what in bound.items() if what == "operations"]
    return f"operations: {', '.join(late)}" if late else "bytes"


def _beside(result: dict[str, Any]) -> str:
    if result["counted"] is None:
        return ""
    ratio = result["bytes"]["model"] / result["by_shapes"]["model"]
    known = result["counted"]["step"]["optimal_seconds"]
    ours = result["seconds"]["model"] / INTERVAL
    said = "" if known is None else f", {1e3 * known:.2f} ms a step beside our {1e3 * ours:.2f}"
    return f"   {ratio:.3f}{said}"


if __name__ == "__main__":
    sys.exit(main())
