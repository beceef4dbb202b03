"""Pictures that commands draw. matplotlib is in the extra ``plot``, and is imported when a picture is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.completion import Completion
    from jaxkv.planner import Plan

_WITH, _WITHOUT, _LIMIT = "#2a6fbb", "#999999", "#b3261e"


def check(path: str | Path) -> None:
    """Refuse a picture that could not be drawn at the end, before work starts.

    Raises:
      ValueError: matplotlib is not installed, the format is unknown, or the folder is not there.
    """
    path = Path(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib, which is not installed: pip install 'jaxkv[plot]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path} must end in .png, .svg or .pdf")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{path} cannot be written: its folder does not exist")


def blocks_held(completions: Sequence[Completion], path: str | Path) -> None:
    """Draw the blocks that each request held against the tokens that it had generated, with and without compaction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for number, done in enumerate(completions):
        tokens = [at for at, _ in done.blocks_history] + [done.generated_tokens]
        blocks = [held for _, held in done.blocks_history] + [done.blocks_history[-1][1]]
        first = number == 0
        # Without compaction a request holds a slot for every token but the newest.
        whole = [-(-max(done.prompt_tokens + at - 1, 1) // done.block_size) for at in range(done.generated_tokens + 1)]
        axes.plot(range(len(whole)), whole, color=_WITHOUT, label="every token kept" if first else None)
        axes.step(tokens, blocks, where="post", color=_WITH, label="held" if first else None)
    axes.set_xlabel("tokens generated")
    axes.set_ylabel(f"blocks of {completions[0].block_size} slots")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def memory_of_tokens(plan: Plan, path: str | Path) -> None:
    """Draw what a plan's rows take against their tokens, with and without its compression, and the device's memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    tokens = sorted({1 + at * (plan.tokens - 1) // 400 for at in range(401)})
    kept = [plan.sizes(plan.rows, at, compressed=False) for at in tokens]
    gib = 2**30
    axes.plot(tokens, [one.total / gib for one in kept], color=_WITHOUT, label="every token kept")
    if plan.budget is not None:
        held = [plan.sizes(plan.rows, at).total / gib for at in tokens]
        compression = plan.compression
        label = f"{compression.method}, budget {plan.budget.b_row}, interval {plan.budget.interval}"
        axes.plot(tokens, held, color=_WITH, label=label)
    fixed = kept[0].weights / gib
    axes.axhline(fixed, color=_WITHOUT, linestyle=":", linewidth=1)
    axes.annotate(f"{plan.weights} weights", (tokens[-1], fixed), ha="right", va="top", color=_WITHOUT)
    memory, full = plan.device.memory / gib, plan.tokens_until_full
    axes.axhline(memory, color=_LIMIT, linewidth=1.2, label=f"{plan.device.name}: {memory:.1f} GiB")
    if full is not None and full < plan.tokens:
        axes.plot([full], [memory], marker="o", color=_LIMIT)
        axes.annotate(
            f"full at {full:,} tokens", (full, memory), xytext=(-6, 6), textcoords="offset points", ha="right"
        )
    axes.set_title(f"{plan.model.name}, batch {plan.rows}", fontsize="medium")
    axes.set_xlabel("tokens of a row")
    axes.set_ylabel("GiB, reserve included")
    axes.set_xlim(0, tokens[-1])
    axes.set_ylim(0, 1.15 * max(memory, kept[-1].total / gib))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
