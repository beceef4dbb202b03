"""How many blocks an eviction frees: alone, with compaction, and at best, on real scores of the demo model.

    python scripts/freed_blocks.py --text pydoc_data.topics --text anarchism=FOLDER --plot docs/freed_blocks.png

A block goes back to an allocator when no head of any layer keeps a slot in it. Passages are prefilled, scored by
TriAttention and selected from; then blocks are counted for block sizes 8 to 256. Beside it stands the arithmetic of
independent survival: with a share p kept, a block of P slots is empty with probability (1 - p)^P when all heads share
one selection, and (1 - p)^(P X) with X independent ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import quality_steps as steps
from quality import Case, Reader, prefilled
from quality_steps import Row
from quality_texts import PYTHON, named

from jaxkv.compression import Mode, RowBudget
from jaxkv.dims import Array, Int, ceil_div
from jaxkv.policies.base import Cached, Observed, Policy
from jaxkv.pool import KVPool
from jaxkv.select import Budgets, select

SIZES = (8, 16, 32, 64, 128, 256)
MODES: tuple[Mode, ...] = ("shared", "per_head", "per_layer_head")


def kept(reader: Reader, row: Row, case: Case) -> np.ndarray:
    """Return which slots of a row each selection keeps: bool [X, T], X selections that share a block."""
    policy = case.policy(reader, seed=0)
    assert policy is not None
    budget = RowBudget(b_row=case.budget, interval=steps.CHUNK, window=case.window, sinks=case.sinks, pinned=0)
    bounds = [jnp.array([x], jnp.int32) for x in (row.length, row.position)]
    keeps = _keeps(row.pool, jnp.asarray(row.table), *bounds, Budgets.stack([budget]), policy, mode=case.mode)
    found = np.concatenate([np.asarray(keep)[0] for keep in keeps])
    return np.stack([np.isin(np.arange(row.length), own) for own in found])


@functools.partial(jax.jit, static_argnames="mode")
def _keeps(
    pool: KVPool,
    table: Int[Array, "1 M"],
    length: Int[Array, "1"],
    position: Int[Array, "1"],
    budgets: Budgets,
    policy: Policy,
    *,
    mode: Mode,
) -> tuple[Int[Array, "1 X S"], ...]:
    scores = []
    for layer, (k, v) in enumerate(zip(pool.k, pool.v, strict=True)):
        scores.append(policy.score(Cached(k, v, table, length, position, layer=layer), Observed()))
    return select(scores, length, budgets, mode)


def freed_alone(mask: np.ndarray, block: int) -> float:
    """Return the share of blocks that are empty for every selection of bool [X, T]."""
    used = np.pad(mask.any(axis=0), (0, -mask.shape[1] % block)).reshape(-1, block).any(axis=1)
    return float(1 - used.mean())


def freed_by_compaction(tokens: int, budget: int, block: int) -> float:
    """Return the share of blocks that come free when survivors slide together."""
    return 1 - ceil_div(budget, block) / ceil_div(tokens, block)


def independent(share: float, block: int, selections: int) -> float:
    """Return the probability that a block is empty if slots survive independently, ``share`` of them."""
    return float((1 - share) ** (block * selections))


def measure(reader: Reader, texts: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each budget, mode and block size: means over passages."""
    masks: dict[tuple[int, Mode], list[np.ndarray]] = {}
    for index in range(args.passages):
        for text in texts.values():
            ids = reader.passage(text, index, args.passages, args.tokens)
            row = prefilled(reader, ids, 0, mass=False)
            for budget in args.budgets:
                for mode in MODES:
                    case = Case("triattention", mode, "packaged", budget=budget)
                    masks.setdefault((budget, mode), []).append(kept(reader, row, case))
    lines = []
    for (budget, mode), own in masks.items():
        for block in SIZES:
            alone = [freed_alone(mask, block) for mask in own]
            share = budget / args.tokens
            selections = own[0].shape[0]
            line = {"tokens": args.tokens, "budget": budget, "mode": mode, "block": block, "passages": len(own)}
            line |= {"alone": float(np.mean(alone)), "least": min(alone), "most": max(alone), "selections": selections}
            line |= {"compacted": freed_by_compaction(args.tokens, budget, block), "ideal": 1 - share}
            lines.append({**line, "independent": independent(share, block, selections)})
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table of shares of blocks."""
    head = [
        "budget",
        "selection",
        "block size",
        "freed by eviction alone",
        "independent survival",
        "compaction",
        "ideal",
    ]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        shares = [f"{line[name]:.1%}" for name in ("alone", "independent", "compacted", "ideal")]
        rows.append([f"{line['budget']} of {line['tokens']}", line["mode"], str(line["block"]), *shares])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw shares of blocks freed against the block size, a panel for each mode and budget."""
    from matplotlib.figure import Figure

    budgets = list(dict.fromkeys(line["budget"] for line in lines))
    figure = Figure(figsize=(9, 2.4 * len(budgets) + 0.6), layout="constrained")
    grid = figure.subplots(len(budgets), len(MODES), sharex=True, sharey=True, squeeze=False)
    for (i, budget), (j, mode) in ((x, y) for x in enumerate(budgets) for y in enumerate(MODES)):
        axes = grid[i][j]
        own = [line for line in lines if line["budget"] == budget and line["mode"] == mode]
        sizes = [line["block"] for line in own]
        styles = {
            "ideal": {"color": "#999999", "linestyle": ":", "label": "ideal: tokens evicted"},
            "compacted": {"color": "#2a6fbb", "marker": "o", "label": "with compaction"},
            "alone": {"color": "#c0392b", "marker": "o", "label": "eviction alone"},
            "independent": {"color": "#e59866", "linestyle": "--", "label": "independent survival"},
        }
        for name, style in styles.items():
            axes.plot(sizes, [100 * line[name] for line in own], markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{mode}, {budget} of {own[0]['tokens']} kept", fontsize=9)
        axes.set_ylim(-3, 103)
    for row in grid:
        row[0].set_ylabel("blocks freed, %")
    for axes in grid[-1]:
        axes.set_xlabel("block size, slots")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(prog="python scripts/freed_blocks.py", description=__doc__.splitlines()[0])
    made.add_argument("--model", help="as for jaxkv.generate; the demo model by default")
    made.add_argument("--dtype", default="bfloat16", help="of the weights; the pool is float32")
    made.add_argument("--text", action="append", help="as for quality.py")
    made.add_argument("--passages", type=int, default=2, help="of each text")
    made.add_argument("--tokens", type=int, default=2048, help="tokens cached before the eviction")
    made.add_argument("--budgets", type=int, nargs="+", default=[1024, 512, 192])
    made.add_argument("--plot", type=Path, help="draw to this file")
    made.add_argument("--out", type=Path, help="write JSON lines to this file")
    return made


def main() -> int:
    """Measure, draw and print the table."""
    args = parser().parse_args()
    lines = measure(Reader.load(args.model, args.dtype), named(args.text or [PYTHON]), args)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if args.plot is not None:
        plot(lines, args.plot)
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
